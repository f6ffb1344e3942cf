"""Decides again, with a measured step, where optimizer states live: they compete with a plan's other uses of memory.

Before anything is measured, as many states are offloaded as exceed the budget (`plan.offload`). A plan knows what a
byte is worth: with more memory it may keep parameters gathered, which can save more time than copying states costs; or
it leaves memory free into which states can come back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_deepcompile.plan.context import NO_LIMIT
from lightning_deepcompile.plan.costs import Profile, StatesInHost
from lightning_deepcompile.plan.optimize import PassEffect
from lightning_deepcompile.plan.simulate import arena_bytes, first_gather_bytes, window_bytes
from lightning_deepcompile.plan.state_copies import LEAST_SLOTS
from lightning_deepcompile.program.schedule import Schedule

__all__ = ["Planned", "StateMemory", "Trade", "trade_states", "with_away"]

Planned = tuple[list[Schedule], list[PassEffect]]
"""What `optimize` returns."""

_GAIN = 0.01  # of a step: the least gain for which states move
_PARTS = 4  # of what might leave, tried one by one


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

    def at_least(self, wanted: int) -> int:
        """Bytes that leave if at least `wanted` are to: whole shards' states, as far as host memory has room."""
        fitting = [n for n in itertools.accumulate(self.sizes, initial=0) if n <= self.host]
        return next((n for n in fitting if n >= wanted), fitting[-1])


@dataclass(frozen=True)
class Trade:
    """A plan, and the location of states under it.

    Args:
        away: Bytes of states in host memory.
        profile: The measured step as it would have been with them there.
        planned: The plan's schedules and effects.
        slots: Chunks of states that may be on the device while the optimizer steps.
        over: Bytes beyond what may be allocated, in a pass or while the optimizer steps; negative if some are free.
    """

    away: int
    profile: Profile
    planned: Planned
    slots: int
    over: int

    @property
    def seconds(self) -> float:
        """Predicted duration of a step."""
        return self.planned[1][-1].prediction.seconds


def with_away(profile: Profile, states: StateMemory, away: int, slots: int = LEAST_SLOTS) -> Profile:
    """Returns the profile of the same step with another part of the states in host memory.

    Args:
        profile: As measured, with `states.away` bytes there, or a result of this function.
        states: Sizes.
        away: Bytes of states in host memory.
        slots: Chunks of them that may be on the device while the optimizer steps.
    """
    counted = profile.states.away is not None or not profile.host_computes
    before = states.away if profile.states.away is None else profile.states.away
    moved = away - before
    more = -moved if counted else states.stepping + states.total - away
    regions = {
        key: replace(cost, **{name: max(getattr(cost, name) + more, 0) for name in ("before", "peak", "after")})
        for key, cost in profile.regions.items()
    }
    seconds = profile.optimizer_seconds - (0.0 if profile.states.chunks else _travel(profile, before))
    chunks = () if profile.host_computes else states.chunks(away)
    if not chunks:
        seconds += _travel(profile, away)
    host, first = profile.host_budget, profile.first_gathers
    return replace(
        profile,
        regions=regions,
        optimizer_seconds=max(seconds, 0.0),
        states=StatesInHost(chunks, away / max(states.total, 1), slots, away),
        first_gathers=replace(first, in_optimizer=first.in_optimizer and away == 0),
        host_budget=None if host is None else max(host - moved, 0),
    )


def trade_states(profile: Profile, states: StateMemory, plan: Callable[[Profile], Planned]) -> tuple[Trade, Trade]:
    """Plans with so many states in host memory that the step fits, and is then fastest.

    Plans are simulated with the states where they are now; with none in host memory, with half as many, and with as
    many as fill the remaining memory; and, if unlimited memory could save more time than the copies take, with more of
    them there. States move for a step that fits better, or that is faster by 1 %.

    Args:
        profile: As measured.
        states: Sizes, and the bytes in host memory.
        plan: Makes a plan with a profile.

    Returns:
        The plan with states where they are now, and the best one, which may be the same.
    """
    limit = (profile.budget or NO_LIMIT) + profile.room

    def fitting(away: int, schedules: Sequence[Schedule]) -> int:
        free = limit - _gathers_at_begin(schedules, profile) - states.stepping - states.total + away
        return states.slots(away, free)

    @functools.cache
    def tried(away: int) -> Trade:
        most = fitting(away, profile.schedules)
        trade = with_slots(away, most)
        fewer = fitting(away, trade.planned[0])  # a plan may open a step with more
        if fewer < most:
            trade, most = with_slots(away, fewer), fewer
        if most > LEAST_SLOTS and trade.planned[1][-1].prediction.exposed_seconds > _GAIN * trade.seconds:
            # States that are on the device when the optimizer has stepped take memory from forward, which may wait for
            # them.
            trade = min(trade, with_slots(away, LEAST_SLOTS), key=lambda one: (max(one.over, 0), one.seconds))
        return trade

    def with_slots(away: int, slots: int) -> Trade:
        adapted = with_away(profile, states, away, slots)
        schedules, effects = plan(adapted)
        # While states leave, the gathers that open the next step are launched.
        beside = _arena(schedules, profile) - _arena(profile.schedules, profile)
        if not profile.host_computes:
            there = window_bytes(schedules, profile) - window_bytes(profile.schedules, profile)
            beside = max(beside, first_gather_bytes(schedules, profile) + there)
        most = max(effects[-1].prediction.peak_bytes, states.while_stepping(away, slots) + beside)
        return Trade(away, adapted, (schedules, effects), slots, most - limit)

    best = now = tried(states.away)
    if not states.movable:
        return now, now

    def consider(away: int) -> None:
        nonlocal best
        trade = tried(away)
        better = max(trade.over, 0) - max(best.over, 0)
        if better < 0 or (better == 0 and trade.seconds < (1 - _GAIN) * best.seconds):
            best = trade

    while best.over > 0:  # once more if the buffers for states made the excess
        before = best
        consider(states.at_least(best.away + best.over))
        if best is before:
            break
    # In the step in which states come back, the buffers through which they come are allocated, too.
    coming = states.while_stepping(states.away) - states.while_stepping(states.away, 0) if states.chunk else 0

    def may_return(away: int) -> bool:
        return away >= states.away or states.while_stepping(away) + coming <= limit

    least = next(away for away in itertools.accumulate(states.sizes, initial=0) if may_return(away))
    for away in filter(may_return, _fewer(states, now, least)):
        consider(away)
    for away in _more(profile, states, now, plan):
        consider(away)
    if best.away and best.over < 0:  # as many as fill the rest
        rest = states.at_least(max(best.away + best.over, least))
        if may_return(rest):
            consider(rest)
    return now, best


def _gathers_at_begin(schedules: Sequence[Schedule], profile: Profile) -> int:
    """Bytes of the gathers that open a step, or of the two largest groups, if those are more."""
    sizes = sorted(s.instructions[k].bytes for s in schedules for k in s.at("gather"))
    return max(sum(sizes[-2:]), first_gather_bytes(schedules, profile))


def _fewer(states: StateMemory, now: Trade, least: int) -> list[int]:
    """Amounts to try with fewer states in host memory than `now`, but at least `least`; the fewest last."""
    if now.away == 0:
        return []
    wanted = [now.away + min(now.over, 0), now.away // 2, least]
    found = [states.at_least(max(n, least)) for n in wanted]
    return sorted({n for n in found if n < now.away}, reverse=True)


def _more(profile: Profile, states: StateMemory, now: Trade, plan: Callable[[Profile], Planned]) -> list[int]:
    """Amounts to try with more states in host memory, where a plan with unlimited memory would pay for their copies."""
    free = plan(replace(now.profile, budget=NO_LIMIT))[1][-1].prediction.seconds
    gain = now.seconds - free
    if gain <= _GAIN * now.seconds:
        return []
    known = _travel(profile, states.away)
    if states.chunk and not profile.host_computes:
        gain += now.planned[1][-1].prediction.compute_seconds  # beside which they can be copied
    away = [n for n in itertools.accumulate(states.sizes) if states.away < n <= states.host]
    paying = [n for n in away if _travel(profile, n) - known < gain]
    return sorted({paying[(len(paying) * part - 1) // _PARTS] for part in range(1, _PARTS + 1)}) if paying else []


def _travel(profile: Profile, size: int) -> float:
    """Seconds that the optimizer's step waits for `size` bytes to come and go, at the same time if the host is free."""
    if size == 0:
        return 0.0
    both = profile.copy_in.copy_seconds(size), profile.copy_out.copy_seconds(size)
    return sum(both) if profile.host_computes else max(both) * profile.contention.duplex


def _arena(schedules: Sequence[Schedule], profile: Profile) -> int:
    names = ("hosted", "window_from", "world_size", "device_type")
    rows = arena_bytes(schedules, **{name: getattr(profile, name) for name in names})
    return max((size for row in rows for size in row), default=0) + window_bytes(schedules, profile)
