"""Keeps parameters gathered from one micro-batch to the next while gradients accumulate."""

from __future__ import annotations

import functools
from dataclasses import replace

from lightning_deepcompile.plan.choose import Choice, choose_by_gain
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.passes.unshard import keep_gathered, pairs
from lightning_deepcompile.plan.step_memory import StepMemory
from lightning_deepcompile.program.schedule import Instruction, Schedule


def keep_whole(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Keeps parameters gathered until the last micro-batch before the optimizer steps has used them.

    It turns stage 3 into stage 2 for as many parameters as there is memory for.

    Looks for: groups of a forward program; steps of more than one micro-batch.

    Changes: their last release in the forward program goes, and that in the backward program happens at the boundary
    only. Programs stay as they are otherwise: gathers find the parameters there and send nothing. Groups are taken in
    order of simulated time saved per byte, again measured by simulation after each choice, until none fits or none
    helps.

    Needs from the profile: times and memory of regions; the model of gathers; the number of micro-batches.

    Promises: same values; same reductions; predicted memory within the budget, or not above what it was.

    Returns:
        The schedules; unchanged where a step has one micro-batch.
    """
    profile = context.require_profile("keep_whole")
    if profile.micro_batches < 2 or not profile.accumulates:
        return list(schedules)
    return choose_by_gain(schedules, _choices(schedules), profile, context.budget, StepMemory(schedules, profile).peak)


def _choices(schedules: list[Schedule]) -> list[Choice]:
    """The groups of forward schedules, in order.

    The gathers that open a forward program come first: no compute runs beside them, so they are the least hidden.
    """
    found: list[Choice] = []
    seen: set[int] = set()
    for forward, backward in pairs(schedules):
        for gather in schedules[forward].groups():
            group = gather.without(seen)
            seen.update(gather.ids)
            if group.ids:
                keep = functools.partial(keep_until_boundary, forward=forward, backward=backward, group=group)
                found.append((group.bytes, keep))
    return found


def keep_until_boundary(schedules: list[Schedule], forward: int, backward: int, group: Instruction) -> list[Schedule]:
    """Keeps `group` from its gather in the first micro-batch to its last use in the last one.

    Args:
        schedules: The programs of a micro-batch.
        forward: Index of the forward schedule.
        backward: Index of the backward schedule of the same frame.
        group: Parameters that the forward schedule gathers, with their sizes.
    """
    result = keep_gathered(schedules, forward, backward, group.ids)
    result[forward] = result[forward].drop("release", group.ids)  # a tied parameter is released between its uses, too
    result[backward] = _last_at_boundary(result[backward], group)
    return result


def _last_at_boundary(schedule: Schedule, group: Instruction) -> Schedule:
    """Returns `schedule` without releases of `group`, except that the last release waits for the boundary."""
    left, result = set(group.ids), []
    for instruction in reversed(schedule.instructions):
        if instruction.op != "release":
            result.append(instruction)
            left.difference_update(instruction.ids if instruction.op == "release_at_boundary" else ())
            continue
        last = replace(instruction.only(left), op="release_at_boundary")
        left.difference_update(last.ids)
        result += [part for part in (last, instruction.without(group.ids)) if part.ids]
    if left:  # backward does not read them: no use after the last forward pass
        result.append(Instruction.group("release_at_boundary", {i: group.size_of[i] for i in sorted(left)}))
    return schedule.with_instructions(reversed(result))
