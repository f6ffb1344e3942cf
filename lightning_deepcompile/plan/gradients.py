"""A model of the runtime's reduce engine: the memory of whole gradients, and what compute waits for."""

from __future__ import annotations

from collections import deque

from lightning_deepcompile.plan.arena import ArenaModel
from lightning_deepcompile.program.schedule import Instruction

__all__ = ["GradientModel"]


class GradientModel:
    """Follows the rules of ``csrc/reduce.cpp`` and ``csrc/whole_gradients.cpp``.

    A gradient that travels stays until the compute stream has waited for it. Sums have the dtype of the parameter;
    where that is not the gradient's, they are cast into a send buffer, whose memory stays with the runtime.

    Args:
        ratio: Bytes of a sum per byte of a gradient.
        window: Groups that may be on their way before compute waits for the oldest.
    """

    def __init__(self, ratio: float, window: int) -> None:
        self._ratio, self._window = ratio, window
        self._sums: dict[int, int] = {}
        self._pending: deque[tuple[int, int]] = deque()  # task and bytes of a group
        self._sends = ArenaModel()
        self._there = 0

    @property
    def bytes(self) -> int:
        """Bytes of sums, of gradients on their way, and of send buffers."""
        return self._there + self._sends.bytes

    def hold(self, group: Instruction) -> None:
        """Adds gradients to sums."""
        for i, size in zip(group.ids, group.sizes, strict=True):
            if i not in self._sums:
                self._sums[i] = int(size * self._ratio)
                self._there += self._sums[i]

    def reserve(self, group: Instruction) -> None:
        """Has the buffers that sums are cast into: after the first step, they are there."""
        if self._ratio != 1:
            self._sends.release(self._sends.acquire(group.bytes))  # reused in stream order

    def send(self, group: Instruction, task: int, *, wait: bool = False) -> list[int]:
        """Launches the reduction of gradients, with the sums of those that have one.

        Args:
            group: The gradients.
            task: What reduces them.
            wait: Whether compute waits at once.

        Returns:
            The tasks that compute now waits for.
        """
        size = 0
        for i, own in zip(group.ids, group.sizes, strict=True):
            held = self._sums.pop(i, 0)
            size += held or own  # a gradient is added to its sum and gone
            self._there += 0 if held else own
        self._pending.append((task, size))
        return self._wait(0 if wait else self._window)

    def drain(self) -> list[int]:
        """The end of a backward pass; returns what compute waits for."""
        return self._wait(0)

    def _wait(self, left: int) -> list[int]:
        done = []
        while len(self._pending) > left:
            task, size = self._pending.popleft()
            self._there -= size
            done.append(task)
        return done
