"""The output of a training about itself: lines in the log, figures for the Trainer's loggers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from cases import LENGTH, ROWS, VOCAB, Mlp, Tokens
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileMonitor, DeepCompileStrategy
from lightning_deepcompile.trainer.progress import CompileProgress


class Kept(DummyLogger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.kept.append((step, dict(metrics)))


def fit(strategy: Any, monitor: DeepCompileMonitor, logger: Any) -> None:
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=3, logger=logger,
        callbacks=[monitor], enable_checkpointing=False, enable_progress_bar=False, val_check_interval=4,
    )  # fmt: skip
    train, val = (DataLoader(Tokens(batches, ROWS, 0, 1), batch_size=ROWS) for batches in (9, 1))
    trainer.fit(Mlp(), train, val)


def test_figures_and_lines_of_a_training(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    logger, monitor = Kept(), DeepCompileMonitor(prefix="dc/")
    config = CompileConfig(region_backend="eager", log_level="info")
    fit(DeepCompileStrategy(compile=config), monitor, logger)
    logged = [(step, metrics) for step, metrics in logger.kept if "dc/step_ms" in metrics]
    assert [step for step, _ in logged] == [3, 6, 9]
    figures = logged[-1][1]
    assert {f"dc/{name}": value for name, value in monitor.latest.items()} == figures
    assert 0 < figures["dc/host_ms"] <= figures["dc/step_ms"] and figures["dc/host_gib"] > 0
    assert figures["dc/recompilations"] == figures["dc/moved_gib"] == 0
    rows, seconds = figures["dc/samples_per_s"], figures["dc/step_ms"] / 1e3
    assert rows * seconds == pytest.approx(ROWS) and figures["dc/tokens_per_s"] == pytest.approx(rows * (LENGTH + 1))
    linear = 3 * (13 * 17 + 17 * 13) + 13 * VOCAB  # each weight: two operations forward, four backward
    assert figures["dc/tflops"] * 1e12 * seconds == pytest.approx(6 * linear * ROWS * LENGTH)

    said = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_deepcompile")]
    for name in ("validation_step", "training_step"):
        (begin,) = (i for i, text in enumerate(said) if text.startswith(f"Compiling `{name}`"))
        assert said[begin + 1].startswith(f"Compiled `{name}` in "), said
    printed = capsys.readouterr().out
    assert "Linear" in printed and "Sharded" not in printed  # the model's summary


def test_another_strategy_is_not_measured() -> None:
    with pytest.raises(MisconfigurationException, match="measures DeepCompileStrategy, not SingleDeviceStrategy"):
        fit("auto", DeepCompileMonitor(), None)


def test_what_is_compiled_again_is_said_and_what_takes_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "lightning_deepcompile")
    capture: Any = SimpleNamespace(
        progress=None, frames=SimpleNamespace(compiled=0), regions=SimpleNamespace(requested=0, compiled=0)
    )  # fmt: skip
    progress = CompileProgress()

    def compile_one(equal: bool) -> None:
        capture.progress("compiling frame0.forward, region 1/1")
        capture.frames.compiled += 1
        capture.regions.requested += 1
        capture.regions.compiled += not equal

    with progress.shown(capture, "training_step", first=True, ends=False):
        compile_one(equal=False)
    with progress.shown(capture):  # its backward pass
        compile_one(equal=True)
    with progress.shown(capture, "training_step", ends=False):
        pass
    assert [text.partition(" in ")[0] for text in caplog.messages] == [
        "Compiling `training_step`: its first call takes longer.", "Compiled `training_step`"
    ]  # fmt: skip
    assert caplog.messages[-1].endswith("2 programs, 1 of 2 regions (equal ones once).")
    caplog.clear()
    monkeypatch.setattr("lightning_deepcompile.trainer.progress._QUIET_SECONDS", -1.0)
    with progress.shown(capture, "validation_step"):
        compile_one(equal=False)
    with progress.shown(capture, "test_step", first=True):
        pass
    assert caplog.messages[:2] == [
        "Compiling `validation_step` again, for other shapes or attributes.",
        "Still compiling frame0.forward, region 1/1.",
    ]
    assert caplog.messages[2].endswith("s: 1 program, 1 of 1 regions.")
    assert caplog.messages[-1] == "Nothing of `test_step` was compiled: it runs as Python."
