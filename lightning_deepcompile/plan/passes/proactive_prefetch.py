"""Proactive prefetching: launches every gather as late as still hides it, and earlier only where memory is free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from lightning_deepcompile.plan.choose import MARGINS, estimate_within
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.placement import Placement
from lightning_deepcompile.plan.simulate import Estimate, simulate
from lightning_deepcompile.plan.step_memory import StepMemory
from lightning_deepcompile.program.schedule import Schedule

_DISTANCES = (1, 2, 3, 4)
_MOVED = 2
"""Placements that are moved into the budget: moving simulates the memory of a step for every launch it delays."""


def proactive_prefetch(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Places the launch of every group of gathers.

    Looks for: launches, wherever earlier passes left them.

    Changes: from the last group to the first, a launch goes to the last place from which its transfer, and those queued
    behind it, end before they are waited for. Transfers are slower beside others than the model says, so placements
    with more and more margin are simulated, and those at fixed distances. Of those that exceed the budget, the two with
    the latest launches are tried with launches moved later until they fit. The fastest stays, and of equally fast ones
    that with the least memory.

    Needs from the profile: times and memory of regions; the model of gathers.

    Promises: same values; same reductions; groups keep their order; predicted memory within the budget, or not above
    what it was.
    """
    profile = context.require_profile("proactive_prefetch")
    result = list(schedules)
    best = simulate(result, profile).estimate
    limit = max(context.budget, 0)
    memory = StepMemory(result, profile)
    for index in range(len(result)):
        tried = {result[index].instructions}
        placement = Placement.of(result[index])
        for positions in _Room(result, index, placement, memory, limit).fitting(_placements(placement, profile)):
            schedule = placement.at(positions)
            if schedule.instructions in tried:
                continue
            tried.add(schedule.instructions)
            trial = [*result[:index], schedule, *result[index + 1 :]]
            predicted = estimate_within(trial, profile, max(best.peak_bytes, limit), memory.peak)
            if predicted is not None and _better(predicted, best, limit):
                result, best = trial, predicted
    return result


def _better(new: Estimate, old: Estimate, limit: int) -> bool:
    """Compares two estimates: within the budget first, then faster, then less memory."""
    if (new.peak_bytes <= limit) != (old.peak_bytes <= limit):
        return new.peak_bytes <= limit
    if abs(new.seconds - old.seconds) > 1e-4 * old.seconds:
        return new.seconds < old.seconds
    return new.peak_bytes < old.peak_bytes


def _placements(placement: Placement, profile: Profile) -> list[list[int]]:
    """Returns where groups could be launched, with the latest launches first."""
    needs = [group.need for group in placement.groups]
    if not needs:
        return []
    in_time = [_latest(placement, profile, margin) for margin in MARGINS]
    ahead = [[needs[max(0, k - distance)] for k in range(len(needs))] for distance in _DISTANCES]
    return sorted(map(placement.fit, [*in_time, *ahead]), key=sum, reverse=True)


def _latest(placement: Placement, profile: Profile, margin: float) -> list[int]:
    """The latest places from which all transfers end in time, if each takes `margin` times as long."""
    clock = profile.clock(placement.schedule.with_instructions(placement.body))
    deadline = float("inf")
    positions: list[int] = []
    resident = set(placement.schedule.kept) if placement.schedule.kind == "backward" else set()
    for group in reversed(placement.groups):
        sizes = group.gather.without(resident).sizes
        seconds = profile.gather_seconds(sizes) if any(sizes) else 0.0
        deadline = min(deadline, clock[group.need]) - margin * seconds
        positions.append(max((p for p in range(group.need + 1) if clock[p] <= deadline), default=0))
    return positions[::-1]


class _Room:
    """Fits placements of the launches of one schedule into the memory that may be allocated."""

    def __init__(
        self, schedules: list[Schedule], index: int, placement: Placement, memory: StepMemory, limit: int
    ) -> None:
        self._schedules, self._index, self._placement = list(schedules), index, placement
        self._memory, self._limit = memory, limit
        self._known: dict[tuple[int, ...], int | None] = {}

    def fitting(self, placements: list[list[int]]) -> Iterator[list[int]]:
        """Yields the placements that fit; in place of the first two that do not, those of which launches moved later.

        Where not even launches right before their use fit, only these follow.
        """
        moves = _MOVED
        for positions in placements:
            if self._excess(positions) is None:
                yield positions
                continue
            if moves == _MOVED:
                last = self._placement.fit([group.need for group in self._placement.groups])
                if self._excess(last) is not None:
                    yield last
                    return
            if moves:
                moves -= 1
                yield self._moved(positions)

    def _moved(self, positions: list[int]) -> list[int]:
        """Moves launches later until the step is predicted to fit, if that is possible."""
        while (where := self._excess(positions)) is not None:
            ways = self._ways(positions, where)
            enough = bisect_left(ways, True, key=lambda way: self._fits_until(way, where))
            if enough == len(ways):
                return ways[-1] if ways else positions
            positions = ways[enough]
        return positions

    def _fits_until(self, positions: list[int], where: int) -> bool:
        over = self._excess(positions)
        return over is None or over > where

    def _excess(self, positions: list[int]) -> int | None:
        """Returns the first place in the body where the limit is exceeded; simulates each placement once."""
        key = tuple(positions)
        if key not in self._known:
            schedule = self._placement.at(positions)
            self._schedules[self._index] = schedule
            over = self._memory.first_excess(self._schedules, self._limit, self._index)
            before = () if over is None else schedule.instructions[:over]
            self._known[key] = None if over is None else sum(i.op != "gather" for i in before)
        return self._known[key]

    def _ways(self, positions: list[int], where: int) -> list[list[int]]:
        """Returns placements with less and less gathered at `where`: each moves one more launch than the one before.

        First go the groups that are launched by then and not needed yet, the last one first: behind `where`. Then those
        that are in use by then are launched right before their use: slots are freed only when nothing is gathered.
        """
        needs = [group.need for group in self._placement.groups]
        order = range(len(positions) - 1, -1, -1)
        ahead = [(k, where + 1) for k in order if positions[k] <= where < needs[k]]
        used = [(k, needs[k]) for k in order if positions[k] < needs[k] <= where]
        ways = [positions]
        for k, place in (*ahead, *used):
            moved = self._placement.fit([max(p, place) if n >= k else p for n, p in enumerate(ways[-1])])
            if moved != ways[-1]:  # one that must stay in front of another, which is needed at once, cannot move
                ways.append(moved)
        return ways[1:]
