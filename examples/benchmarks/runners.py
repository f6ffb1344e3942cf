"""Trains with each system: Lightning systems through ``Trainer.fit``, FSDP2 in the plain loop its users write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from captured import CapturedStep, attend_without_mask
from jobs import Job
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from meter import Recorder, StepMeter
from models import (
    COMPUTE_DTYPE,
    Batches,
    LossInPieces,
    block_class,
    build_model,
    convert_to_fp8,
    make_optimizer,
    shard_with_fsdp2,
)
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

TIMEOUT = timedelta(seconds=240)
COMPILE_COUNTERS = ("graphs", "regions_compiled", "regions_total", "compile_seconds")
"""Counters of the strategy's summary that grow from case to case: a case counts with what it added."""


def make_strategy(job: Job) -> Strategy:
    """The strategy of a Lightning system."""
    if job.system.kind.startswith("deepcompile"):
        from lightning_deepcompile import CompileConfig, DeepCompileStrategy

        uncompiled = job.system.kind == "deepcompile-uncompiled"
        options = {"fallback": "warn" if uncompiled else "error", **job.system.options}
        options.pop("recipe", None)
        mesh = options.pop("device_mesh", None)
        if mesh not in (None, "auto"):
            mesh = tuple(int(size) for size in mesh.split("x"))
        if job.system.kind == "deepcompile-fp8-wide":
            from lightning_deepcompile.capture import backend

            backend.derive = lambda *_: ()
        return DeepCompileStrategy(compile=CompileConfig(**options), device_mesh=mesh, timeout=TIMEOUT)
    if job.system.kind == "fsdp":
        # The remaining fast settings are defaults: full shard, backward prefetch, limited gathers, original parameters.
        return FSDPStrategy(auto_wrap_policy={block_class(job.shape)}, forward_prefetch=True, timeout=TIMEOUT)
    return DDPStrategy(timeout=TIMEOUT)


class DecoderModule(pl.LightningModule):
    """A plain module: each epoch is one case, fed from batches that sit on the device."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__()
        self._job, self._rank = job, rank
        self.meter: StepMeter
        self.model: PreTrainedModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build_model(self._job.shape, self.trainer.strategy.root_device)
            if self._job.system.recipe:
                convert_to_fp8(self.model, self._job.system.recipe, self._job.device)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = make_optimizer(self, self._job.shape, self._job.optimizer)
        optimizer.register_step_post_hook(lambda stepped, *_: self.meter.end_optimizer(stepped))
        return optimizer

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.meter.begin_optimizer()

    def train_dataloader(self) -> Batches:
        device = self.trainer.strategy.root_device
        case = self._job.cases[self.trainer.current_epoch]
        self.meter = StepMeter(self._job, case, device, self._rank)
        return Batches(self._job.shape, case, self.meter.total * case.accumulation, self._rank, device)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss


class CaseCallback(pl.Callback):
    """Tells the meter where optimizer steps end, and the recorder where cases do."""

    def __init__(self, job: Job, recorder: Recorder) -> None:
        self._job, self._recorder = job, recorder
        self._steps = 0
        self._compiled: dict[str, float] = {}

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: DecoderModule) -> None:
        self._recorder.start(self._job.cases[trainer.current_epoch])
        pl_module.meter.begin()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: DecoderModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        pl_module.meter.add_loss(outputs["loss"])
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            pl_module.meter.end_step()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: DecoderModule) -> None:
        record = pl_module.meter.record()
        if self._job.system.kind.startswith("deepcompile"):
            record["summary"] = asdict(trainer.strategy.summary())
            if "peak_gib" in record:  # the allocator's
                record["peak_gib"] += record["summary"]["symmetric_bytes"] / 2**30
            counters = {key: record["summary"][key] for key in COMPILE_COUNTERS}
            record["compiled"] = {key: count - self._compiled.get(key, 0) for key, count in counters.items()}
            self._compiled = counters
            rounds = trainer.strategy.report()
            record["rounds"] = list(map(str, rounds))
            record["predicted"] = _prediction(rounds)
            self._recorder.save_profile(self._job.cases[trainer.current_epoch], trainer.strategy.profile())
        self._recorder.save(self._job.cases[trainer.current_epoch], record)
        trainer.should_stop = self._recorder.out_of_time(trainer.strategy.root_device)


def _prediction(rounds: list[Any]) -> dict[str, float]:
    """The prediction of the last plan that was kept; empty without one."""
    kept = [made for made in rounds if made.outcome == "kept" and made.passes]
    if not kept:
        return {}
    last = kept[-1].passes[-1]
    return {
        "ms": last.step_seconds * 1e3,
        "exposed_ms": last.exposed_seconds * 1e3,
        "peak_gib": last.peak_bytes / 2**30,
    }


def run_lightning(job: Job, rank: int, recorder: Recorder) -> None:
    """Trains all cases in one ``fit``, an epoch each."""
    trainer = pl.Trainer(
        accelerator=job.device,
        devices=job.per_node,
        num_nodes=job.nodes,
        strategy=make_strategy(job),
        precision="bf16-mixed" if job.precision == "bf16" else "32-true",
        plugins=[LightningEnvironment()],
        max_epochs=len(job.cases),
        reload_dataloaders_every_n_epochs=1,
        callbacks=[
            GradientAccumulationScheduler({epoch: case.accumulation for epoch, case in enumerate(job.cases)}),
            CaseCallback(job, recorder),
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        use_distributed_sampler=False,
    )
    module = DecoderModule(job, rank)
    if job.system.kind == "deepcompile-uncompiled":
        module.training_step = torch.compiler.disable(module.training_step)
    trainer.fit(module)


def start_process_group(job: Job, rank: int) -> torch.device:
    """Joins the group of a system that does without Lightning, if none is there; returns this rank's device."""
    device = torch.device("cuda", rank % job.per_node) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        cuda = device.type == "cuda"
        dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT, device_id=device if cuda else None)
    return device


def run_fsdp2(job: Job, rank: int, recorder: Recorder) -> None:
    """Trains all cases with ``fully_shard``, one model for all of them; leaves a process group that was there."""
    joined = dist.is_initialized()
    device = start_process_group(job, rank)
    captured = job.system.kind == "fsdp2-graphs"
    keep = job.system.kind == "fsdp2-noreshard" or job.system.options.get("reshard") is False
    dtype = COMPUTE_DTYPE[job.precision]
    in_pieces = job.system.kind == "fsdp2-pieces"
    model: Any = build_model(job.shape, device)
    if captured:
        attend_without_mask(model)
    narrow = job.system.kind == "fsdp2-fp8"
    if job.system.recipe:
        convert_to_fp8(model, job.system.recipe, job.device, gathers=narrow)
    if in_pieces:
        model = LossInPieces(model, int(job.system.options.get("pieces", 8)))
    if job.system.kind == "fsdp2-hsdp":
        mesh = init_device_mesh(job.device, (job.nodes, job.per_node), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh(job.device, (job.world,))
    shard_with_fsdp2(
        model,
        model.model.layers,
        mesh,
        dtype,
        compiled=job.system.kind != "fsdp2-eager",
        keep=keep,
        offload=job.system.kind == "fsdp2-offload",
    )
    optimizer = make_optimizer(model, job.shape, job.optimizer)

    def compute(micro_batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        losses = []
        for micro, tokens in enumerate(micro_batches):
            last = micro == len(micro_batches) - 1
            model.set_is_last_backward(last)
            if keep:
                model.set_reshard_after_backward(last)
                model.set_requires_gradient_sync(last)
            output = model(input_ids=tokens, labels=tokens)
            loss = (output if in_pieces else output.loss) / len(micro_batches)
            loss.backward()
            losses.append(loss.detach())
        return losses

    for case in job.cases:
        if recorder.out_of_time(device):
            break
        meter = StepMeter(job, case, device, rank)
        batches = iter(Batches(job.shape, case, meter.total * case.accumulation, rank, device))
        recorder.start(case)
        meter.begin()
        step = None if captured else compute
        for _ in range(meter.total):
            micro_batches = [next(batches) for _ in range(case.accumulation)]
            if step is None:
                step = CapturedStep(model, compute, micro_batches)
            for loss in step(micro_batches):
                meter.add_loss(loss)
            meter.begin_optimizer()
            optimizer.step()
            if narrow:
                from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

                precompute_float8_dynamic_scale_for_fsdp(model)
            meter.end_optimizer(optimizer)
            if not captured:
                optimizer.zero_grad()
            meter.end_step()
        record = meter.record()
        record["dynamo_graphs"] = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
        recorder.save(case, record)
    if not joined:
        dist.destroy_process_group()
