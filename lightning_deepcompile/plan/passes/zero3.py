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
    program ends with ``end``. A parameter that the next region reads again is not released in between. With
    ``keep_last_block`` a forward program's last group stays for the backward program, which releases at once what it
    does not read.

    Promises: same values; at most the parameters of one region gathered at a time (of two with ``keep_last_block``).

    Args:
        schedules: Of programs as lowering leaves them; ``kept`` of a backward one names what its forward program left.
        context: Settings.

    Returns:
        The schedules; ``kept`` of a forward one names what it leaves gathered.
    """
    return [_scheduled(schedule, context.settings) for schedule in schedules]


def _scheduled(schedule: Schedule, settings: PlanSettings) -> Schedule:
    reads = [call.ids for call in schedule.groups("compute")]
    fresh = [set(ids) - set(reads[k - 1] if k else ()) for k, ids in enumerate(reads)]
    last_group = max((k for k, ids in enumerate(fresh) if ids), default=-1)
    keeps = schedule.kind == "forward" and settings.keep_last_block and last_group >= 0
    kept = tuple(sorted(set(reads[last_group]))) if keeps else ()
    reduction: Operation = "reduce_at_boundary" if settings.reduce == "boundary" else "reduce"
    result: list[Instruction] = []
    k = 0
    for instruction in schedule.instructions:
        if instruction.op == "compute":
            ids, following = instruction.ids, reads[k + 1] if k + 1 < len(reads) else ()
            over = tuple(i for i in ids if i not in following and not (k >= last_group and i in kept))
            missing = tuple(i for i in ids if i in fresh[k])
            # Parameters of one group share their memory: a bias that backward does not read would hold its whole block.
            unread = tuple(sorted(set(schedule.kept).difference(*reads))) if k == 0 else ()
            group = [Instruction("release", unread), Instruction("gather", missing), Instruction("wait", ids)]
            result += [i for i in [*group, instruction, Instruction("release", over)] if i.ids or i is instruction]
            k += 1
        elif instruction.functional and instruction.made:
            result.append(replace(instruction, op=reduction))
        elif not instruction.functional:
            result.append(instruction)
    if schedule.kind != "backward":
        return schedule.with_instructions(result, kept=kept)
    return schedule.with_instructions([*result, Instruction("end")])
