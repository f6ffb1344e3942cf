"""Fusion: merges small groups where the latency saved exceeds the cost of waiting for the larger group."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from lightning_deepcompile.plan.choose import estimate_within
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import Link
from lightning_deepcompile.plan.reductions import may_merge, merge_reductions
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.program.schedule import REDUCTIONS, Instruction, Schedule, ScheduleError, check_schedule

Pairs = Callable[[Schedule], list[tuple[int, int]]]
"""Positions of neighbouring groups in a schedule."""
Merge = Callable[[Schedule, int, int], Schedule | None]
"""Puts two groups together; None where that cannot be."""


def fuse(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Merges neighbouring groups of gathers, then of reductions, while the simulated step gets shorter.

    Looks for: two groups launched one after the other, the smaller of which spends at least a third of its time on
    latency. Groups of gradients are neighbours if nothing else is reduced between them, and both travel in every
    micro-batch or both at the boundary.

    Changes: both are launched as one group. Gathers go where the first was; their parameters share memory until the
    last of them is released. Reductions go where the second was: the gradients of the first wait until then.

    Needs from the profile: the models of gathers and reductions; times and memory of regions.

    Promises: same values, as every gradient is still reduced by itself, and in the same order; predicted memory within
    the budget, or not above what it was. Reductions of more than two GPUs are merged only with ``rounding="any"``
    (`may_merge`).

    Returns:
        The schedules, those of evaluation unchanged.
    """
    profile = context.require_profile("fuse")
    gathered = _fuse(schedules, context, profile.gather, _gathers, _merge_gathers)
    if not may_merge(profile.world_size, profile.device_type, context.settings.rounding):
        return gathered
    return _fuse(gathered, context, profile.reduce, reduction_pairs, merge_reductions)


def _fuse(schedules: list[Schedule], context: PlanContext, link: Link, pairs: Pairs, merge: Merge) -> list[Schedule]:
    profile = context.require_profile("fuse")
    result = list(schedules)
    best = simulate(result, profile).estimate
    small = 2 * link.latency * link.bandwidth
    for index in range(len(result)):
        k = 0
        while k < len(found := pairs(result[index])):
            positions = found[k]
            k += 1
            if min(result[index].instructions[position].bytes for position in positions) > small:
                continue
            candidate = merge(result[index], *positions)
            if candidate is None:
                continue
            trial = [*result[:index], candidate, *result[index + 1 :]]
            predicted = estimate_within(trial, profile, max(best.peak_bytes, context.budget))
            if predicted is not None and predicted.seconds < best.seconds * (1 - 1e-6):
                result, best = trial, predicted
                k -= 1  # the merged group may take in the next one too
    return result


def _gathers(schedule: Schedule) -> list[tuple[int, int]]:
    return list(itertools.pairwise(schedule.at("gather")))


def _merge_gathers(schedule: Schedule, first: int, second: int) -> Schedule | None:
    """Both groups launched at the first one's place; None where a parameter is in use and released between them."""
    a, b = schedule.instructions[first], schedule.instructions[second]
    instructions = list(schedule.instructions)
    instructions[first] = Instruction.group("gather", {**a.size_of, **b.size_of})
    del instructions[second]
    merged = schedule.with_instructions(instructions)
    try:
        check_schedule(merged)
    except ScheduleError:
        return None
    return merged


def reduction_pairs(schedule: Schedule) -> list[tuple[int, int]]:
    """Positions of neighbouring groups of gradients that may travel together."""
    positions = [p for p, i in enumerate(schedule.instructions) if i.traits.effect[1] == "gradients"]
    ops = {p: schedule.instructions[p].op for p in positions}
    return [(p, q) for p, q in itertools.pairwise(positions) if ops[p] == ops[q] and ops[p] in REDUCTIONS]
