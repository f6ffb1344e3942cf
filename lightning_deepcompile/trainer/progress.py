"""While a step compiles, Lightning's progress bar says what: the first step takes a while, and would look stuck."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_deepcompile.capture.backend import Capture

__all__ = ["CompileProgress"]


class CompileProgress:
    """Shows compilation in the description of the bar that is running; other kinds of bars are left alone.

    Args:
        trainer: Whose progress bar it is; without one nothing is shown.
    """

    def __init__(self, trainer: pl.Trainer | None = None) -> None:
        self._trainer = trainer
        self._bar: _Bar | None = None
        self._description = ""

    @contextlib.contextmanager
    def shown(self, capture: Capture) -> Iterator[None]:
        """For the duration, what `capture` compiles is shown; afterwards the bar is as it was. May be nested."""
        if capture.progress is not None:
            yield
            return
        capture.progress = self._show
        try:
            yield
        finally:
            capture.progress = None
            if self._bar is not None:
                self._bar.describe(self._description)
                self._bar = None

    def _show(self, text: str) -> None:
        if self._bar is None:
            self._bar = self._running_bar()
            if self._bar is None:
                return
            self._description = self._bar.description
        self._bar.describe(text)

    def _running_bar(self) -> _Bar | None:
        trainer = self._trainer
        callback = trainer.progress_bar_callback if trainer is not None else None
        if not isinstance(callback, TQDMProgressBar | RichProgressBar) or not callback.is_enabled:
            return None
        assert trainer is not None
        kind = "train" if trainer.training else "val" if trainer.validating or trainer.sanity_checking else "test"
        kind = "predict" if trainer.predicting else kind
        if isinstance(callback, TQDMProgressBar):
            return _TqdmBar(getattr(callback, f"{kind}_progress_bar"))
        kind = "val_sanity" if trainer.sanity_checking else kind
        task = getattr(callback, f"{kind}_progress_bar_id", None)
        return None if task is None or callback.progress is None else _RichBar(callback.progress, task)


class _Bar(Protocol):
    description: str

    def describe(self, text: str) -> None: ...


class _TqdmBar:
    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self.description = bar.desc or ""

    def describe(self, text: str) -> None:
        self._bar.set_description_str(text)


class _RichBar:
    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task
        self.description = progress.tasks[progress.task_ids.index(task)].description

    def describe(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        self._progress.refresh()
