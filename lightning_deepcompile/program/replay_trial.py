"""Decides by the times of steps whether CUDA graphs pay."""

from __future__ import annotations

from collections import deque

_WATCHED = 24
"""Steps whose times are compared to know whether graphs pay."""


class Trial:
    """Decides whether graphs pay: devices must be found waiting for their hosts, and steps must become shorter.

    Attributes:
        outcome: Empty until graphs were tried; then whether they stay, and why.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_WATCHED)
        self._waits: deque[bool] = deque(maxlen=_WATCHED)
        self._since: float | None = None
        self._idle = False  # at the beginning of a backward pass of the step under way
        self._before = 0.0
        self._left = 0  # steps until the trial ends
        self.outcome = ""

    @property
    def host_is_late(self) -> bool:
        """True if the device was idle when most of the last steps, or their backward passes, began.

        Where all gradients are reduced behind a backward pass, as at stage 1, the device is busy with that when a step
        begins, however late the host is.
        """
        return len(self._waits) == _WATCHED and sum(self._waits) > 0.8 * _WATCHED

    def begin_step(self, idle: bool, now: float) -> None:
        """Call before a training step.

        Args:
            idle: Whether the device has done all that it was given.
            now: Time in seconds.
        """
        if self._since is not None:
            self._times.append(now - self._since)
            self._waits.append(idle or self._idle)
        self._since, self._idle = now, False
        if self._left == 0:
            return
        self._left -= 1
        if self._left == 0:
            after = self._seconds()
            kept = after < 0.98 * self._before
            self.outcome = (
                f"CUDA graphs {'are kept' if kept else 'were no faster, and are not used'}: "
                f"{1e3 * after:.1f} ms a step ({1e3 * self._before:.1f} ms before)"
            )

    def begin_backward(self, idle: bool) -> None:
        """Call before a backward pass; `idle` as for `begin_step`."""
        self._idle |= idle

    def start(self) -> None:
        """Starts the trial: programs are recorded from now on."""
        if self._left == 0 and not self.outcome:
            self._before, self._left = self._seconds(), 2 * _WATCHED  # the first half may still record

    @property
    def failed(self) -> bool:
        """True if graphs were tried, and were no faster."""
        return "no faster" in self.outcome

    def _seconds(self) -> float:
        """Mean seconds of the last steps, without the longest: something else may have happened in it."""
        return sum(sorted(self._times)[:-1]) / max(len(self._times) - 1, 1)
