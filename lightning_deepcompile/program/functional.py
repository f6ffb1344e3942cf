"""The program that lowering produces: its values and regions, and a schedule in which all communication blocks.

Parameters are gathered right before each region that reads them, gradients are reduced right behind the region that
makes them. Such a program is correct but slow; the first pass replaces its schedule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from lightning_deepcompile.program.graph import args_of, attribute, is_gather, is_reduce, nbytes, output_node
from lightning_deepcompile.program.program import LOCAL_ID, CompiledRegion, ParamInfo, Program
from lightning_deepcompile.program.regions import Region
from lightning_deepcompile.program.schedule import Instruction, ProgramKind, Schedule
from lightning_deepcompile.program.values import Name, Value, parameter_name


def functional_program(
    gm: fx.GraphModule,
    regions: Sequence[Region],
    compiled: Sequence[CompiledRegion],
    *,
    name: str,
    kind: ProgramKind,
    graph_id: int,
    params: dict[int, ParamInfo],
    frame: int = 0,
) -> Program:
    """Makes the program of a graph that is cut into regions.

    Args:
        gm: The graph.
        regions: Its regions, in order.
        compiled: The same compiled, without the names of their inputs and outputs.
        name: The program's name.
        kind: Its kind.
        graph_id: Runtime id of the graph.
        params: Parameters by id.
        frame: Number of the captured graph; a forward and its backward program share it.
    """
    builder = _Builder(gm, regions, name, kind, params)
    for region, code in zip(regions, compiled, strict=True):
        builder.add(region, code)
    results = builder.reference(args_of(output_node(gm.graph))[0])
    schedule = Schedule(name, kind, frame, tuple(builder.instructions))
    program = Program(
        graph_id, params, schedule, builder.values, builder.regions, tuple(builder.inputs), results, ("lower",)
    )
    structure, keys = _structure(program), [region.info.key for region in builder.regions.values()]
    content, digest = _digest([*structure, *keys]), _digest(structure)
    return replace(program, schedule=replace(schedule, saved=program.saved(), content=content, structure=digest))


class _Builder:
    """Names the values of a graph, region by region, and writes the instructions that make them."""

    def __init__(
        self, gm: fx.GraphModule, regions: Sequence[Region], name: str, kind: ProgramKind, params: dict[int, ParamInfo]
    ) -> None:
        self._gm, self._program, self._kind, self._params = gm, name, kind, params
        self._computed = {node for region in regions for node in region.nodes}
        self._taken = {parameter_name(ds_id & LOCAL_ID) for ds_id in params}
        self._names: dict[fx.Node, Name] = {}
        self.values: dict[str, Value] = {}
        self.regions: dict[str, CompiledRegion] = {}
        self.instructions: list[Instruction] = []
        self.inputs = [self._made(node) for node in gm.graph.nodes if node.op == "placeholder"]

    def add(self, region: Region, code: CompiledRegion) -> None:
        """Adds the next region, between its gathers and its reductions."""
        name = f"region_{len(self.regions)}"
        inputs = tuple(self._value(node) for node in region.inputs)
        self.regions[name] = replace(code, inputs=inputs, outputs=tuple(map(self._made, region.outputs)))
        # Ordered by number, not as the graph reads them: of another batch's sizes a compiler makes other operators.
        read = sorted(args_of(node)[1] for node in region.inputs if is_gather(node))
        ids = tuple(ds_id & LOCAL_ID for ds_id in read)
        if ids:
            sizes = tuple(self._params[ds_id].gathered_bytes for ds_id in read)
            self.instructions.append(Instruction("gather_now", ids, sizes, name))
        self.instructions.append(Instruction("compute", ids, region=name))
        reductions = [reader for node in region.outputs for reader in node.users if is_reduce(reader)]
        kept = [reduction for reduction in reductions if self._is_kept(reduction)]
        self._reduce(sorted(kept, key=lambda reduction: args_of(reduction)[1]), name)
        for reduction in reductions:
            if reduction not in self._names:
                self._reduce([reduction])

    def reference(self, argument: Any) -> Any:
        """Returns an argument with names in place of the nodes of the graph, and constants themselves."""
        return fx.node.map_aggregate(argument, lambda part: self._value(part) if isinstance(part, fx.Node) else part)

    def _is_kept(self, reduction: fx.Node) -> bool:
        """Returns whether the runtime can reduce a gradient, which a region makes, and keep the result.

        It can in backward programs, where only the output reads the reduced gradient. A gradient that does not depend
        on the loss's is computed, and saved, by the forward program: its reduction reaches ``.grad`` through autograd.
        """
        return self._kind == "backward" and all(reader.op == "output" for reader in reduction.users)

    def _reduce(self, reductions: list[fx.Node], made: str = "") -> None:
        if not reductions:
            return
        ids = tuple(args_of(node)[1] & LOCAL_ID for node in reductions)
        sizes = tuple(nbytes(args_of(node)[0]) for node in reductions)
        values = tuple(
            self._name(node, f"gradient_{number}", self._called(node))
            for node, number in zip(reductions, ids, strict=True)
        )
        makers = (made,) * len(ids) if made else ()
        self.instructions.append(Instruction("reduce_now", ids, sizes, made=makers, values=values))

    def _value(self, node: fx.Node) -> Any:
        """The name of a value that a region reads, or the program returns; a constant itself."""
        if node.op == "get_attr":
            return attribute(self._gm, node)
        if node not in self._names:
            if is_gather(node):
                name = parameter_name(args_of(node)[1] & LOCAL_ID)
                self._refuse(name in self.values, node, "gathers a parameter in another dtype, too")
                self._names[node] = name
                self.values[name] = self._called(node)
            elif is_reduce(node):
                self._reduce([node])
            else:
                self._refuse(node in self._computed, node, "is read before the region that computes it")
                self._name(node, node.name, self._called(node))
        return self._names[node]

    def _made(self, node: fx.Node) -> Name:
        """Names a value that the program's caller hands over, or that a region makes."""
        return self._name(node, node.name, Value(node.meta.get("val"), saved=node.meta.get("saved")))

    def _called(self, node: fx.Node) -> Value:
        """The value of a call between regions: of a gather, a reduction, arithmetic of sizes."""
        self._refuse(node.op != "call_function", node, f"is a {node.op}")
        communicates = is_gather(node) or is_reduce(node)
        function: Any = node.target
        return Value(
            node.meta.get("val"), function, self.reference(node.args), self.reference(node.kwargs), communicates
        )

    def _name(self, node: fx.Node, name: str, value: Value) -> Name:
        while name in self.values or name in self._taken:
            name += "_"
        self.values[name] = value
        self._names[node] = Name(name)
        return self._names[node]

    def _refuse(self, wrong: bool, node: fx.Node, what: str) -> None:
        if wrong:
            raise RuntimeError(f"{self._program}: {node.name} {what}. This is a bug: please report it.")


def _structure(program: Program) -> list[str]:
    """Describes the computation and communication of a program, whatever its schedule.

    It contains the parameters' numbers, by which instructions name them: these change with the model around a program.
    """
    lines: list[str] = [program.kind]
    for instruction in program.schedule.instructions:
        if instruction.op == "gather_now":
            continue
        op = "reduce" if instruction.made else instruction.op
        named = [(info.name, info.gathered_bytes) for info in program.infos(instruction.ids)]
        lines.append(f"{op} {instruction.ids} {named}")
    return lines


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
