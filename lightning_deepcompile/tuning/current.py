"""The programs that run now, and the plan by which they do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.plan.step_pass import Pass
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.tuning.shortages import MemoryRetry


class CurrentPrograms:
    """Swaps the programs of a training step, on all ranks alike, and knows what they ran by before.

    Args:
        capture: Has compiled them.
        runtime: ``_C.Runtime`` that executes them.
        retry: Knows of the shortages of memory under them.
        first: The passes that apply until a plan is made.

    Attributes:
        planned: The schedules of the plan in use, in the order in which they run; empty without a plan.
        swapped: Whether programs were swapped right before the step under way.
    """

    def __init__(self, capture: Capture, runtime: Any, retry: MemoryRetry, first: tuple[Pass, ...]) -> None:
        self._capture, self._runtime, self._retry = capture, runtime, retry
        self.first = capture.scheduling.passes = first
        self.planned: tuple[Schedule, ...] = ()
        self.swapped = False
        self._previous: tuple[tuple[Pass, ...], tuple[Schedule, ...]] = first, ()

    def in_order(self) -> list[Program]:
        """Returns the programs of a micro-batch, in the order in which they run."""
        programs = [e.program for e in self._capture.frames.training]
        forwards = [p for p in programs if p.kind == "forward"]
        return [*forwards, *(p for p in reversed(programs) if p.kind == "backward")]

    def schedules(self) -> list[Schedule]:
        """Returns the schedules of the programs, in the order in which they were compiled."""
        return [e.program.schedule for e in self._capture.frames.training]

    def follow(self, schedules: Iterable[Schedule], passes: Sequence[Pass] | None = None) -> None:
        """Swaps in the programs of a plan.

        Args:
            schedules: The plan's, in the order in which they run.
            passes: For programs that it does not have; None: the passes in use.
        """
        self._previous = self._capture.scheduling.passes, self.planned
        self.planned, self.swapped = tuple(schedules), True
        self._capture.scheduling.replan(passes=passes, plan=self.planned)
        self._runtime.memory.free_buffers()  # other groups may travel
        self._retry.forget()

    def go_back(self) -> None:
        """Swaps in the programs that ran before the plan in use."""
        passes, plan = self._previous
        self.follow(plan, passes)

    def start_again(self) -> None:
        """Returns to the first passes, without a plan, as the step is to be retraced."""
        self._runtime.memory.free_buffers()
        self._capture.scheduling.passes = self.first  # it is decided again what they may take
        self.planned, self.swapped = (), True
