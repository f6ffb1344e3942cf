"""Programs as CUDA graphs: in every bit what they are without."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import CASES, VOCAB, Base, Record, Recorder, Tokens, devices, same_bits_every_time, train
from multiprocess import RankError, run_ranks
from shuffle import KEEPING
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]


class Dropped(Base):
    """Draws random numbers, and writes to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, VOCAB)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.2, self.training)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Bucketed(Dropped):
    """Rows are padded to one of a few lengths before the step."""

    lengths: tuple[int, ...] = (13, 9, 5)

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.batches += 1
        return batch[:, : self.lengths[self.batches % len(self.lengths)]].contiguous()


class Keeps(pl.Callback):
    """Has forward programs leave their last group gathered for backward."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        trainer.strategy.engine.capture.scheduling.replan(passes=KEEPING)


class Scheduled(Dropped):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Fused(Dropped):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layers.parameters()}, {"params": [self.embed.weight], "weight_decay": 0.0}]
        groups.append({"params": [*self.norm.parameters(), *self.head.parameters()]})
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)


class Annealed(Dropped):
    """Another learning rate in every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TwoPasses(Dropped):
    """The same program runs twice before its backward pass: the second run must not touch what the first one saved."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses = [self._loss(batch[:, shift : shift + 8]) for shift in (0, 2)]
        self.log("loss", losses[0])
        return losses[0] + losses[1] * 2

    def _loss(self, tokens: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        loss = F.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        torch._dynamo.graph_break()
        return loss


@torch.library.custom_op("deepcompile_tests::largest", mutates_args=())
def largest(x: Tensor) -> Tensor:
    """Makes the host wait, without declaring so."""
    return x.new_tensor(float(x.abs().max()))


@largest.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(())


class ReadsOnHost(Dropped):
    """Cannot be recorded."""

    def logits(self, tokens: Tensor) -> Tensor:
        logits = super().logits(tokens)
        return logits + 0.01 * largest(logits.detach())


class Evaluates(pl.Callback):
    """Runs the model for itself between two training steps, as a callback that samples does."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 13:
            module.eval()
            with torch.no_grad():
                trainer.strategy.validation_step(batch, 0)
            module.train()


class Meanwhile(pl.Callback):
    """Between steps: a graph of the user's own, other programs, and memory that is given back."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                x.add_(1)
            graph.replay()
            assert x.eq(1).all()
        elif batch_idx == 7:
            trainer.strategy.engine.capture.scheduling.replan()
        elif batch_idx == 13:
            torch.cuda.empty_cache()


MODELS = {
    **CASES,
    "dropped": Dropped,
    "bucketed": Bucketed,
    "fused": Fused,
    "scheduled": Scheduled,
    "annealed": Annealed,
    "two_passes": TwoPasses,
    "reads": ReadsOnHost,
}

RUNS: list[tuple[str, int, dict[str, Any]]] = [
    ("scheduled", 3, {"accumulate": 1, "gradient_clip_val": 0.5, "steps": 16}),
    ("annealed", 3, {"accumulate": 3, "gradient_clip_val": 0.5, "steps": 16, "precision": "bf16-mixed"}),
    ("annealed", 1, {"gradient_clip_val": 0.5, "steps": 16}),
    ("dropped", 3, {"accumulate": 3, "gradient_clip_val": 0.5, "callbacks": [Evaluates()]}),
    ("dropped", 2, {"accumulate": 3}),
    ("bucketed", 3, {"steps": 21}),
    ("dropped", 1, {"accumulate": 3}),
    ("gpt_tied", 1, {"optimizer": "adamw"}),
    ("dropped", 3, {"steps": 16, "callbacks": [Meanwhile()]}),
    ("frozen", 3, {}),
    ("graph_break", 3, {}),
    ("two_passes", 3, {}),
    ("fused", 3, {"steps": 16, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}),
    ("reads", 3, {}),
    ("llama_checkpointing", 3, {"precision": "bf16-mixed"}),
]


def _replayed(trainer: pl.Trainer) -> SimpleNamespace:
    replays = trainer.strategy.engine.capture.replays
    names = set() if replays is None else set(replays.replayed)
    kept = any(one.program.kept for one in trainer.strategy.engine.capture.frames.executables)
    return SimpleNamespace(names=names, not_replayed=trainer.strategy.summary().not_replayed, kept=kept)


def _run(number: int, graphs: bool, world: int) -> Record:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    name, stage, options = RUNS[number]
    config = CompileConfig(region_backend="inductor" if number == 0 else "eager", cuda_graphs=graphs, schedule=None)
    torch._dynamo.reset()
    return train(
        MODELS[name],
        DeepCompileStrategy(stage=stage, compile=config, timeout=timedelta(seconds=60)),
        world_size=world,
        rank=int(os.environ["RANK"]),
        inspect=_replayed,
        accelerator="gpu",
        **{"steps": 7, **options, "callbacks": [Keeps(), *options.get("callbacks", [])]},
    )


def _train_all(world: int) -> list[tuple[Record, Record]]:
    same_bits_every_time()
    return [(_run(number, False, world), _run(number, True, world)) for number in range(len(RUNS))]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_bit_changes(world: int) -> None:
    for pairs in run_ranks(_train_all, world, world, timeout=450):
        for (name, stage, options), (plain, replayed) in zip(RUNS, pairs, strict=True):
            case = f"{name} at stage {stage} with {options}: {replayed.extra}"
            assert replayed.losses == plain.losses, case
            for step, (left, right) in enumerate(zip(plain.grads, replayed.grads, strict=True)):
                for key, grad in left.items():
                    other = right[key]
                    assert (grad is None) == (other is None), f"step {step}, {key}: {case}"
                    assert grad is None or torch.equal(grad, other), f"step {step}, {key}: {case}"
            for key, value in plain.params.items():
                assert torch.equal(value, replayed.params[key]), f"{key}: {case}"
            for key, value in plain.buffers.items():
                assert torch.equal(value, replayed.buffers[key]), f"{key}: {case}"
            names = replayed.extra.names
            assert not plain.extra.names and plain.extra.kept and replayed.extra.kept, case
            if name == "reads":
                assert not names and len(replayed.extra.not_replayed) == 1, case
            else:
                left = ("AdamW.step: it counts on the host: fused=True counts on the device",)
                assert names, case
                assert replayed.extra.not_replayed == (left if name == "gpt_tied" else ()), case
            if name in ("fused", "scheduled", "annealed"):
                clipping = {"clipping"} if world == 1 else {"clipping.norm", "clipping.scale"}
                own = {"frame0.forward", "frame0.backward", *clipping}
                assert names == ({*own, "AdamW.step"} if name == "fused" else own), case


class Sleeps(pl.Callback):
    """Makes the host late, whatever else the machine does."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.03)


def _auto() -> Any:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    config = CompileConfig(cuda_graphs="auto", schedule=None)
    strategy = DeepCompileStrategy(compile=config, timeout=timedelta(seconds=60))
    outcomes: list[str] = []

    def inspect(trainer: pl.Trainer) -> Any:
        outcomes.append(trainer.strategy.engine.capture.replays.outcome)
        return trainer.strategy.summary()

    record = train(
        CASES["llama"],
        strategy,
        world_size=1,
        rank=0,
        steps=110,
        inspect=inspect,
        accelerator="gpu",
        precision="bf16-mixed",
        callbacks=[Sleeps()],
    )
    return record.extra.replayed, outcomes[0]


def test_auto_tries_graphs_where_the_host_is_late() -> None:
    """Graphs may or may not be faster beside other work: `test_replay.py` tests the consequences."""
    ((replayed, outcome),) = run_ranks(_auto, 1)
    assert replayed == 3 and "ms a step" in outcome, (replayed, outcome)


def fifty_steps(folder: str, graphs: bool, accelerator: str, callbacks: list[pl.Callback]) -> tuple[list[float], Any]:
    """25 steps with evaluation in between, a checkpoint, and 25 more of another Trainer: losses, and parameters."""
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path, losses, recorder = f"{folder}/{graphs}.ckpt", [], Recorder()
    for first in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(3)
        recorder = Recorder()
        graphs_too = graphs and accelerator == "gpu"
        config = CompileConfig(region_backend="eager", schedule=None, cuda_graphs=graphs_too)
        trainer = pl.Trainer(
            strategy=DeepCompileStrategy(compile=config, timeout=timedelta(seconds=60)),
            accelerator=accelerator, max_steps=25 if first else 50, callbacks=[recorder, *callbacks],
            logger=False, gradient_clip_val=0.5, val_check_interval=10, limit_val_batches=2, num_sanity_val_steps=0,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, **devices(world),
        )  # fmt: skip
        batches = DataLoader(Tokens(50, 2 * world, rank, world), batch_size=2)
        trainer.fit(Scheduled(), batches, batches, ckpt_path=None if first else path)
        if first:
            trainer.save_checkpoint(path)
        losses += recorder.record.losses
    return losses, {**recorder.record.params, **recorder.record.buffers}


def equal_after_fifty_steps(plain: tuple[list[float], Any], replayed: tuple[list[float], Any]) -> None:
    """Compares losses and tensors bit by bit."""
    assert len(plain[0]) == 50 and replayed[0] == plain[0]
    assert all(torch.equal(value, replayed[1][name]) for name, value in plain[1].items())


def _fifty(folder: str) -> list[Any]:
    same_bits_every_time()
    return [fifty_steps(folder, graphs, "gpu", []) for graphs in (False, True)]


@pytest.mark.parametrize("world", [1, 2])
def test_fifty_steps_saved_and_resumed(world: int, tmp_path: Any) -> None:
    for plain, replayed in run_ranks(_fifty, world, str(tmp_path), timeout=400):
        equal_after_fifty_steps(plain, replayed)


class Memory(pl.Callback):
    """Bytes of the device, reserved ones too, and of the host at its highest, at some steps."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps
        self.seen: list[tuple[int, int, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self._steps:
            gc.collect()
            host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self.seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), host))


def _two_thousand() -> tuple[list[tuple[int, int, int]], int]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    memory = Memory(100, 1990)
    config = CompileConfig(region_backend="eager", schedule=None, cuda_graphs=True)
    trainer = pl.Trainer(
        strategy=DeepCompileStrategy(compile=config, timeout=timedelta(seconds=60)),
        accelerator="gpu", max_steps=2000, callbacks=[memory], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        **devices(int(os.environ["WORLD_SIZE"])),
    )  # fmt: skip
    trainer.fit(Scheduled(), DataLoader(Tokens(2000, 4, int(os.environ["RANK"]), 2), batch_size=2))
    return memory.seen, trainer.strategy.summary().replayed


def test_two_thousand_steps_take_no_more_memory() -> None:
    for ((device, reserved, host), (device_later, reserved_later, host_later)), replayed in run_ranks(
        _two_thousand, 2, timeout=400
    ):
        assert replayed == 2
        assert device_later == device and reserved_later == reserved
        assert host_later - host < 16 * 2**20  # Lightning's own lists, and the like


class Dies(pl.Callback):
    """One rank ends between two replays, without a word."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 12 and trainer.global_rank == 1:
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)


def _dying() -> None:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    config = CompileConfig(region_backend="eager", schedule=None, cuda_graphs=True)
    strategy = DeepCompileStrategy(compile=config, timeout=timedelta(seconds=10))
    train(
        Scheduled, strategy, world_size=2, rank=int(os.environ["RANK"]), steps=40, accelerator="gpu", callbacks=[Dies()]
    )


def test_a_rank_that_is_killed_between_replays_ends_the_others() -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        run_ranks(_dying, 2, timeout=200)
    assert time.monotonic() - begin < 150
