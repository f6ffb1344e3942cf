"""Shards of parameters in pinned host memory, on GPUs: the same training, less memory, no waiting for the host."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import VOCAB, full, same_bits_every_time
from init_memory import Peak, peak_of_init
from multiprocess import GPU_RANKS, devices, run_ranks
from test_materialize import MIB, Heavy
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

STEPS, LIMIT = 6, timedelta(seconds=60)

SHARDS: dict[str, Any] = {"offload": ["parameters"]}
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "shards": SHARDS,
    "everything": {"offload": "all"},
}


class Wide(pl.LightningModule):
    """Some hundred MiB of parameters, and little else."""

    def __init__(self) -> None:
        super().__init__()
        from gpt import GPT

        self.net = GPT(layers=6, width=1024, heads=8, vocabulary=VOCAB)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


class Watch(pl.Callback):
    """Remembers losses and memory between steps, and forbids host synchronisation in the last ones."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.allocated = 0
        self.peak = 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.reset_peak_memory_stats()
        if self.strict and batch_idx >= STEPS - 2:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("default")
        module.losses.append(outputs["loss"].detach().clone())
        self.allocated = torch.cuda.memory_allocated()
        self.peak = torch.cuda.max_memory_allocated()


def _check_where_shards_are(strategy: Any, hosted: bool) -> None:
    for parameter in strategy.engine.model.parameters:
        assert parameter.local.is_cuda and (parameter.host is not None) == hosted
        if hosted:
            assert parameter.host.is_pinned() and torch.equal(parameter.local.cpu(), parameter.host)


def _train_once(mode: str, precision: str) -> dict[str, Any]:
    """Trains in its own scope: all references to a model must be gone before the next one's memory is measured."""
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(rank)
    batches = list(torch.randint(0, VOCAB, (STEPS, 4, 129), generator=generator).cuda(int(os.environ["LOCAL_RANK"])))
    torch.manual_seed(0)
    module, watch = Wide(), Watch(strict=mode == "shards")
    strategy = DeepCompileStrategy(timeout=LIMIT, compile=CompileConfig(schedule=None, **MODES[mode]))
    trainer = pl.Trainer(
        strategy=strategy, accelerator="gpu", **devices(GPU_RANKS), precision=precision, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[watch],
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    torch.cuda.synchronize()
    _check_where_shards_are(strategy, hosted=mode != "none")
    return {
        "losses": torch.stack(module.losses).tolist(),
        "params": {name: full(p) for name, p in module.named_parameters()},
        "state": {name: value.cpu() for name, value in strategy.lightning_module_state_dict().items()},
        "allocated": watch.allocated,
        "peak": watch.peak,
        "summary": strategy.summary(),
    }


def _train(precision: str) -> dict[str, Any]:
    same_bits_every_time()
    results = {}
    for mode in MODES:
        results[mode] = _train_once(mode, precision)
        gc.collect()
    plain = results["none"]
    for mode in ("shards", "everything"):
        for kind in ("params", "state"):
            assert results[mode][kind].keys() == plain[kind].keys()
            pairs = {name: (value, results[mode][kind][name]) for name, value in plain[kind].items()}
            others = {name: (a - b).abs().max().item() for name, (a, b) in pairs.items() if not torch.equal(a, b)}
            assert not others, f"{mode}: {kind} differ by {others}; losses {results[mode]['losses'], plain['losses']}"
    for result in results.values():
        del result["params"], result["state"]
    return results


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_shards_leave_the_device_and_no_bit_changes(precision: str) -> None:
    for results in run_ranks(_train, GPU_RANKS, precision, timeout=380):
        plain, shards, everything = (results[mode] for mode in MODES)
        assert plain["losses"] == shards["losses"] == everything["losses"]
        size = plain["summary"].sharded_bytes_per_rank
        assert plain["summary"].offloaded_parameter_bytes == 0
        for result in (shards, everything):
            assert result["summary"].offloaded_parameter_bytes == size
            assert result["summary"].fetched_parameter_bytes > size  # in forward, and again in backward
        assert everything["summary"].offload_moved_bytes > 2 * size
        assert 0.8 * size < plain["allocated"] - shards["allocated"] < 1.1 * size, results
        # Two of the seven blocks' shards are on their way to a gather at any time.
        assert plain["peak"] - shards["peak"] > 0.5 * size, results
        assert plain["allocated"] - everything["allocated"] > 2.5 * size, results  # Adam's states have left, too


def _peak() -> Peak:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    config = CompileConfig(region_backend="eager", **SHARDS)
    return peak_of_init(Heavy(), lambda: DeepCompileStrategy(timeout=LIMIT, compile=config), "gpu")


def test_a_deferred_model_goes_straight_to_host_memory() -> None:
    for peak in run_ranks(_peak, GPU_RANKS, timeout=200):
        assert peak.shard == 10 * 36 * MIB // GPU_RANKS
        assert peak.device <= 0.6 * peak.shard, f"{peak.device / MIB:.0f} MiB of the device"
