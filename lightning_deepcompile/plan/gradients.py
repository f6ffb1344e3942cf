"""Models the runtime's reduce engine: the memory of whole gradients, and the waits of compute."""

from __future__ import annotations

from collections import deque

from lightning_deepcompile.plan.arena import ArenaModel, group_bytes
from lightning_deepcompile.program.schedule import Instruction


class GradientModel:
    """Follows the rules of ``csrc/executors/reduce.cpp`` and ``csrc/executors/whole_gradients.cpp``.

    A gradient that is being reduced stays until the compute stream has waited for it. Sums have the dtype of the
    parameter; where that is not the gradient's, they are cast into a buffer. A result is put into a buffer, too, where
    it has another dtype than its shard, or is added to it. The memory of buffers stays with the runtime, which uses it
    again: for the next group, or after the mean over replicas, which has a stream of its own.

    Args:
        ratio: Bytes of a sum per byte of a gradient.
        window: Groups that may be on their way before compute waits for the oldest.
        world_size: Ranks that share a reduced gradient.
        replicated: Whether gradients are averaged over replicas, too.
    """

    def __init__(self, ratio: float, window: int, world_size: int, *, replicated: bool = False) -> None:
        self._ratio, self._window, self._world_size = ratio, window, world_size
        self._buffers_in_use = max(window, 1) if replicated and world_size > 1 else 1
        self._sums: dict[int, int] = {}
        self._pending: deque[tuple[int, int]] = deque()  # task and bytes of a group
        self._buffers = ArenaModel()
        self._there = 0
        self._missing: dict[int, int] = {}  # shards that the first reduction of a step brings

    @property
    def bytes(self) -> int:
        """Bytes of sums, of gradients on their way, and of buffers; less the shards that are not there yet.

        If every micro-batch reduces, the shards are there from the first one on, and so in the memory measured for
        regions.
        """
        return self._there + self._buffers.bytes

    def hold(self, group: Instruction) -> None:
        """Adds gradients to sums."""
        for i, size in zip(group.ids, group.sizes, strict=True):
            if i not in self._sums:
                self._sums[i] = int(size * self._ratio)
                self._there += self._sums[i]

    def expect(self, group: Instruction, counted: bool) -> None:
        """Accounts for a step whose last micro-batch alone reduces these gradients; see `reserve`.

        Args:
            group: The gradients.
            counted: Whether the allocator has counted the shards in the memory of regions.
        """
        for i, size in zip(group.ids, group.sizes, strict=True):
            if counted and i not in self._missing:
                self._missing[i] = int(size * self._ratio) // self._world_size
                self._there -= self._missing[i]
        if self._ratio != 1:
            self._keep_buffer(group.bytes + self._arriving(group))

    def reserve(self, group: Instruction, *, adds: bool) -> None:
        """Accounts for a step that reduces these gradients; after the first such step, the buffers for it exist.

        Args:
            group: The gradients.
            adds: Whether they are added to those of micro-batches before.
        """
        if self._ratio != 1 or adds:
            self._keep_buffer(self._arriving(group))

    def _keep_buffer(self, size: int) -> None:
        if size:
            for slot in [self._buffers.acquire(size) for _ in range(self._buffers_in_use)]:
                self._buffers.release(slot)

    def _arriving(self, group: Instruction) -> int:
        """Bytes of a reduction's result that reach this rank; 0 for a single rank, which has it already."""
        parts = (-(-size // self._world_size) for size in group.sizes)
        return group_bytes(parts) if self._world_size > 1 else 0

    def send(self, group: Instruction, task: int, *, wait: bool = False) -> tuple[list[int], int]:
        """Launches the reduction of gradients, with the sums of those that have one.

        Args:
            group: The gradients.
            task: The task that reduces them.
            wait: Whether compute waits at once.

        Returns:
            The tasks that compute now waits for, and `bytes` before the caller's gradients become the runtime's.
        """
        done = self._wait(max(self._window - 1, 0))
        size = 0
        self._there += sum(self._missing.pop(i, 0) for i in group.ids)
        beside = self.bytes
        for i, own in zip(group.ids, group.sizes, strict=True):
            held = self._sums.pop(i, 0)
            size += held or own  # a gradient is added to its sum and gone
            self._there += 0 if held else own
        self._pending.append((task, size))
        return [*done, *self._wait(0 if wait else self._window)], beside

    def drain(self) -> list[int]:
        """Ends a backward pass; returns the tasks that compute waits for."""
        return self._wait(0)

    def _wait(self, left: int) -> list[int]:
        done = []
        while len(self._pending) > left:
            task, size = self._pending.popleft()
            self._there -= size
            done.append(task)
        return done
