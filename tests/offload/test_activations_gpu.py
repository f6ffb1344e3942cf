"""Activations in pinned host memory, on GPUs: the same losses, less memory, no step that waits for the host."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import VOCAB, same_bits_every_time
from multiprocess import GPU_RANKS, run_ranks
from test_gpu import LIMIT, Curve, _fit
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

STEPS = 12
PLANNED = 5  # the first step that follows the plan


class Peaks(pl.Callback):
    """The most memory of every step, and no host synchronisation in the last ones."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.reset_peak_memory_stats()
        if batch_idx >= STEPS - 2:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self.bytes.append(torch.cuda.max_memory_allocated())


def _batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randint(0, VOCAB, (STEPS, 32, 257), generator=generator).cuda(int(os.environ["LOCAL_RANK"])))


def _train(budget: int | None) -> dict[str, Any]:
    """Trains with what `budget` asks for, or, if there is none, with nothing and with everything in host memory."""
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    same_bits_every_time()
    modes: dict[str, dict[str, Any]] = {"none": {"schedule": None}}
    if budget is None:
        modes["all"] = {"schedule": None, "offload": ["activations"]}
    else:
        modes = {"auto": {"offload": "auto", "memory_budget": budget}}
    results = {}
    for mode, options in modes.items():
        torch.manual_seed(0)
        module, peaks = Curve(layers=12), Peaks()
        strategy = DeepCompileStrategy(timeout=LIMIT, compile=CompileConfig(**options))
        _fit(module, strategy, _batches(int(os.environ["RANK"])), [peaks])
        results[mode] = {
            "losses": torch.stack(module.losses).tolist(),
            "peaks": peaks.bytes,
            "moved": strategy.summary().offloaded_activation_bytes,
            "rounds": strategy.report(),
        }
    return results


def test_activations_leave_the_device_and_no_loss_changes() -> None:
    fixed = run_ranks(_train, GPU_RANKS, None, timeout=200)
    for result in fixed:
        none, everything = result["none"], result["all"]
        assert everything["losses"] == none["losses"]
        assert none["moved"] == 0 < everything["moved"]
        # Those of three of the twelve blocks are there at any time: one computes, and those of two are on their way.
        assert none["peaks"][-1] - everything["peaks"][-1] > 0.5 * everything["moved"]
    least, most = (max(result[mode]["peaks"][-1] for result in fixed) for mode in ("all", "none"))
    budget = (least + most) // 2
    for result, plain in zip(run_ranks(_train, GPU_RANKS, budget, timeout=190), fixed, strict=True):
        auto = result["auto"]
        assert auto["losses"] == plain["none"]["losses"]
        (done,) = auto["rounds"]
        assert done.outcome == "kept" and 0 < auto["moved"] < plain["all"]["moved"], str(done)
        assert max(auto["peaks"][PLANNED:]) <= budget, str(done)
