"""Proactive prefetching: launches every gather as late as still hides it, and earlier only where memory is free."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_deepcompile.plan.choose import MARGINS
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.placement import Placement
from lightning_deepcompile.plan.simulate import Estimate, estimate, first_excess, simulate
from lightning_deepcompile.program.schedule import Schedule

_DISTANCES = (1, 2, 3, 4)


def proactive_prefetch(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Places the launch of every group of gathers.

    Looks for: launches, wherever earlier passes left them.

    Changes: from the last group to the first, a launch goes to the last place from which its transfer, and those queued
    behind it, end before they are waited for. Transfers are slower beside others than the model says, so placements
    with more and more margin are simulated, and those at fixed distances. The fastest stays, and of equally fast ones
    that with the least memory. Where a placement exceeds the budget, launches move later until it fits.

    Needs from the profile: times and memory of regions; the model of gathers.

    Promises: same values; same reductions; groups keep their order; predicted memory within the budget, or not above
    what it was.
    """
    profile = context.require_profile("proactive_prefetch")
    result = list(schedules)
    best = simulate(result, profile).estimate
    limit = max(context.budget, 0)
    for index in range(len(result)):
        tried = {result[index].instructions}
        for candidate in _placements(result[index], profile):
            trial = _fitted([*result[:index], candidate, *result[index + 1 :]], index, profile, limit)
            if trial[index].instructions in tried:
                continue
            tried.add(trial[index].instructions)
            predicted = estimate(trial, profile, max(best.peak_bytes, limit))
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


def _placements(schedule: Schedule, profile: Profile) -> Iterator[Schedule]:
    placement = Placement.of(schedule)
    if not placement.groups:
        return
    for margin in MARGINS:
        yield placement.at(_latest(placement, profile, margin))
    needs = [group.need for group in placement.groups]
    for distance in _DISTANCES:
        yield placement.at([needs[max(0, k - distance)] for k in range(len(needs))])


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


def _fitted(schedules: list[Schedule], index: int, profile: Profile, limit: int) -> list[Schedule]:
    """Moves launches of schedule `index` later until the step is predicted to fit into `limit`, if that is possible."""
    while True:
        over = first_excess(schedules, profile, limit, index)
        if over is None:
            return schedules
        moved = _later(schedules[index], over)
        if moved is None:
            return schedules
        schedules = [*schedules[:index], moved, *schedules[index + 1 :]]


def _later(schedule: Schedule, instruction: int) -> Schedule | None:
    """Launches a group later, so that less is gathered at `instruction`.

    The last group that is launched by then and not needed yet moves behind `instruction`. If there is none, the last
    group that is in use by then is launched right before its use: slots are freed only when nothing is gathered.
    """
    placement = Placement.of(schedule)
    where = sum(i.op != "gather" for i in schedule.instructions[:instruction])  # the same place in the body
    movable = [k for k, group in enumerate(placement.groups) if group.position <= where < group.need]
    for k in reversed(movable):
        later = [max(g.position, where + 1) if n >= k else g.position for n, g in enumerate(placement.groups)]
        moved = placement.at(later)
        if moved != schedule:  # one that must stay in front of another, which is needed at once, cannot move
            return moved
    for k in reversed(range(len(placement.groups))):
        if placement.groups[k].position < placement.groups[k].need <= where:
            later = [max(g.position, placement.groups[k].need) if n >= k else g.position
                     for n, g in enumerate(placement.groups)]  # fmt: skip
            moved = placement.at(later)
            if moved != schedule:
                return moved
    return None
