"""Models where optimizer states take memory, and time: on the device, in host memory, and on their way."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from lightning_deepcompile.plan.costs import Profile, StatesInHost
from lightning_deepcompile.plan.fit import Move, Moved
from lightning_deepcompile.plan.state_copies import LEAST_SLOTS


@dataclass(frozen=True)
class StateMemory:
    """The optimizer states as planning sees them; bytes of one rank, the same on all.

    Args:
        sizes: Of the states of each shard, in the order in which they leave (`leaving_order`).
        away: In host memory while the step was measured: some of the first ones.
        stepping: Device memory while the optimizer steps, without states: parameters, gradients.
        buffers: On the device for states that come and go; needed if any is away.
        host: Host memory that states may use.
        chunk: Most bytes of states that step together, but for larger ones of a single shard; 0 if programs cannot
            fetch them: then they come and go while the optimizer steps.
        movable: Whether a plan may move them.
    """

    sizes: tuple[int, ...]
    away: int
    stepping: int
    buffers: int
    host: int
    chunk: int = 0
    movable: bool = True

    @property
    def total(self) -> int:
        """Bytes of all states that can be offloaded."""
        return sum(self.sizes)

    def chunks(self, away: int) -> tuple[int, ...]:
        """Bytes of the buffers of the chunks in which states come if the first `away` bytes are in host memory."""
        found: list[int] = []
        for size, end in zip(self.sizes, itertools.accumulate(self.sizes), strict=True):
            if end > away or not self.chunk:
                break
            if found and found[-1] + size <= self.chunk:
                found[-1] += size
            else:
                found.append(size)
        slot = max((size for size in found if size <= self.chunk), default=0)
        return tuple(max(size, slot) for size in found)

    def slots(self, away: int, free: int) -> int:
        """The number of chunks that may be on the device while the optimizer steps, with `away` and `free` bytes."""
        chunks = self.chunks(away)
        fitting = sum(size <= free for size in itertools.accumulate(sorted(chunks, reverse=True)))
        return min(max(fitting, LEAST_SLOTS), len(chunks)) if chunks else LEAST_SLOTS

    def while_stepping(self, away: int, slots: int = LEAST_SLOTS) -> int:
        """Device memory while the optimizer steps, with `away` bytes of states in host memory, and so many slots."""
        chunks = self.chunks(away)
        buffers = sum(sorted(chunks, reverse=True)[:slots]) if chunks else self.buffers if away else 0
        return self.stepping + self.total - away + buffers

    def fewer_slots(self, away: int, slots: int, less: int) -> int:
        """The most slots that take at least `less` bytes less than `slots` do; the fewest there may be if none do."""
        wanted = self.while_stepping(away, slots) - less
        fitting = (n for n in range(slots - 1, LEAST_SLOTS, -1) if self.while_stepping(away, n) <= wanted)
        return next(fitting, LEAST_SLOTS)

    def at_least(self, wanted: int) -> int:
        """Bytes that leave if at least `wanted` are to: whole shards' states, as far as host memory has room."""
        fitting = [n for n in itertools.accumulate(self.sizes, initial=0) if n <= self.host]
        return next((n for n in fitting if n >= wanted), fitting[-1])

    def moved(self, away: int) -> tuple[Moved, ...]:
        """Returns the move that has the first `away` bytes in host memory; empty for 0."""
        gone = sum(end <= away for end in itertools.accumulate(self.sizes))
        return (Moved(Move("states", self.sizes), tuple(range(gone))),) if gone else ()


def with_away(profile: Profile, states: StateMemory, away: int, slots: int = LEAST_SLOTS) -> Profile:
    """Returns the profile of the same step with another part of the states in host memory.

    Args:
        profile: As measured, with `states.away` bytes there, or a result of this function.
        states: Sizes.
        away: Bytes of states in host memory.
        slots: Chunks of them that may be on the device while the optimizer steps.
    """
    if not states.sizes:
        return profile
    counted = profile.states.away is not None or not profile.host_computes
    before = states.away if profile.states.away is None else profile.states.away
    moved = away - before
    more = -moved if counted else states.stepping + states.total - away
    regions = {
        key: replace(cost, **{name: max(getattr(cost, name) + more, 0) for name in ("before", "peak", "after")})
        for key, cost in profile.regions.items()
    }
    seconds = profile.optimizer_seconds - (0.0 if profile.states.chunks else travel_seconds(profile, before))
    chunks = () if profile.host_computes else states.chunks(away)
    if not chunks:
        seconds += travel_seconds(profile, away)
    host = profile.host_budget
    return replace(
        profile,
        regions=regions,
        optimizer_seconds=max(seconds, 0.0),
        states=StatesInHost(chunks, away / max(states.total, 1), slots, away),
        host_budget=None if host is None else max(host - moved, 0),
    )


def travel_seconds(profile: Profile, size: int) -> float:
    """Seconds that the optimizer's step waits for `size` bytes to come and go, at the same time if the host is free."""
    if size == 0:
        return 0.0
    both = profile.copy_in.copy_seconds(size), profile.copy_out.copy_seconds(size)
    return sum(both) if profile.host_computes else max(both) * profile.contention.duplex
