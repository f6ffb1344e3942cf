"""Gives a program another schedule with the same regions in the same order, so nothing is compiled again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.schedule import COPIES, Instruction, Schedule, ScheduleError, check_schedule


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

    def outline(instructions: Sequence[Instruction]) -> tuple[list[Instruction], list[tuple[str, int]]]:
        """Returns what stays as it is, and the gradients that are handed over, in order."""
        fixed = [replace(i, sizes=()) for i in instructions if stays(i)]
        handed = (i for i in instructions if i.traits.effect[1] == "gradients" and not stays(i))
        return fixed, [pair for i in handed for pair in itertools.zip_longest(i.values, i.ids)]

    if outline(current.instructions) != outline(schedule.instructions):
        raise ScheduleError(
            f"The schedule of {schedule.name!r} computes or reduces other values than {program.name!r}."
        )
    gradients: dict[str, tuple[int, str]] = {}
    for i in current.instructions:
        gradients |= zip(i.values, zip(i.sizes, i.made or ("",) * len(i.ids), strict=True), strict=False)
    copied = {saved.number: saved.size for saved in current.saved}
    computed = {""}
    instructions = []
    for instruction in schedule.instructions:
        ids = instruction.ids
        computed.add(instruction.region)
        if instruction.values:
            sizes, made = zip(*(gradients[name] for name in instruction.values), strict=True)
            if late := [k for k, maker in enumerate(made) if maker not in computed]:
                raise ScheduleError(
                    f"{schedule.name}: the gradient of parameter {ids[late[0]]} is computed later, by {made[late[0]]}."
                )
            instruction = replace(instruction, sizes=sizes, made=made if any(made) else ())
        elif instruction.traits.effect[1] == "parameters":
            instruction = replace(instruction, sizes=tuple(info.gathered_bytes for info in program.infos(ids)))
        elif instruction.op in COPIES:
            instruction = replace(instruction, sizes=tuple(copied[number] for number in ids))
        instructions.append(instruction)
    own_schedule = current.with_instructions(instructions, kept=schedule.kept)
    return replace(program, schedule=own_schedule, history=(*program.history, history))
