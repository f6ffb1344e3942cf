"""What a profiler of PyTorch's shows of a step: programs, regions and blocks, collectives and parameters."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from cases import CASES, train
from multiprocess import run_ranks


class _Profiles(pl.Callback):
    def __init__(self) -> None:
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.names: list[str] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.profiler.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.profiler.stop()
            self.names = [event.name for event in self.profiler.events() if event.name.startswith("deepcompile: ")]


def _profiled() -> tuple[list[str], list[float], list[float]]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    losses, profiles = [], _Profiles()
    for callbacks in ([], [profiles]):
        config = CompileConfig(region_backend="eager", schedule=None)
        record = train(
            CASES["gpt"], DeepCompileStrategy(compile=config), world_size=2, rank=int(os.environ["RANK"]),
            callbacks=callbacks,
        )  # fmt: skip
        losses.append(record.losses)
    return profiles.names, *losses


def test_names_are_those_of_programs_regions_and_parameters() -> None:
    for names, plain, profiled in run_ranks(_profiled, 2):
        assert plain == profiled
        told = [name.removeprefix("deepcompile: ") for name in names]
        assert told.count("frame0.forward") == told.count("frame0.backward") == 1
        regions = [name for name in told if name.startswith("frame0.forward region")]
        assert any("net.blocks.1" in region for region in regions), regions
        assert any(name.startswith("gather of 'net.blocks.0") for name in told), told
        assert any(name.startswith("reduction of 'net.blocks.1") for name in told), told
