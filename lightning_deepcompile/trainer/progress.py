"""Reports in the log and in Lightning's progress bar that a step compiles or is measured: it would look stuck."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_deepcompile.capture.backend import Capture

_log = logging.getLogger(__name__)

_QUIET_SECONDS = 20.0
"""Where no bar is shown, how long nothing is said while a step compiles."""


@dataclass
class _Compilation:
    """The part of a step that was compiled so far.

    Args:
        name: The step.
        again: Whether it was compiled before.
        seconds: Seconds of calls in which something was compiled.
        graphs: Programs made.
        regions: Regions in them.
        compiled: Regions that no equal one existed for.
    """

    name: str
    again: bool
    seconds: float = 0.0
    graphs: int = 0
    regions: int = 0
    compiled: int = 0

    def __str__(self) -> str:
        if not self.graphs:
            return f"Nothing of `{self.name}` was compiled: it runs as Python."
        again = " again" if self.again else ""
        return (
            f"Compiled `{self.name}`{again} in {self.seconds:.1f} s: {self.graphs} program{'s'[: self.graphs != 1]}, "
            f"{self.compiled} of {self.regions} regions{'' if self.compiled == self.regions else ' (equal ones once)'}."
        )


class CompileProgress:
    """Shows compilation in the log, and in the description of the bar that is running if it is one of Lightning's.

    Args:
        trainer: Whose progress bar it is; without one nothing is shown.
    """

    def __init__(self, trainer: pl.Trainer | None = None) -> None:
        self._trainer = trainer
        self._bar: _Bar | None = None
        self._description = ""
        self._name = ""  # of the step under way
        self._compilation: _Compilation | None = None
        self._spoken = 0.0  # the time of the last message about it

    @contextlib.contextmanager
    def shown(self, capture: Capture, name: str = "", *, first: bool = False, ends: bool = True) -> Iterator[None]:
        """Shows what `capture` compiles in this context; afterwards the bar is as it was. May be nested.

        Args:
            capture: Compiles.
            name: The step that begins; "": the last one goes on.
            first: Whether it is called for the first time.
            ends: Whether the step ends with the context: it has no backward pass.
        """
        if capture.progress is not None:
            yield
            return
        if name:
            self._finish()
            self._name = name
        capture.progress = self._show
        programs, regions = capture.frames.compiled, capture.regions
        requested, compiled, start = regions.requested, regions.compiled, time.perf_counter()
        if first:
            self._begin(again=False)
            self._show(f"tracing {name}")
        try:
            yield
        finally:
            capture.progress = None
            if self._bar is not None:
                self._bar.describe(self._description)
                self._bar = None
        done = self._compilation
        made = capture.frames.compiled - programs
        if done is not None and (made or first):
            done.seconds += time.perf_counter() - start
            done.graphs += made
            done.regions += regions.requested - requested
            done.compiled += regions.compiled - compiled
        if ends:
            self._finish()

    def _begin(self, *, again: bool) -> None:
        self._compilation, self._spoken = _Compilation(self._name, again), time.perf_counter()
        if again:
            _log.info("Compiling `%s` again, for other shapes or attributes.", self._name)
        else:
            _log.info("Compiling `%s`: its first call takes longer.", self._name)

    def _finish(self) -> None:
        done, self._compilation = self._compilation, None
        if done is not None:
            _log.info("%s", done)

    def _show(self, text: str) -> None:
        if text.startswith("compiling") and self._compilation is None:
            self._begin(again=True)
        if self._bar is None:
            self._bar = self._running_bar()
            if self._bar is None:
                if time.perf_counter() - self._spoken > _QUIET_SECONDS:
                    self._spoken = time.perf_counter()
                    _log.info("Still %s.", text)
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
