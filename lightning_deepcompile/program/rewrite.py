"""Reads a program's schedule, and writes another one into it.

A program with another schedule has the same regions in the same order, so nothing is compiled again.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lightning_deepcompile.program.copies import CopyWriter, copied_numbers, strip_copies
from lightning_deepcompile.program.graph import args_of, is_element, nbytes, output_node
from lightning_deepcompile.program.instructions import TABLE, Traits, instructions_of, traits_of
from lightning_deepcompile.program.program import LOCAL_ID, Program
from lightning_deepcompile.program.saved import read_saved
from lightning_deepcompile.program.schedule import (
    COPIES,
    REDUCTIONS,
    Instruction,
    Schedule,
    ScheduleError,
    check_schedule,
    first_gather_positions,
)

__all__ = ["Gathers", "first_gathers", "read_schedule", "reschedule", "waits_for_states"]

Gathers = tuple[int, list[int], list[torch.dtype]]
"""What a group of gathers is launched with: graph, parameters, dtypes."""


def read_schedule(program: Program) -> Schedule:
    """Reads the schedule of `program`.

    Args:
        program: A program after `zero3` or another pass that schedules communication.

    Returns:
        Its schedule; ids are numbered within the model.
    """
    instructions = tuple(_read(program, node, traits) for node, traits in instructions_of(program.gm.graph))
    kept = tuple(i & LOCAL_ID for i in program.kept)
    # With numbers, by which instructions name parameters: they change with the model around a program.
    structure = [program.kind, *(f"{i.op} {i.ids} {_parameters(program, i)}" for i in _lowered(instructions))]
    regions = [program.region(node).info.key for node in program.regions()]
    return Schedule(
        program.name,
        program.kind,
        program.frame,
        instructions,
        kept,
        read_saved(program.gm.graph),
        content=_digest([*structure, *regions]),
        structure=_digest(structure),
    )


def first_gathers(program: Program) -> list[Gathers]:
    """The gathers that `program` launches before it waits for the first one."""
    nodes = instructions_of(program.gm.graph)
    first = [nodes[position] for position in first_gather_positions([Instruction(traits.op) for _, traits in nodes])]
    return [
        (traits.argument(node, "graph")[0], list(traits.argument(node, "ids")), list(traits.argument(node, "dtypes")))
        for node, traits in first
    ]


def waits_for_states(program: Program) -> bool:
    """Whether `program` waits for optimizer states that leave the device."""
    return any(traits.effect == ("wait", "states") for _, traits in instructions_of(program.gm.graph))


def _read(program: Program, node: fx.Node, traits: Traits) -> Instruction:
    if node.op == "call_module":
        read = [
            args_of(args_of(source)[0])[1][args_of(source)[1]]
            for source in node.all_input_nodes
            if _is_parameter(source)
        ]
        return Instruction(traits.op, tuple(i & LOCAL_ID for i in dict.fromkeys(read)), region=str(node.target))
    ids = copied_numbers(node) if traits.op in COPIES else traits.argument(node, "ids")
    tensors = traits.argument(node, "tensors")
    sizes = traits.argument(node, "sizes") or tuple(map(nbytes, tensors))
    if traits.effect[1] == "parameters":
        sizes = tuple(program.params[i].gathered_bytes for i in ids)
    made = tuple(map(_maker, tensors)) if traits.op in REDUCTIONS else ()
    return Instruction(traits.op, tuple(i & LOCAL_ID for i in ids), sizes, made=made)


def _maker(grad: fx.Node) -> str:
    """Name of the region that makes a gradient; "" if none does."""
    while grad.op == "call_function" and grad.all_input_nodes:
        grad = grad.all_input_nodes[0]
    return str(grad.target) if grad.op == "call_module" else ""


def _is_parameter(node: fx.Node) -> bool:
    """Whether `node` is a gathered parameter, as a wait returns it."""
    return is_element(node) and traits_of(args_of(node)[0]) is TABLE["wait"]


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _parameters(program: Program, instruction: Instruction) -> list[tuple[str, int]]:
    serial = program.graph_id & ~LOCAL_ID
    infos = [program.params[serial | i] for i in instruction.ids]
    return [(info.name, info.gathered_bytes) for info in infos]


def reschedule(program: Program, schedule: Schedule, history: str) -> Program:
    """Gives `program` another schedule.

    Gathers, releases and copies may move, merge, split, appear and disappear; regions and waits stay in order. So do
    gradients, but how they are grouped may change: a group goes anywhere behind the regions that make its gradients. A
    reduction may change between every micro-batch and the boundary.

    Args:
        program: A program that communicates by scheduled instructions.
        schedule: The new schedule, made from `read_schedule` of a program with the same content.
        history: Name of the pass, or whatever else decided.

    Returns:
        The program with the new schedule; `program` is left as it is.

    Raises:
        ScheduleError: If the schedule is not valid, or not one of this program.
    """
    check_schedule(schedule)
    _check_same(program, schedule)
    serial = program.graph_id & ~LOCAL_ID
    kept = tuple(serial | i for i in schedule.kept)
    result = program.copy(kept=kept)
    graph = result.gm.graph
    nodes = instructions_of(graph)
    dtypes: dict[int, torch.dtype] = {}
    for node, traits in nodes:
        if traits is TABLE["gather"]:
            dtypes |= zip(traits.argument(node, "ids"), traits.argument(node, "dtypes"), strict=True)
    strip_copies(graph)
    gradients = iter([g for node, traits in nodes if traits.op in REDUCTIONS for g in traits.argument(node, "tensors")])
    for node, traits in nodes:
        if not traits.fixed and traits.op not in COPIES:
            graph.erase_node(node)
    copies = CopyWriter(graph, program.graph_id)
    anchors = [node for node, traits in nodes if traits.fixed]
    anchors.append(output_node(graph))
    passed = 0
    for instruction in schedule.instructions:
        traits = instruction.traits
        if traits.fixed:
            passed += 1
            continue
        with graph.inserting_before(anchors[passed]):
            if traits.op in COPIES:
                copies.write(traits, instruction.ids)
                continue
            ids = instruction.ids
            values: dict[str, Sequence[Any]] = {"sizes": instruction.sizes, "shards": ()}
            if traits.effect[1] != "states":
                ids = tuple(serial | i for i in ids)
            if "dtypes" in traits.arguments:
                values["dtypes"] = [dtypes.get(i, program.params[i].dtype) for i in ids]
            if traits.op in REDUCTIONS:
                values["tensors"] = list(itertools.islice(gradients, len(ids)))
            traits.write(graph, program.graph_id, ids=ids, **values)
    return result.finish(history)


def _check_same(program: Program, schedule: Schedule) -> None:
    """Raises unless `schedule` computes what `program` does, and reduces the same gradients in the same order."""
    current = read_schedule(program)
    made = _gradients(current.instructions)
    same = _fixed(current.instructions) == _fixed(schedule.instructions)
    if not same or [i for i, _ in made] != [i for i, _ in _gradients(schedule.instructions)]:
        raise ScheduleError(f"The schedule of {schedule.name!r} computes or reduces otherwise than {program.name!r}.")
    # A plan's own word does not count: it may be of a program that makes gradients elsewhere.
    makers = iter(made)
    computed = {""}
    for instruction in schedule.instructions:
        computed.add(instruction.region)
        if instruction.op in REDUCTIONS:
            for i, maker in itertools.islice(makers, len(instruction.ids)):
                if maker not in computed:
                    raise ScheduleError(f"{schedule.name}: the gradient of parameter {i} is made later, by {maker}.")


def _fixed(instructions: Iterable[Instruction]) -> list[Instruction]:
    """What stays as it is in any schedule: neither where gradients travel, nor how large anything is."""
    return [replace(i, sizes=()) for i in instructions if i.traits.fixed]


def _gradients(instructions: Iterable[Instruction]) -> list[tuple[int, str]]:
    """Parameter and maker of every gradient that is reduced, in order."""
    groups = [i for i in instructions if i.op in REDUCTIONS]
    return [pair for i in groups for pair in zip(i.ids, i.made or itertools.repeat(""), strict=False)]


def _lowered(instructions: Sequence[Instruction]) -> list[Instruction]:
    """What a program computes and communicates, whatever its schedule: gradients are reduced behind their region."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for i, maker in _gradients(instructions):
        groups[maker].append(i)
    result = [Instruction("reduce", tuple(sorted(groups[""])))]
    for instruction in instructions:
        if instruction.region or instruction.traits.effect[0] == "launch and wait":
            result.append(instruction)
        if instruction.region:
            result.append(Instruction("reduce", tuple(sorted(groups[instruction.region]))))
    return [i for i in result if i.ids or i.op not in REDUCTIONS]
