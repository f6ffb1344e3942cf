"""Fusion: small groups of gathers travel together where that saves more latency than waiting for more costs."""

from __future__ import annotations

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.program.schedule import Instruction, Schedule, ScheduleError, check_schedule

__all__ = ["fuse"]


def fuse(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Merges neighbouring groups while the simulated step gets shorter.

    Looks for: two groups launched one after the other, the smaller of which spends at least a third of its time on
    latency.

    Changes: both are launched as one group, where the first was. Their parameters share memory until the last of them
    is released.

    Needs from the profile: the model of gathers; times and memory of regions.

    Promises: same values; same reductions; predicted memory within the budget, or not above what it was.

    Args:
        schedules: The programs of a micro-batch.
        context: Settings and profile.

    Returns:
        The schedules, those of evaluation unchanged.
    """
    profile = context.require_profile("fuse")
    result = list(schedules)
    best = simulate(result, profile)
    small = 2 * profile.gather.latency * profile.gather.bandwidth
    for index in range(len(result)):
        k = 0
        while True:
            gathers = result[index].at("gather")
            if k + 1 >= len(gathers):
                break
            first, second = (result[index].instructions[p] for p in gathers[k : k + 2])
            candidate = _merged(result[index], gathers[k], gathers[k + 1])
            k += 1
            if min(first.bytes, second.bytes) > small or candidate is None:
                continue
            trial = [*result[:index], candidate, *result[index + 1 :]]
            prediction = simulate(trial, profile)
            fits = prediction.peak_bytes <= max(best.peak_bytes, context.budget)
            if fits and prediction.seconds < best.seconds * (1 - 1e-6):
                result, best = trial, prediction
                k -= 1  # the merged group may take in the next one too
    return result


def _merged(schedule: Schedule, first: int, second: int) -> Schedule | None:
    """Both groups launched at the first one's place; None where a parameter is in use and released between them."""
    a, b = schedule.instructions[first], schedule.instructions[second]
    sizes = dict(zip(a.ids + b.ids, a.sizes + b.sizes, strict=True))
    instructions = list(schedule.instructions)
    instructions[first] = Instruction("gather", tuple(sizes), tuple(sizes.values()))
    del instructions[second]
    merged = schedule.with_instructions(instructions)
    try:
        check_schedule(merged)
    except ScheduleError:
        return None
    return merged
