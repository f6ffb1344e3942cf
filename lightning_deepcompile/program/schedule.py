"""A program's schedule as plain data: which instruction comes when, without the code that computes.

Schedules are what planning works on. They are read from a program, changed freely, checked, and written back: a program
with another schedule has the same regions in the same order, so nothing is compiled again.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from lightning_deepcompile.program.copies import OFFLOAD, RELOAD, WAIT_COPIES, CopyWriter, copied_numbers, strip_copies
from lightning_deepcompile.program.graph import is_element, nbytes, output_node
from lightning_deepcompile.program.program import Program, ProgramKind
from lightning_deepcompile.program.saved import Saved, read_saved

__all__ = [
    "COPIES",
    "REDUCTIONS",
    "RELEASES",
    "Gathers",
    "Instruction",
    "Operation",
    "Schedule",
    "ScheduleError",
    "check_copies",
    "check_schedule",
    "instruction_nodes",
    "opening_gathers",
    "opening_positions",
    "read_schedule",
    "reschedule",
]

Operation = Literal[
    "gather",
    "wait",
    "compute",
    "release",
    "release_at_boundary",
    "reduce",
    "reduce_at_boundary",
    "end",
    "gather_now",
    "reduce_now",
    "offload",
    "reload",
    "wait_copy",
]

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
}
RELEASES: frozenset[Operation] = frozenset({"release", "release_at_boundary"})
"""The operations that end the use of a gathered parameter."""

REDUCTIONS: frozenset[Operation] = frozenset({"reduce", "reduce_at_boundary"})
"""The operations that hand a group of gradients to the runtime."""

COPIES: frozenset[Operation] = frozenset({"offload", "reload", "wait_copy"})
"""The operations on saved tensors; their ids are numbers of `Schedule.saved`, not parameters."""

Gathers = tuple[int, list[int], list[torch.dtype]]
"""Arguments of ``dc.prefetch_params_fused``: graph, parameters, dtypes."""

_MOVABLE = RELEASES | COPIES | {"gather"}
_LOCAL = 0xFFFFFFFF


class ScheduleError(ValueError):
    """A schedule that would compute something else, or use memory that is not there."""


@dataclass(frozen=True)
class Instruction:
    """One step of a schedule.

    Args:
        op: What happens. ``gather`` launches one group, ``wait`` makes the compute stream wait for it, ``reduce``
            launches the reduction of one group of gradients; ``gather_now`` and ``reduce_now`` also wait.
            ``reduce_at_boundary`` adds the group to sums of whole gradients, and launches their reduction in the last
            micro-batch before the optimizer steps. ``release_at_boundary`` releases in that one, and does nothing in
            those before, so that the next one finds the parameters gathered. ``offload`` starts copying saved tensors
            to the host and ``reload`` back; ``wait_copy`` makes the compute stream wait for either.
        ids: Parameters concerned, numbered within the model; of a ``compute``, those it reads; of copies, the saved
            tensors.
        sizes: Bytes per parameter: gathered, or of its whole gradient; of copies, per tensor.
        region: Name of the region that a ``compute`` runs.
    """

    op: Operation
    ids: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    region: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of all its parameters."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Schedule:
    """The schedule of one program.

    Args:
        name: The program's name.
        kind: The program's kind.
        frame: Which captured graph it belongs to; a forward and its backward program share it.
        instructions: What runs, in the order in which the host issues it.
        kept: Parameters that a forward schedule leaves gathered, or that a backward schedule finds gathered.
        saved: Saved tensors that may leave the device between the two.
        content: Key of what the program computes and communicates, equal on all ranks and in every run.
        structure: The same without what its regions compute: programs for other shapes share it.
    """

    name: str
    kind: ProgramKind
    frame: int
    instructions: tuple[Instruction, ...]
    kept: tuple[int, ...] = ()
    saved: tuple[Saved, ...] = ()
    content: str = ""
    structure: str = ""

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Numbers of the saved tensors that a forward schedule leaves, or a backward schedule finds, on the host."""
        op = "offload" if self.kind == "forward" else "reload"
        return tuple(sorted(i for position in self.at(op) for i in self.instructions[position].ids))

    def at(self, op: Operation) -> list[int]:
        """Positions of the instructions `op`."""
        return [i for i, instruction in enumerate(self.instructions) if instruction.op == op]

    def with_instructions(self, instructions: Iterable[Instruction], **changes: Any) -> Schedule:
        """A copy that runs `instructions`."""
        return replace(self, instructions=tuple(instructions), **changes)


def read_schedule(program: Program) -> Schedule:
    """Reads the schedule of `program`.

    Args:
        program: A program after `zero3` or another pass that schedules communication.

    Returns:
        Its schedule; ids are numbered within the model.
    """
    instructions = tuple(_read(program, node, op) for node, op in instruction_nodes(program))
    kept = tuple(i & _LOCAL for i in program.kept)
    fixed = [i for i in _fixed(instructions) if i.op in ("compute", "reduce", "reduce_now", "gather_now")]
    structure = [program.kind, *(f"{i.op} {_parameters(program, i)}" for i in fixed)]
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
    opening = [nodes[position][0] for position in _opening([op for _, op in nodes])]
    return [(node.args[0], list(node.args[2]), list(node.args[3])) for node in opening]


def opening_positions(instructions: Sequence[Instruction]) -> list[int]:
    """Positions of the gathers that come before the first wait."""
    return _opening([instruction.op for instruction in instructions])


def _opening(operations: Sequence[Operation]) -> list[int]:
    before = itertools.takewhile(lambda pair: pair[1] != "wait", enumerate(operations))
    return [position for position, op in before if op == "gather"]


def _read(program: Program, node: fx.Node, op: Operation) -> Instruction:
    if op == "compute":
        ids = [source.args[0].args[1][source.args[1]] for source in node.all_input_nodes if _is_parameter(source)]
        return Instruction(op, tuple(i & _LOCAL for i in dict.fromkeys(ids)), region=str(node.target))
    if op == "end":
        return Instruction(op)
    if op in COPIES:
        return Instruction(op, copied_numbers(node), tuple(nbytes(source) for source in node.args[1]))
    if op in ("gather_now", "reduce_now"):
        size = program.params[node.args[1]].gathered_bytes if op == "gather_now" else nbytes(node.args[0])
        return Instruction(op, (node.args[1] & _LOCAL,), (size,))
    ids = node.args[1] if op == "wait" or op in RELEASES else node.args[2]
    if op in REDUCTIONS:
        sizes = [nbytes(grad) for grad in node.args[1]]
    else:
        sizes = [program.params[i].gathered_bytes for i in ids]
    return Instruction(op, tuple(i & _LOCAL for i in ids), tuple(sizes))


def _is_parameter(node: fx.Node) -> bool:
    """Whether `node` is a gathered parameter, as a wait returns it."""
    return is_element(node) and str(node.args[0].target) == "dc.wait_allgather_fused.default"


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _parameters(program: Program, instruction: Instruction) -> list[tuple[str, int]]:
    serial = program.graph_id & ~_LOCAL
    infos = [program.params[serial | i] for i in instruction.ids]
    return [(info.name, info.gathered_bytes) for info in infos]


def check_schedule(schedule: Schedule) -> None:
    """Raises unless `schedule` can run: everything read is gathered and waited for, and nothing is left behind.

    What a forward program left gathered does not count: a backward program names all it reads in gathers of its own,
    which find the parameter there and send nothing. So a schedule holds whatever ran before it.

    Args:
        schedule: The schedule.

    Raises:
        ScheduleError: Names the instruction and the parameter.
    """
    gathered: set[int] = set()
    waited: set[int] = set()
    for position, instruction in enumerate(schedule.instructions):
        where = f"{schedule.name}, instruction {position} ({instruction.op} {instruction.region or instruction.ids})"
        ids = set(instruction.ids)
        if instruction.op == "gather":
            gathered |= ids
        elif instruction.op == "wait":
            if missing := ids - gathered:
                raise ScheduleError(f"{where}: parameters {sorted(missing)} were not gathered before.")
            waited |= ids
        elif instruction.op == "compute":
            if missing := ids - (waited & gathered):
                raise ScheduleError(f"{where}: parameters {sorted(missing)} are read but not gathered and waited for.")
        elif instruction.op in RELEASES:
            if instruction.op == "release_at_boundary" and schedule.kind != "backward":
                raise ScheduleError(f"{where}: only backward programs know whether the optimizer steps next.")
            gathered -= ids
            waited -= ids
    check_copies(schedule)
    expected = set(schedule.kept) if schedule.kind == "forward" else set()
    if gathered != expected:
        raise ScheduleError(
            f"{schedule.name} ends with parameters {sorted(gathered)} gathered, and should with {sorted(expected)}: "
            "release them after their last use, or name them in `kept`."
        )


def reschedule(program: Program, schedule: Schedule, history: str) -> Program:
    """Gives `program` another schedule.

    Gathers, releases and copies may move, merge, split, appear and disappear; regions, waits and reductions stay in
    order. A reduction may change between every micro-batch and the boundary.

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
    current = read_schedule(program)
    if _fixed(current.instructions) != _fixed(schedule.instructions):
        raise ScheduleError(f"The schedule of {schedule.name!r} computes or reduces otherwise than {program.name!r}.")
    serial = program.graph_id & ~_LOCAL
    kept = tuple(serial | i for i in schedule.kept)
    result = program.copy(kept=kept)
    graph = result.gm.graph
    nodes = instruction_nodes(result)
    dtypes = {i: dtype for node, op in nodes if op == "gather" for i, dtype in zip(*node.args[2:4], strict=True)}
    strip_copies(graph)
    for node, op in nodes:
        if op in _MOVABLE - COPIES:
            graph.erase_node(node)
    copies = CopyWriter(graph, program.graph_id)
    anchors = [node for node, op in nodes if op not in _MOVABLE]
    anchors.append(output_node(graph))
    passed = 0
    for instruction in schedule.instructions:
        if instruction.op not in _MOVABLE:
            if instruction.op in REDUCTIONS:
                late = instruction.op == "reduce_at_boundary"
                anchors[passed].update_arg(0, program.boundary_id if late else program.graph_id)
            passed += 1
            continue
        ids = [serial | i for i in instruction.ids]
        with graph.inserting_before(anchors[passed]):
            if instruction.op == "offload":
                copies.offload(instruction.ids)
            elif instruction.op == "reload":
                copies.reload(instruction.ids)
            elif instruction.op == "wait_copy":
                copies.wait(instruction.ids)
            elif instruction.op == "release":
                graph.call_function(torch.ops.dc.release_params_fused.default, (program.graph_id, ids))
            elif instruction.op == "release_at_boundary":
                graph.call_function(torch.ops.dc.release_params_at_boundary.default, (program.graph_id, ids))
            else:
                wanted = [dtypes.get(i, program.params[i].dtype) for i in ids]
                graph.call_function(torch.ops.dc.prefetch_params_fused.default, (program.graph_id, [], ids, wanted))
    return result.finish(history)


def _fixed(instructions: Iterable[Instruction]) -> list[Instruction]:
    """What a new schedule must leave as it is: when a gradient travels, and how large it is, do not belong to it."""
    fixed = [i for i in instructions if i.op not in _MOVABLE]
    return [replace(i, op="reduce" if i.op in REDUCTIONS else i.op, sizes=()) for i in fixed]


def check_copies(schedule: Schedule) -> None:
    """Raises unless every saved tensor is copied when it is there, waited for, and back before it is read.

    Args:
        schedule: The schedule.

    Raises:
        ScheduleError: Names the instruction and the tensor.
    """
    saved = {one.number: one for one in schedule.saved}
    region = {i.region: position for position, i in enumerate(schedule.instructions) if i.op == "compute"}
    forward = schedule.kind == "forward"
    started: dict[int, int] = {}
    waited: set[int] = set()
    for position, instruction in enumerate(schedule.instructions):
        if instruction.op not in COPIES:
            continue
        where = f"{schedule.name}, instruction {position} ({instruction.op} {instruction.ids})"
        if instruction.op == ("reload" if forward else "offload"):
            raise ScheduleError(f"{where}: only {'backward' if forward else 'forward'} programs do that.")
        for number in instruction.ids:
            if number not in saved:
                raise ScheduleError(f"{where}: there is no saved tensor {number} that could be copied.")
            if instruction.op == "wait_copy":
                if number not in started or number in waited:
                    raise ScheduleError(f"{where}: tensor {number} is not being copied.")
                waited.add(number)
                first = region[saved[number].first]
                if not forward and first < position:
                    raise ScheduleError(f"{where}: tensor {number} is read before, by {saved[number].first}.")
                continue
            if number in started:
                raise ScheduleError(f"{where}: tensor {number} is copied twice.")
            if forward and region[saved[number].first] > position:
                raise ScheduleError(f"{where}: tensor {number} is made later, by {saved[number].first}.")
            started[number] = position
    if missing := started.keys() - waited:
        raise ScheduleError(f"{schedule.name}: nothing waits for the copies of tensors {sorted(missing)}.")
