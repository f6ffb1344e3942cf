"""Merges and splits groups of gradients."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

from lightning_deepcompile.plan.settings import Rounding
from lightning_deepcompile.program.schedule import REDUCTIONS, RELEASES, Instruction, Schedule


def may_merge(ranks: int, device_type: str, rounding: Rounding) -> bool:
    """Returns whether reductions may be merged: where that changes no bit, or bits may change.

    The communicator decides in which order more than two ranks are added up, and NCCL chooses algorithm and channels by
    a group's size.

    Args:
        ranks: That add up gradients.
        device_type: ``"cuda"`` or ``"cpu"``.
        rounding: ``CompileConfig.rounding``.
    """
    return ranks <= 2 or device_type == "cpu" or rounding == "any"


def merge_reductions(schedule: Schedule, first: int, second: int) -> Schedule:
    """Reduces two groups of gradients as one, where the second was: the gradients of the first wait until then.

    Args:
        schedule: Of any program.
        first: Position of a group.
        second: Position of the next one, of the same operation.
    """
    groups = schedule.reductions
    a, b = groups[first], groups[second]
    instructions = list(schedule.instructions)
    instructions[second] = replace(
        b, ids=a.ids + b.ids, sizes=a.sizes + b.sizes, made=a.made + b.made, values=a.values + b.values
    )
    del instructions[first]
    return schedule.with_instructions(instructions)


def split_reductions(schedule: Schedule) -> Schedule:
    """Returns the schedule with every gradient reduced as soon as it exists, those of a region as one group."""
    instructions = schedule.instructions
    behind = {"": 0}
    for position in schedule.at("compute"):
        end = position + 1
        while end < len(instructions) and instructions[end].op in RELEASES | {"gather"}:
            end += 1
        behind[instructions[position].region] = end
    parts: defaultdict[int, list[Instruction]] = defaultdict(list)
    place, last = 0, ""  # gradients keep their order
    for position, instruction in enumerate(instructions):
        last = instruction.region or last
        if instruction.op not in REDUCTIONS:
            continue
        if set(instruction.made) <= {last}:
            place = position
            parts[place].append(instruction)
            continue
        for maker, places in itertools.groupby(range(len(instruction.ids)), key=instruction.made.__getitem__):
            place = max(place, behind[maker])
            parts[place].append(instruction.part(list(places)))
    result = []
    for position, instruction in enumerate(instructions):
        result += parts[position]
        if instruction.op not in REDUCTIONS:
            result.append(instruction)
    return schedule.with_instructions(result)
