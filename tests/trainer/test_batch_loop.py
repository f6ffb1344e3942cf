"""Ranks ask each other past the devices whether to stop, and all get the same answer."""

from __future__ import annotations

import inspect
import os
import signal
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from cases import train
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException
from multiprocess import run_ranks
from test_handover import Small

from lightning_deepcompile.trainer.batch_loop import let_host_run_ahead


def test_lightning_asks_and_stops_where_we_expect_it() -> None:
    """Else the host waits for the device again, or ranks stop apart from each other, and nobody notices."""
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    assert inspect.getsource(_TrainingEpochLoop.on_advance_end).rstrip().endswith("raise SIGTERMException")


class Own(_TrainingEpochLoop):
    """A user's."""


def _kind_of_loops() -> list[str]:
    dist.init_process_group("gloo")
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    kinds = []
    for kind in (Own, _TrainingEpochLoop):
        trainer.fit_loop.epoch_loop.__class__ = kind
        for _ in range(2):
            let_host_run_ahead(trainer, dist.get_world_size())
            kinds.append(type(trainer.fit_loop.epoch_loop).__name__)
    dist.destroy_process_group()
    return kinds


def test_loops_that_are_not_lightnings_are_left_alone() -> None:
    assert run_ranks(_kind_of_loops, 1) == [["Own", "Own", "_TrainingEpochLoop", "_TrainingEpochLoop"]]
    assert run_ranks(_kind_of_loops, 2) == [["Own", "Own", "_BatchLoop", "_BatchLoop"]] * 2


class StopThere(pl.Callback):
    """Tells a rank to stop within a batch."""

    def __init__(self, batch: int | None) -> None:
        self.batch, self.loop, self.steps = batch, "", 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.loop = type(trainer.fit_loop.epoch_loop).__name__
        if batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self.steps = trainer.global_step


def _stopped(accelerator: str, told: dict[int, int]) -> tuple[int, str]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    rank = int(os.environ["RANK"])
    stop, strategy = StopThere(told.get(rank)), DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    with pytest.raises(SIGTERMException):
        train(
            Small, strategy, world_size=2, rank=rank, steps=8, accelerator=accelerator, callbacks=[stop]
        )  # fmt: skip
    return stop.steps, stop.loop


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "told",
    [
        pytest.param({0: 2, 1: 2}, marks=pytest.mark.extensive),
        {1: 2},
        pytest.param({0: 2, 1: 3}, marks=pytest.mark.extensive),
    ],
    ids=["all", "one_earlier", "one"],
)
def test_all_ranks_stop_together(accelerator: str, told: dict[int, int]) -> None:
    assert run_ranks(_stopped, 2, accelerator, told, timeout=120) == [(3, "_BatchLoop")] * 2
