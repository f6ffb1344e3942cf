"""Places reductions: reduces accumulated gradients once, where that saves time and memory allows."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import replace

from lightning_deepcompile.plan.choose import choose_by_gain
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.simulate import peak_bytes
from lightning_deepcompile.program.schedule import REDUCTIONS, Instruction, Operation, Schedule

_MICRO_BATCHES = 4
"""So many are simulated at most: with more, a larger part of the reductions goes, at the same cost of memory."""


def reduce_late(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Adds gradients up whole, on their rank, and reduces the sums with the last micro-batch.

    It turns stage 2 or 3 into stage 1, as far as gradients are concerned, for as many of them as there is memory for.

    Looks for: groups of reductions in backward programs; steps of more than one micro-batch.

    Changes: a group's gradients are added to sums, which are reduced in the last micro-batch before the optimizer
    steps. Groups are taken in order of simulated time saved per byte of their sums, again measured by simulation after
    each choice, until none fits or none helps. A parameter that has gradients in several groups is moved in all of
    them.

    Needs from the profile: times and memory of regions; the models of reductions and of adding; the number of
    micro-batches.

    Promises: the same sums, up to the order in which they are added (within a rank first, then over ranks), which is
    why nothing is done unless `CompileConfig.rounding` is ``"any"``; predicted memory within the budget, or not above
    what it was.

    Returns:
        The schedules; unchanged where a step has one micro-batch.
    """
    if context.settings.reduce != "auto":
        return list(schedules)
    profile = context.require_profile("reduce_late", micro_batches=_MICRO_BATCHES)
    if profile.micro_batches < 2 or not profile.accumulates or profile.hold_seconds is None:
        return list(schedules)
    choices = [
        (sum(sizes.values()), functools.partial(place_reductions, op="reduce_at_boundary", ids=sizes.keys()))
        for sizes in reversed(_groups(schedules))  # the last reductions of a backward pass are hidden the least
    ]
    return choose_by_gain(schedules, choices, profile, context.budget, lambda trial, _: peak_bytes(trial, profile))


def place_reductions(
    schedules: Iterable[Schedule], op: Operation, ids: Collection[int] | None = None
) -> list[Schedule]:
    """Returns the schedules in which every reduction of one of `ids` is an `op`.

    Args:
        schedules: Any programs.
        op: ``"reduce"`` or ``"reduce_at_boundary"``.
        ids: Parameters; None means all.
    """

    def placed(instruction: Instruction) -> Instruction:
        concerned = instruction.op in REDUCTIONS and (ids is None or not set(ids).isdisjoint(instruction.ids))
        return replace(instruction, op=op) if concerned else instruction

    return [schedule.with_instructions(map(placed, schedule.instructions)) for schedule in schedules]


def _groups(schedules: list[Schedule]) -> list[dict[int, int]]:
    """Bytes by parameter of groups that every micro-batch reduces, in order; those that share a parameter are one."""
    found: list[dict[int, int]] = []
    for group in (group for schedule in schedules for group in schedule.groups("reduce")):
        sizes, apart = group.size_of, []
        for other in found:
            if sizes.keys().isdisjoint(other):
                apart.append(other)
            else:
                sizes = {**other, **sizes}
        found = [*apart, sizes]
    return found
