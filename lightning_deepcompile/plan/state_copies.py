"""Models optimizer states that wait in host memory and are copied to the device for the optimizer's step.

It follows ``offload/states.py`` and ``csrc/executors/state_copies.cpp``: states are copied in, stepped, and copied out
chunk by chunk. Chunks that programs fetch have slots of their own; the others take turns in the remaining slots, at
least three. States that are in a slot when the optimizer has stepped are copied out while the next step runs, and take
memory until that step waits for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.program.instructions import Stream
from lightning_deepcompile.program.schedule import Schedule

LEAST_SLOTS = 3
"""One chunk arrives, one is stepped, one leaves."""


def round_slots(slots: int, fetched: int) -> int:
    """The number of slots that chunks share in turn, if programs fetch `fetched` chunks into slots of their own."""
    return max(LEAST_SLOTS, slots - fetched)


def still_there(chunks: int, fetched: Collection[int], slots: int) -> list[int]:
    """The chunks that are on the device when the optimizer has stepped, in the order in which they leave.

    Args:
        chunks: How many there are.
        fetched: Those that programs fetch.
        slots: Chunks that may be on the device at a time.
    """
    rest = [k for k in range(chunks) if k not in fetched]
    last = set(rest[-round_slots(slots, len(fetched)) :])
    return [k for k in range(chunks) if k in fetched or k in last]


class _Add(Protocol):
    def __call__(self, stream: Stream, seconds: float, after: list[int], label: str) -> int:
        """Adds a task, and returns its number."""


class StateCopyModel:
    """Models the copies of one step; does nothing if no states are in host memory.

    Args:
        profile: Has the chunks, and the speed of their copies and steps.

    Attributes:
        bytes: Of states that are still leaving since the step before, and of those that have come.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._sizes = profile.states.chunks
        self._leaving: dict[int, int] = {}  # copies out of the step before, of chunks that take memory
        self._coming: dict[int, int] = {}  # copies in
        self._left: dict[int, int] = {}  # all of them: a host buffer holds what left before it is read
        self._out: list[int] = []  # copies out of this step, of chunks that go round
        self._ring = self._turn = 0
        self._pending: int | None = None  # the chunk that is stepped, if its slot is needed again
        self.bytes = 0

    def begin(self, schedules: Sequence[Schedule], add: _Add) -> None:
        """Begins the step: the chunks that the one before left in slots leave."""
        self._add = add
        ahead = {k for s in schedules for copy in s.groups("reload_states") for k in copy.ids}
        self._ring = round_slots(self._profile.states.slots, len(ahead))
        for k in still_there(len(self._sizes), ahead, self._profile.states.slots):
            self._leaving[k] = add("states out", self._profile.copy_out.copy_seconds(self._sizes[k]), [], "states")
        self._left = dict(self._leaving)
        # Where nothing waits for them, torch's allocator takes their memory back by and by.
        if any(s.at("wait_states") for s in schedules if s.kind == "forward"):
            self.bytes = sum(self._sizes[k] for k in self._leaving)

    def wait(self, chunks: Iterable[int]) -> list[int]:
        """Makes compute wait until so many chunks have left; returns the tasks."""
        known = [k for k in chunks if k in self._leaving]
        self.bytes -= sum(self._sizes[k] for k in known)
        return [self._leaving.pop(k) for k in known]

    def left(self) -> None:
        """Begins a backward pass: chunks that have not left are left to the allocator."""
        if self._leaving:
            self._leaving.clear()
            self.bytes = 0

    def reload(self, chunks: Iterable[int], after: list[int]) -> None:
        """Starts copying some chunks in, after the tasks `after`."""
        for k in chunks:
            if k < len(self._sizes) and k not in self._coming:
                self._coming[k] = self._copy_in(k, after)
                self.bytes += self._sizes[k]

    def step(self, after: list[int]) -> Iterator[tuple[float, list[int]]]:
        """Yields the parts of the optimizer's step: their duration, and the tasks to wait for; `stepped` follows each.

        Args:
            after: The end of the last backward pass.
        """
        total = self._profile.optimizer_seconds
        away = sum(self._sizes)
        share = self._profile.states.share if away else 0.0
        yield total * (1 - share), []
        for k, size in enumerate(self._sizes):
            if k not in self._coming:
                slot = [self._out[self._turn - self._ring]] if self._turn >= self._ring else []
                self._coming[k] = self._copy_in(k, [*after, *slot])
                self._turn += 1
                self._pending = k
            yield total * share * size / away, [self._coming[k]]

    def stepped(self, task: int | None) -> None:
        """Ends a part that was stepped by `task`."""
        k, self._pending = self._pending, None
        if k is not None and task is not None:
            leaves = k in self._left  # with the next step, as it did in this one
            seconds = self._profile.copy_out.copy_seconds(self._sizes[k])
            self._out.append(task if leaves else self._add("states out", seconds, [task], "states"))

    def _copy_in(self, chunk: int, after: list[int]) -> int:
        if chunk in self._left:
            after = [*after, self._left[chunk]]
        return self._add("states in", self._profile.copy_in.copy_seconds(self._sizes[chunk]), after, "states")
