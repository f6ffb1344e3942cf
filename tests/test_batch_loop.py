"""Lightning's question before every batch, whether to stop: asked beside the stream that computes, and answered."""

from __future__ import annotations

import inspect
import os
import signal
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import CASES, train
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException
from multiprocess import run_ranks

from lightning_deepcompile.batch_loop import let_host_run_ahead


def test_lightning_asks_where_we_expect_it() -> None:
    """Else the host waits for the device again, and nobody notices."""
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)


def test_loops_that_are_not_lightnings_and_devices_without_streams_are_left_alone() -> None:
    class Own(_TrainingEpochLoop):
        pass

    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    let_host_run_ahead(trainer, torch.device("cpu"))
    assert type(trainer.fit_loop.epoch_loop) is _TrainingEpochLoop
    trainer.fit_loop.epoch_loop.__class__ = Own
    let_host_run_ahead(trainer, torch.device("cuda", 0))
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
    loop = "_TrainingEpochLoop" if accelerator == "cpu" else "_BatchLoop"
    assert run_ranks(_stopped, 2, accelerator, timeout=120) == [(3, loop), (3, loop)]
