"""Gives a program another schedule with the same regions in the same order, so nothing is compiled again."""

from __future__ import annotations

import itertools
from dataclasses import replace

from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.schedule import COPIES, Instruction, Schedule, ScheduleError, check_schedule

__all__ = ["reschedule"]


def reschedule(program: Program, schedule: Schedule, history: str) -> Program:
    """Gives `program` another schedule.

    Gathers, releases and copies may move, merge, split, appear and disappear; regions and waits stay in order.
    Gradients also stay in order, but may be grouped differently: a group can stand anywhere behind the regions that
    make its gradients. A reduction may change between every micro-batch and the boundary.

    Args:
        program: The program.
        schedule: The new schedule, of a program with the same structure. Sizes, and the makers of gradients, are taken
            from this program.
        history: Name of the pass, or of whatever else decided.

    Returns:
        The program with the new schedule; `program` does not change.

    Raises:
        ScheduleError: If the schedule is not valid, or not one of this program.
    """
    check_schedule(schedule)
    current = program.schedule
    lowered = all(i.op not in ("wait", "end") for i in current.instructions)

    def stays(instruction: Instruction) -> bool:
        if lowered and (instruction.functional or instruction.op in ("wait", "end")):
            return False  # the first pass replaces one by the other
        return instruction.traits.fixed

    def hands_over(instruction: Instruction) -> bool:
        return instruction.traits.effect[1] == "gradients" and not stays(instruction)

    fixed = [i for i in current.instructions if stays(i)]
    groups = [i for i in current.instructions if hands_over(i)]
    gradients = [g for group in groups for g in zip(group.ids, group.sizes, group.made, strict=True)]
    same = [replace(i, sizes=()) for i in fixed] == [replace(i, sizes=()) for i in schedule.instructions if stays(i)]
    if not same or [g[0] for g in gradients] != [k for i in schedule.instructions if hands_over(i) for k in i.ids]:
        raise ScheduleError(
            f"The schedule of {schedule.name!r} computes or reduces other values than {program.name!r}."
        )
    own, left = iter(fixed), iter(gradients)
    copied = {saved.number: saved.size for saved in current.saved}
    computed = {""}
    instructions = []
    for instruction in schedule.instructions:
        ids = instruction.ids
        computed.add(instruction.region)
        if stays(instruction):
            instruction = next(own)
        elif hands_over(instruction):
            group = list(itertools.islice(left, len(ids)))
            if late := [(i, maker) for i, _, maker in group if maker not in computed]:
                raise ScheduleError(
                    f"{schedule.name}: the gradient of parameter {late[0][0]} is computed later, by {late[0][1]}."
                )
            sizes, made = (tuple(column) for column in list(zip(*group, strict=True))[1:])
            instruction = replace(instruction, sizes=sizes, made=made)
        elif instruction.traits.effect[1] == "parameters":
            instruction = replace(instruction, sizes=tuple(info.gathered_bytes for info in program.infos(ids)))
        elif instruction.op in COPIES:
            instruction = replace(instruction, sizes=tuple(copied[number] for number in ids))
        instructions.append(instruction)
    own_schedule = current.with_instructions(instructions, kept=schedule.kept)
    return replace(program, schedule=own_schedule, history=(*program.history, history))
