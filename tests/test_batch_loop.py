"""Lightning's question before every batch, whether to stop: asked past the devices, and answered a batch later."""

from __future__ import annotations

import inspect
import os
import signal
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from cases import CASES, train
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException
from multiprocess import run_ranks
from torch.distributed.device_mesh import DeviceMesh

from lightning_deepcompile.batch_loop import let_host_run_ahead


def test_lightning_asks_where_we_expect_it() -> None:
    """Else the host waits for the device again, and nobody notices."""
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)


def test_loops_that_are_not_lightnings_are_left_alone(mesh: DeviceMesh) -> None:
    class Own(_TrainingEpochLoop):
        pass

    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.fit_loop.epoch_loop.__class__ = Own
    let_host_run_ahead(trainer, mesh.get_group())
    assert type(trainer.fit_loop.epoch_loop) is Own


class StopThere(pl.Callback):
    """Every rank is told to stop in the third step, as a scheduler tells all processes of a job."""

    def __init__(self) -> None:
        self.loop, self.steps = "", 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.loop = type(trainer.fit_loop.epoch_loop).__name__
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self.steps = trainer.global_step


def _stopped(accelerator: str) -> tuple[int, str]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    stop, strategy = StopThere(), DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    with pytest.raises(SIGTERMException):
        train(
            CASES["mlp"], strategy, world_size=2, rank=int(os.environ["RANK"]), steps=8, accelerator=accelerator,
            callbacks=[stop],
        )  # fmt: skip
    return stop.steps, stop.loop


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_all_ranks_stop_together(accelerator: str) -> None:
    assert run_ranks(_stopped, 2, accelerator, timeout=120) == [(3, "_BatchLoop"), (3, "_BatchLoop")]


def _told_one() -> list[str]:
    """Rank 1's loop alone has seen a SIGTERM before the second batch: what every batch's question leads to."""
    dist.init_process_group("gloo")
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    loop = trainer.fit_loop.epoch_loop
    seen = []
    for _ in range(2):  # a second fit begins with no answer
        let_host_run_ahead(trainer, dist.group.WORLD)
        for batch in range(4):
            trainer._signal_connector.received_sigterm = dist.get_rank() == 1 and batch == 1
            try:
                loop._broadcast_sigterm_tensor()
                seen.append("goes on")
            except SIGTERMException:
                seen.append("stops")
                break
    dist.destroy_process_group()
    return seen


def test_who_was_not_told_stops_before_the_batch_after() -> None:
    assert run_ranks(_told_one, 2) == [["goes on", "goes on", "stops"] * 2] * 2
