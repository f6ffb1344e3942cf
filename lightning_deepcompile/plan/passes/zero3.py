"""ZeRO-3: every parameter is sharded except while a region uses it, every gradient is reduced as soon as it exists."""

from __future__ import annotations

from dataclasses import replace

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.program.schedule import Instruction, Operation, Schedule


def zero3(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Replaces blocking instructions by scheduled groups, one per region.

    Looks for: ``gather_now`` for a region; ``reduce_now`` of gradients that only leave the program.

    Changes: before each region ``gather`` (launch as one group) and ``wait``, after it ``release`` and ``reduce``. The
    runtime accumulates reduced gradients: each micro-batch's or, with ``reduce="boundary"``, their sum. A backward
    program ends with ``end``. A parameter that the next region reads again is not released in between. A backward
    program begins by releasing what its forward program left gathered and it does not read.

    Promises: same values; at most the parameters of one region gathered at a time; forward leaves nothing gathered.

    Args:
        schedules: Of programs as lowering leaves them; ``kept`` of a backward one names what its forward program left.
        context: Settings.
    """
    return [_scheduled(schedule, context.settings) for schedule in schedules]


def _scheduled(schedule: Schedule, settings: PlanSettings) -> Schedule:
    reads = [call.ids for call in schedule.groups("compute")]
    neighbours = zip([(), *reads], [*reads[1:], ()], strict=False)
    backward = schedule.kind == "backward"
    reduction: Operation = "reduce_at_boundary" if settings.reduce == "boundary" else "reduce"
    # Parameters of one group share their memory: a bias that backward does not read would hold its whole block.
    unread = tuple(sorted(set(schedule.kept).difference(*reads))) if backward else ()
    result = [Instruction("release", unread)] if unread else []
    for instruction in schedule.instructions:
        if instruction.op == "compute":
            ids = instruction.ids
            missing, over = (tuple(i for i in ids if i not in others) for others in next(neighbours))
            group = [Instruction("gather", missing), Instruction("wait", ids)]
            result += [i for i in [*group, instruction, Instruction("release", over)] if i.ids or i is instruction]
        elif instruction.functional and instruction.made:
            result.append(replace(instruction, op=reduction))
        elif not instruction.functional:
            result.append(instruction)
    if not backward:
        return schedule.with_instructions(result, kept=())
    return schedule.with_instructions([*result, Instruction("end")])
