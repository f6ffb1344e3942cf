"""The program that lowering produces: its regions, and a schedule in which all communication blocks.

Parameters are gathered right before each region that reads them, gradients are reduced right behind the region that
makes them. Such a program is correct but slow; the first pass replaces its schedule.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from torch import fx

from lightning_deepcompile.program.graph import (
    args_of,
    gathers_of,
    is_gather,
    is_read_between,
    is_reduce,
    nbytes,
    only_maker,
)
from lightning_deepcompile.program.instructions import Operation
from lightning_deepcompile.program.program import LOCAL_ID, ParamInfo, Program
from lightning_deepcompile.program.saved import read_saved
from lightning_deepcompile.program.schedule import Instruction, ProgramKind, Schedule

__all__ = ["functional_program"]


def functional_program(
    gm: fx.GraphModule,
    *,
    name: str,
    kind: ProgramKind,
    graph_id: int,
    params: dict[int, ParamInfo],
    frame: int = 0,
) -> Program:
    """Makes the program of a graph of regions.

    Args:
        gm: As `Program.gm`.
        name: The program's name.
        kind: Its kind.
        graph_id: Runtime id of the graph.
        params: Parameters by id.
        frame: Number of the captured graph; a forward and its backward program share it.
    """
    instructions: list[Instruction] = []

    def gather(op: Operation, nodes: list[fx.Node], region: str = "") -> None:
        # Ordered by number, not as the graph reads them: of another batch's sizes a compiler makes other operators.
        infos = sorted((params[args_of(node)[1]] for node in nodes), key=lambda info: info.ds_id)
        sizes = tuple(info.gathered_bytes for info in infos) if op == "gather_now" else ()
        instructions.append(Instruction(op, tuple(info.ds_id & LOCAL_ID for info in infos), sizes, region))

    def reduce(nodes: list[fx.Node], made: str = "") -> None:
        ids = tuple(args_of(node)[1] & LOCAL_ID for node in nodes)
        sizes = tuple(nbytes(args_of(node)[0]) for node in nodes)
        instructions.append(Instruction("reduce_now", ids, sizes, made=(made,) * len(ids) if made else ()))

    for node in gm.graph.nodes:
        if node.op == "call_module":
            region, gathers = str(node.target), gathers_of(node)
            if gathers:
                gather("gather_now", gathers, region)
            gather("compute", gathers, region)
            readers = [reader for element in node.users for reader in element.users]
            made = [reader for reader in readers if is_reduce(reader) and only_maker(reader, kind) is node]
            if made:
                reduce(sorted(made, key=lambda reduction: args_of(reduction)[1]), region)
        elif is_gather(node) and is_read_between(node):
            gather("gather_now", [node])
        elif is_reduce(node) and only_maker(node, kind) is None:
            reduce([node])
    schedule = Schedule(name, kind, frame, tuple(instructions), saved=read_saved(gm.graph))
    program = Program(graph_id, gm, params, schedule, ("lower",))
    structure, regions = _structure(program), [program.region(region).info.key for region in program.regions()]
    schedule = replace(schedule, content=_digest([*structure, *regions]), structure=_digest(structure))
    return replace(program, schedule=schedule)


def _structure(program: Program) -> list[str]:
    """Describes the computation and communication of a program, whatever its schedule.

    It contains the parameters' numbers, by which instructions name them: these change with the model around a program.
    """
    lines: list[str] = [program.kind]
    for instruction in program.schedule.instructions:
        if instruction.op == "gather_now" and instruction.region:
            continue
        op = "reduce" if instruction.made else instruction.op
        named = [(info.name, info.gathered_bytes) for info in program.infos(instruction.ids)]
        lines.append(f"{op} {instruction.ids} {named}")
    return lines


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
