"""Selective unsharding: keeps blocks gathered from forward to backward where that saves the most time per byte."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace

from lightning_deepcompile.plan.choose import choose_by_gain
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.step_memory import StepMemory
from lightning_deepcompile.program.schedule import Instruction, Schedule


def unshard(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Keeps gathered parameters between a forward and its backward program.

    Looks for: groups of a forward program that its backward program gathers again.

    Changes: their last release in the forward program goes. The backward program stays as it is: its gathers find the
    parameters there and send nothing. Groups are taken in order of simulated time saved per byte, again measured by
    simulation after each choice, until none fits or none helps.

    Needs from the profile: times and memory of regions; the model of gathers.

    Promises: same values; same reductions; predicted memory within the budget, or not above what it was.

    Returns:
        The schedules; ``kept`` of a forward and its backward schedule names the parameters that stay.
    """
    profile = context.require_profile("unshard")
    choices = [
        (group.bytes, functools.partial(keep_gathered, forward=forward, backward=backward, ids=group.ids))
        for (forward, backward), group in reversed(unshard_candidates(schedules))
    ]
    return choose_by_gain(schedules, choices, profile, context.budget, StepMemory(schedules, profile).peak)


def unshard_candidates(schedules: list[Schedule]) -> list[tuple[tuple[int, int], Instruction]]:
    """Groups that both forward and backward gather, the last first: it is kept for the shortest time.

    Returns:
        Indices of the forward and the backward schedule, and the part of the forward's group that both gather.
    """
    found = []
    for forward, backward in pairs(schedules):
        again = {i for gather in schedules[backward].groups() for i in gather.ids} - set(schedules[forward].kept)
        for gather in reversed(schedules[forward].groups()):
            group = gather.only(again)
            again.difference_update(group.ids)  # a parameter that is gathered twice counts with its last group
            if group.ids:
                found.append(((forward, backward), group))
    return found


def pairs(schedules: list[Schedule]) -> list[tuple[int, int]]:
    """Indices of each forward schedule that has a backward schedule, and of that one."""
    backwards = {s.frame: k for k, s in enumerate(schedules) if s.kind == "backward"}
    return [(k, backwards[s.frame]) for k, s in enumerate(schedules) if s.kind == "forward" and s.frame in backwards]


def keep_gathered(schedules: list[Schedule], forward: int, backward: int, ids: Collection[int]) -> list[Schedule]:
    """Keeps parameters gathered between a forward and its backward schedule.

    Args:
        schedules: The programs of a micro-batch.
        forward: Index of the forward schedule.
        backward: Index of the backward schedule of the same frame.
        ids: The parameters; both schedules gather them.
    """
    result = list(schedules)
    result[forward] = result[forward].keep(ids)
    result[backward] = replace(result[backward], kept=result[forward].kept)
    return result
