"""The work that precedes a program of a step: comparing it with the other ranks', and looking at its memory."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lightning_deepcompile.capture.frames import Frame, Frames
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.replay import Replays
from lightning_deepcompile.ranks.order import Agreement
from lightning_deepcompile.sharding.derived import DerivedShards

_FRAMEWORK = frozenset(["torch", "lightning_deepcompile", "contextlib", "functools", ""])
"""Packages whose code lies between a step's and its programs; code that PyTorch generates is of none."""


@dataclass(eq=False, repr=False)
class Entry:
    """Prepares each run of a program.

    Args:
        frames: The captured graphs.
        agreement: Compares a program with the other ranks' before it runs.
        derived: Computes what programs gather in place of parameters.
        replays: Replays programs as CUDA graphs; None: they run.

    Attributes:
        step_code: Of the step under way.
        before_first_run: Called before a training step's program first runs: with None on all ranks at the same place,
            when the first step is compiled; for programs that are compiled later, with the number of their graph.
        larger: Returns whether the batch of a rank is larger than all before in the step under way; None: it was asked.
        before_larger: Called on all ranks at the same place, with the number of the graph that is about to run, when
            that is so.
    """

    frames: Frames
    agreement: Agreement
    derived: DerivedShards
    replays: Replays | None = None
    step_code: types.CodeType | None = None
    before_first_run: Callable[[int | None], None] | None = None
    larger: Callable[[], bool] | None = None
    before_larger: Callable[[int], None] | None = None
    _looked: set[int] = field(default_factory=set)  # graphs whose memory was looked at before they ran
    _prepare: Callable[[], None] | None = None
    _first_frame: Frame | None = None

    @property
    def in_step(self) -> bool:
        """True if a step of the module, or its backward pass, is under way."""
        return self._prepare is not None

    @contextlib.contextmanager
    def preparing(self, prepare: Callable[[], None]) -> Iterator[None]:
        """Returns a context in which programs call `prepare` before they run: their inputs may have changed."""
        before, self._prepare = self._prepare, prepare
        try:
            yield
        finally:
            self._prepare = before

    def begin_step(self) -> None:
        """Call before every training step."""
        self._first_frame = None

    def forget(self) -> None:
        """Call when the graphs of training steps were dropped."""
        self._first_frame, self._looked = None, set()

    def runs_first(self) -> bool:
        """Returns whether the program that is about to run comes first in its step.

        Dynamo calls a graph from the code of the function that it captured: the step's own if nothing broke the graph
        before, otherwise that of a continuation, or of a function that the step calls.
        """
        frame = sys._getframe()
        while frame.f_back is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in _FRAMEWORK:
            frame = frame.f_back
        code, own = frame.f_code, self.step_code
        names = code.co_name, code.co_filename, code.co_firstlineno
        return own is not None and names == (own.co_name, own.co_filename, own.co_firstlineno)

    def note_first(self, frame: Frame) -> None:
        """Call before a forward program of `frame` runs."""
        self._first_frame = self._first_frame or frame

    def enter(self, program: Program) -> Callable[[], None] | None:
        """Call before a program runs; a function that it returns is called afterwards."""
        if self._prepare is not None:
            self._prepare()
        if program.kind == "backward" and self.replays is not None:
            self.replays.begin_backward()
        behind = self.agreement.check(program.signature, functools.partial(self._follows, program))
        self.derived.refresh(program.derived)
        index = program.schedule.frame
        if program.kind == "forward" and self.before_first_run is not None and index not in self._looked:
            if self._looked:  # other ranks may have no new program
                self._looked.add(index)
                self.before_first_run(index)
            elif self.agreement.together:
                self._looked = {frame.index for frame in self.frames.all}
                self.before_first_run(None)
        if program.kind == "forward" and self.larger is not None and self.agreement.together:
            larger, self.larger = self.larger, None
            if larger() and self.before_larger is not None:
                self.before_larger(index)
        return behind

    def _follows(self, program: Program) -> str:
        """Returns the signature of the backward program of a graph of a whole step; empty for any other program."""
        if program.kind != "forward" or not self.runs_first():
            return ""
        (frame,) = (frame for frame in self.frames.all if frame.index == program.schedule.frame)
        if frame.reasons.broken:
            return ""
        return next((e.running.signature for e in frame.executables if e.program.kind == "backward"), "")

    @property
    def waits_for_states(self) -> bool:
        """True if the last training step's first program waits for optimizer states that leave the device."""
        return self._first_frame is not None and any(e.waits_for_states for e in self._first_frame.executables)
