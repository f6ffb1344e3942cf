"""PyTorch's profiler shows a step's programs, regions and blocks, collectives and parameters."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
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
            self.names = [event.name for event in self.profiler.events()]


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
        told = [name.removeprefix("deepcompile: ") for name in names if name.startswith("deepcompile: ")]
        assert told.count("frame0.forward") == told.count("frame0.backward") == 1
        regions = [name for name in told if name.startswith("frame0.forward region")]
        assert any("net.blocks.1" in region for region in regions), regions
        assert any(name.startswith("gather of 'net.blocks.0") for name in told), told
        assert any(name.startswith("reduction of 'net.blocks.1") for name in told), told


def _profiler_stops_before_the_answer() -> set[str]:
    from lightning_deepcompile.ranks.exchange import AnyRank

    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    asked = AnyRank(group)
    if dist.get_rank() == 1:
        time.sleep(1)  # so that the operation of the first rank ends after its profiler
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        answer = asked.ask(True)
    assert answer() == [True]
    dist.destroy_process_group()
    return {event.name for event in profiler.events()}


def test_no_operation_outlives_the_profile_that_it_is_in() -> None:
    """torch.distributed would write into a profile that is gone."""
    for names in run_ranks(_profiler_stops_before_the_answer, 2):
        assert not [name for name in names if name.startswith("gloo:")]
