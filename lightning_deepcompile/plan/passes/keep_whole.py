"""Keeps parameters gathered from one micro-batch to the next while gradients accumulate."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_deepcompile.plan.choose import Candidate, choose_by_gain
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.passes.unshard import keep_gathered
from lightning_deepcompile.program.schedule import Instruction, Operation, Schedule

__all__ = ["keep_until_boundary", "keep_whole"]


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

    Args:
        schedules: The programs of a micro-batch.
        context: Settings and profile.

    Returns:
        The schedules; unchanged where a step has one micro-batch.
    """
    profile = context.require_profile("keep_whole")
    if profile.micro_batches < 2 or not profile.accumulates:
        return list(schedules)
    return choose_by_gain(schedules, _candidates(schedules), keep_until_boundary, profile, context.budget)


def _candidates(schedules: list[Schedule]) -> list[Candidate]:
    """Groups of forward schedules, with the indices of the forward and the backward schedule, in order.

    The gathers that open a forward program come first: no compute runs beside them, so they are the least hidden.
    """
    backwards = {s.frame: k for k, s in enumerate(schedules) if s.kind == "backward"}
    found: list[Candidate] = []
    seen: set[int] = set()
    for k, schedule in enumerate(schedules):
        if schedule.kind != "forward" or schedule.frame not in backwards:
            continue
        for position in schedule.at("gather"):
            gather = schedule.instructions[position]
            new = [(i, size) for i, size in zip(gather.ids, gather.sizes, strict=True) if i not in seen]
            seen.update(gather.ids)
            if new:
                group = Instruction("gather", tuple(i for i, _ in new), tuple(size for _, size in new))
                found.append(((k, backwards[schedule.frame]), group))
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
    sizes = dict(zip(group.ids, group.sizes, strict=True))
    # A tied parameter is released between its uses, too.
    result[forward] = result[forward].with_instructions(_released(result[forward].instructions, sizes.keys(), set()))
    instructions = _released(result[backward].instructions, sizes.keys(), set(sizes))
    released = {i for instruction in instructions if instruction.op == "release_at_boundary" for i in instruction.ids}
    unread = tuple(sorted(sizes.keys() - released))
    if unread:  # backward does not read them: no use after the last forward pass
        late = Instruction("release_at_boundary", unread, tuple(sizes[i] for i in unread))
        instructions.insert(0, late)
    result[backward] = result[backward].with_instructions(instructions)
    return result


def _released(instructions: Sequence[Instruction], kept: Collection[int], late: set[int]) -> list[Instruction]:
    """`instructions` without releases of `kept`, except that the last one of those in `late` waits for the boundary."""
    result: list[Instruction] = []
    for instruction in reversed(instructions):
        if instruction.op != "release":
            result.append(instruction)
            continue
        pairs = list(zip(instruction.ids, instruction.sizes, strict=True))
        last = late.intersection(instruction.ids)
        late = late - last
        parts: tuple[tuple[Operation, list[tuple[int, int]]], ...] = (
            ("release_at_boundary", [pair for pair in pairs if pair[0] in last]),
            ("release", [pair for pair in pairs if pair[0] not in kept]),
        )
        for op, chosen in parts:
            if chosen:
                result.append(Instruction(op, tuple(i for i, _ in chosen), tuple(size for _, size in chosen)))
    return result[::-1]
