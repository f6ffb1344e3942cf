"""The summary contains the peak from before plans were measured, though measuring resets the allocator's peak."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import Mlp, train
from multiprocess import GPU_RANKS, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

_LARGE = 256 << 20


class _TakesMuchOnce(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            torch.empty(_LARGE, dtype=torch.uint8, device=module.device)


def _peaks() -> tuple[int, int]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    torch.cuda.reset_peak_memory_stats()
    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager", memory_budget="4GiB"))
    record = train(
        Mlp, strategy, world_size=GPU_RANKS, rank=int(os.environ["RANK"]), steps=12, accelerator="gpu",
        callbacks=[_TakesMuchOnce()], inspect=lambda trainer: trainer.strategy.summary().peak_bytes,
    )  # fmt: skip
    assert strategy.report(), "steps were measured"
    return record.extra, torch.cuda.max_memory_allocated()


def test_the_summary_has_the_peak_of_the_whole_training() -> None:
    for highest, of_the_allocator in run_ranks(_peaks, GPU_RANKS, timeout=240):
        assert of_the_allocator < _LARGE < highest
