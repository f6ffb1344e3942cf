"""Reads a program's schedule, and writes another one into it.

A program with another schedule has the same regions in the same order, so nothing is compiled again.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from lightning_deepcompile.program.copies import OFFLOAD, RELOAD, WAIT_COPIES, CopyWriter, copied_numbers, strip_copies
from lightning_deepcompile.program.graph import args_of, is_element, nbytes, output_node
from lightning_deepcompile.program.program import LOCAL_ID, Program
from lightning_deepcompile.program.saved import read_saved
from lightning_deepcompile.program.schedule import (
    COPIES,
    REDUCTIONS,
    RELEASES,
    STATE_COPIES,
    Instruction,
    Operation,
    Schedule,
    ScheduleError,
    check_schedule,
    opening_positions,
)

__all__ = ["Gathers", "instruction_nodes", "opening_gathers", "read_schedule", "reschedule", "waits_for_states"]

_OPERATIONS: dict[str, Operation] = {
    "dc.prefetch_params_fused.default": "gather",
    "dc.wait_allgather_fused.default": "wait",
    "dc.release_params_fused.default": "release",
    "dc.release_params_at_boundary.default": "release_at_boundary",
    "dc.reduce_grads_fused.default": "reduce",
    "dc.end_backward.default": "end",
    "dc.gather.default": "gather_now",
    "dc.reduce.default": "reduce_now",
    OFFLOAD: "offload",
    RELOAD: "reload",
    WAIT_COPIES: "wait_copy",
    "dc.reload_states.default": "reload_states",
    "dc.wait_states.default": "wait_states",
}

Gathers = tuple[int, list[int], list[torch.dtype]]
"""Arguments of ``dc.prefetch_params_fused``: graph, parameters, dtypes."""

_MOVABLE = RELEASES | COPIES | STATE_COPIES | {"gather"}
_WRITTEN = _MOVABLE | REDUCTIONS  # what a new schedule says anew


def read_schedule(program: Program) -> Schedule:
    """Reads the schedule of `program`.

    Args:
        program: A program after `zero3` or another pass that schedules communication.

    Returns:
        Its schedule; ids are numbered within the model.
    """
    instructions = tuple(_read(program, node, op) for node, op in instruction_nodes(program))
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


def instruction_nodes(program: Program) -> list[tuple[fx.Node, Operation]]:
    """The nodes of a program that are instructions of its schedule, in order."""
    found: list[tuple[fx.Node, Operation]] = []
    for node in program.gm.graph.nodes:
        if node.op == "call_module":
            found.append((node, "compute"))
        elif node.op == "call_function" and str(node.target) in _OPERATIONS:
            op = _OPERATIONS[str(node.target)]
            late = op == "reduce" and node.args[0] == program.boundary_id
            found.append((node, "reduce_at_boundary" if late else op))
    return found


def opening_gathers(program: Program) -> list[Gathers]:
    """The gathers that `program` launches before it waits for the first one."""
    nodes = instruction_nodes(program)
    opening = [nodes[position][0] for position in opening_positions([Instruction(op) for _, op in nodes])]
    found = [args_of(node) for node in opening]
    return [(graph_id, list(ids), list(dtypes)) for graph_id, _, ids, dtypes in found]


def waits_for_states(program: Program) -> bool:
    """Whether `program` waits for optimizer states that leave the device."""
    return any(op == "wait_states" for _, op in instruction_nodes(program))


def _read(program: Program, node: fx.Node, op: Operation) -> Instruction:
    args = args_of(node)
    if op == "compute":
        read = [args_of(source) for source in node.all_input_nodes if _is_parameter(source)]
        ids = [args_of(wait)[1][position] for wait, position in read]
        return Instruction(op, tuple(i & LOCAL_ID for i in dict.fromkeys(ids)), region=str(node.target))
    if op == "end":
        return Instruction(op)
    if op in STATE_COPIES:
        return Instruction(op, tuple(args[1]), tuple(args[2]))
    if op in COPIES:
        return Instruction(op, copied_numbers(node), tuple(nbytes(source) for source in args[1]))
    if op in ("gather_now", "reduce_now"):
        size = program.params[args[1]].gathered_bytes if op == "gather_now" else nbytes(args[0])
        return Instruction(op, (args[1] & LOCAL_ID,), (size,))
    ids = args[1] if op == "wait" or op in RELEASES else args[2]
    local = tuple(i & LOCAL_ID for i in ids)
    if op in REDUCTIONS:
        return Instruction(op, local, tuple(map(nbytes, args[1])), made=tuple(map(_maker, args[1])))
    return Instruction(op, local, tuple(program.params[i].gathered_bytes for i in ids))


def _maker(grad: fx.Node) -> str:
    """Name of the region that makes a gradient; "" if none does."""
    while grad.op == "call_function" and grad.all_input_nodes:
        grad = grad.all_input_nodes[0]
    return str(grad.target) if grad.op == "call_module" else ""


def _is_parameter(node: fx.Node) -> bool:
    """Whether `node` is a gathered parameter, as a wait returns it."""
    return is_element(node) and str(args_of(node)[0].target) == "dc.wait_allgather_fused.default"


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
    nodes = instruction_nodes(result)
    dtypes = {i: dtype for node, op in nodes if op == "gather" for i, dtype in zip(*args_of(node)[2:4], strict=True)}
    strip_copies(graph)
    gradients = iter([grad for node, op in nodes if op in REDUCTIONS for grad in args_of(node)[1]])
    for node, op in nodes:
        if op in _WRITTEN - COPIES:
            graph.erase_node(node)
    copies = CopyWriter(graph, program.graph_id)
    anchors = [node for node, op in nodes if op not in _WRITTEN]
    anchors.append(output_node(graph))
    passed = 0
    for instruction in schedule.instructions:
        if instruction.op not in _WRITTEN:
            passed += 1
            continue
        ids = [serial | i for i in instruction.ids]
        with graph.inserting_before(anchors[passed]):
            if instruction.op in REDUCTIONS:
                graph_id = program.boundary_id if instruction.op == "reduce_at_boundary" else program.graph_id
                group = list(itertools.islice(gradients, len(ids)))
                graph.call_function(torch.ops.dc.reduce_grads_fused.default, (graph_id, group, ids))
            elif instruction.op == "offload":
                copies.offload(instruction.ids)
            elif instruction.op == "reload":
                copies.reload(instruction.ids)
            elif instruction.op == "wait_copy":
                copies.wait(instruction.ids)
            elif instruction.op in STATE_COPIES:
                call = torch.ops.dc.reload_states if instruction.op == "reload_states" else torch.ops.dc.wait_states
                graph.call_function(call.default, (program.graph_id, list(instruction.ids), list(instruction.sizes)))
            elif instruction.op == "release":
                graph.call_function(torch.ops.dc.release_params_fused.default, (program.graph_id, ids))
            elif instruction.op == "release_at_boundary":
                graph.call_function(torch.ops.dc.release_params_at_boundary.default, (program.graph_id, ids))
            else:
                wanted = [dtypes.get(i, program.params[i].dtype) for i in ids]
                graph.call_function(torch.ops.dc.prefetch_params_fused.default, (program.graph_id, [], ids, wanted))
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
    return [replace(i, sizes=()) for i in instructions if i.op not in _WRITTEN]


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
        if instruction.op in ("compute", "gather_now", "reduce_now"):
            result.append(instruction)
        if instruction.op == "compute":
            result.append(Instruction("reduce", tuple(sorted(groups[instruction.region]))))
    return [i for i in result if i.ids or i.op != "reduce"]
