"""Keeps how long training steps took, for reports."""

from __future__ import annotations

import time
from array import array

from lightning_deepcompile.plan.measured import StepTime

_KEPT = 4096


class StepTimes:
    """Durations of optimizer steps by the host's clock, which in a long row are those of the device.

    All memory is taken at once: training leaves no objects behind.
    """

    def __init__(self) -> None:
        self._steps, self._seconds, self._compiled = array("q", [0]) * _KEPT, array("d", [0]) * _KEPT, bytearray(_KEPT)
        self._count = 0
        self._step = 0
        self._began: float | None = None
        self._captured = 0
        self._stepped = False

    @property
    def latest(self) -> list[StepTime]:
        """The last ones, in order.

        A step around which validation, a checkpoint or a pause of the user's ran is not among them if another step of
        the module ran in between.
        """
        places = (count % _KEPT for count in range(max(self._count - _KEPT, 0), self._count))
        return [StepTime(self._steps[i], self._seconds[i], bool(self._compiled[i])) for i in places]

    def begin(self, captured: int) -> None:
        """Call before each training step's forward pass.

        Args:
            captured: Number of graphs captured so far.
        """
        if self._began is not None and not self._stepped:
            return  # a further micro-batch
        now = time.perf_counter()
        if self._began is not None:
            place = self._count % _KEPT
            self._steps[place], self._seconds[place] = self._step, now - self._began
            self._compiled[place] = captured > self._captured
            self._count += 1
        self._began, self._captured, self._stepped = now, captured, False

    def stepped(self) -> None:
        """Call when an optimizer has stepped."""
        self._step += not self._stepped
        self._stepped = True

    def interrupt(self) -> None:
        """Call when something other than training begins."""
        self._began = None
