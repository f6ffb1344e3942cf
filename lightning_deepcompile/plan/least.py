"""The least memory that programs run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.reductions import split_reductions
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.program.schedule import RELEASES, STATE_COPIES, Instruction, Schedule


def least_budget(schedules: Sequence[Schedule], profile: Profile) -> int:
    """Returns the least memory that these programs run in: every group is gathered right before its use."""
    return simulate([just_in_time(schedule) for schedule in schedules], profile).peak_bytes


def just_in_time(schedule: Schedule) -> Schedule:
    """Returns `schedule` with every group gathered right before it is waited for, and nothing left for later programs.

    Gradients are reduced as soon as they exist. Copies are waited for at once; those of optimizer states are left to
    the optimizer's step.
    """
    schedule = split_reductions(schedule)
    result: list[Instruction] = []
    gathered: set[int] = set()
    sizes = {i: size for gather in schedule.groups() for i, size in gather.size_of.items()}
    for instruction in schedule.instructions:
        if instruction.op in STATE_COPIES:
            continue
        if instruction.op in ("gather", "reload") or (instruction.op == "wait_copy" and schedule.kind == "forward"):
            continue
        if instruction.op == "wait":
            absent = {i: sizes[i] for i in instruction.ids if i not in gathered}
            if absent:
                result.append(Instruction.group("gather", absent))
            gathered.update(absent)
        elif instruction.op in RELEASES:
            gathered.difference_update(instruction.ids)
            instruction = replace(instruction, op="release")
        elif instruction.op == "wait_copy":
            result.append(replace(instruction, op="reload"))
        result.append(instruction)
        if instruction.op == "offload":
            result.append(replace(instruction, op="wait_copy"))
    if gathered:
        result.append(Instruction.group("release", {i: sizes[i] for i in sorted(gathered)}))
    return schedule.with_instructions(result, kept=())
