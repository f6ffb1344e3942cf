"""Lowers a partitioned graph to a program: cuts regions, compiles each distinct one once, and orders everything."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx, nn

from lightning_deepcompile import compat
from lightning_deepcompile.program.extract import ExtractedRegion, add_symbol_inputs, extract_region, symbol_sources
from lightning_deepcompile.program.flops import count_flops
from lightning_deepcompile.program.functional import functional_program
from lightning_deepcompile.program.graph import (
    attribute,
    is_compute,
    is_gather,
    is_lookup,
    is_of_statistics,
    is_reduce,
    looked_up_name,
    output_node,
)
from lightning_deepcompile.program.normalize import normalize
from lightning_deepcompile.program.program import ParamInfo, Program, RegionInfo, RegionModule
from lightning_deepcompile.program.region_memory import region_memory
from lightning_deepcompile.program.regions import Region, cut_regions
from lightning_deepcompile.program.repeatable import is_repeatable
from lightning_deepcompile.program.schedule import ProgramKind

__all__ = ["RegionCompiler", "lower"]


@dataclass
class RegionCompiler:
    """Compiles regions, each distinct one once.

    Args:
        backend: ``"inductor"`` or ``"eager"``, as in `CompileConfig.region_backend`.

    Attributes:
        compiled: Number of distinct regions compiled.
        requested: Number of regions asked for.
        seconds: Time spent compiling.
    """

    backend: str = "inductor"
    compiled: int = 0
    requested: int = 0
    seconds: float = 0.0
    _cache: dict[tuple[str, tuple[str, ...], ProgramKind, object, bool], compat.BoxedCallable] = field(
        default_factory=dict
    )

    def __call__(self, extracted: ExtractedRegion, kind: ProgramKind, *, rounds: bool = False) -> compat.BoxedCallable:
        """Returns the compiled form of `extracted` for a program of `kind`; `rounds` as in `compat.compile_region`."""
        self.requested += 1
        # Code for symbolic sizes holds under the guards of the frame it was compiled in, which are those of its shape
        # environment: another frame's sizes may break them. (Across frames Inductor's own cache checks the guards.)
        key = (extracted.key, extracted.devices, kind, extracted.shape_env, rounds)
        if key not in self._cache:
            start = time.perf_counter()
            if self.backend == "eager" or (rounds and not compat.rounds_casts(extracted.fake_inputs)):
                self._cache[key] = _run_eagerly(extracted.gm)
            else:
                self._cache[key] = compat.compile_region(
                    extracted.gm,
                    extracted.fake_inputs,
                    is_backward=kind == "backward",
                    is_inference=kind == "inference",
                    rounds=rounds,
                )
            self.compiled += 1
            self.seconds += time.perf_counter() - start
        return self._cache[key]


def _run_eagerly(gm: fx.GraphModule) -> compat.BoxedCallable:
    def run(args: list[Any]) -> Any:
        inputs = tuple(args)
        args.clear()
        return gm(*inputs)

    return run


def lower(
    gm: fx.GraphModule,
    *,
    name: str,
    kind: ProgramKind,
    graph_id: int,
    params: dict[int, ParamInfo],
    compile_region: Callable[[ExtractedRegion, ProgramKind], compat.BoxedCallable],
    progress: Callable[[str], None] | None = None,
    cuts: bool = True,
    fuses: bool = True,
    frame: int = 0,
) -> Program:
    """Lowers `gm` to a program in its functional form: every gather and reduction blocks.

    Args:
        gm: Forward, backward or inference graph from AOTAutograd; rewritten in place.
        name: The program's name.
        kind: Its kind.
        graph_id: Runtime id of the graph.
        params: Parameters by id.
        compile_region: Compiles a region, usually a `RegionCompiler`.
        progress: Called with the name of the region that is being compiled.
        cuts: Whether the graph is cut between blocks. If not, the whole graph is one region.
        fuses: Whether `compile_region` fuses element-wise operators, for predictions of memory.
        frame: Number of the captured graph; a forward and its backward program share it.

    Returns:
        The program. It is correct as it stands; passes schedule it.
    """
    graph = gm.graph
    normalize(graph)
    symbols = symbol_sources(graph)
    named = {info.name: info for info in params.values()}
    regions = cut_regions(
        graph, lambda key: (named[key] if isinstance(key, str) else params[key]).block if cuts else ""
    )
    for region in regions:
        add_symbol_inputs(region, symbols)
    compiled = []
    for index, region in enumerate(regions):
        if progress is not None:
            progress(f"compiling {name}, region {index + 1}/{len(regions)}")
        extracted = extract_region(gm, region)
        lookups = tuple((_brief(node), named[looked_up_name(node)].ds_id) for node in region.nodes if is_lookup(node))
        info = RegionInfo(
            extracted.key,
            tuple(region.blocks),
            len(region.nodes),
            is_repeatable(region.nodes),
            lookups,
            region_memory(region.nodes, region.outputs, compiled=fuses),
            sum(map(is_of_statistics, region.nodes)),
            count_flops(region.nodes, backward=kind == "backward"),
        )
        compiled.append(RegionModule(compile_region(extracted, kind), info))
    program = _Builder(gm, name).build(regions, compiled)
    return functional_program(program, name=name, kind=kind, graph_id=graph_id, params=params, frame=frame)


def _brief(node: fx.Node) -> str:
    return compat.schema_of(cast(compat.OpOverload, node.target)).name.partition("::")[2].replace("_", " ")


class _Builder:
    """Writes the program's graph region by region, together with the nodes that each region reads."""

    def __init__(self, parent: fx.GraphModule, name: str) -> None:
        self._parent, self._name = parent, name
        self._graph = fx.Graph()
        self._root = nn.Module()
        self._done: dict[fx.Node, fx.Node] = {}

    def build(self, regions: list[Region], compiled: list[RegionModule]) -> fx.GraphModule:
        for node in self._parent.graph.nodes:
            if node.op == "placeholder":
                copy = self._graph.placeholder(node.name)
                copy.meta = dict(node.meta)
                self._done[node] = copy
        for index, (region, module) in enumerate(zip(regions, compiled, strict=True)):
            self._root.add_module(f"region_{index}", module)
            self._call(f"region_{index}", region)
        output = output_node(self._parent.graph)
        values = fx.map_arg(output.args[0], self._value)
        self._graph.output(values).meta = dict(output.meta)
        self._graph.lint()
        return compat.graph_module(self._root, self._graph)

    def _call(self, name: str, region: Region) -> None:
        # A gather is written again for every region that reads it: schedules decide how long a parameter stays.
        inputs = [self._copy(node) if is_gather(node) else self._value(node) for node in region.inputs]
        call = self._graph.call_module(name, tuple(inputs))
        call.meta["val"] = tuple(node.meta["val"] for node in region.outputs)
        for position, node in enumerate(region.outputs):
            element = self._graph.call_function(operator.getitem, (call, position))
            element.meta = {key: node.meta[key] for key in ("val", "saved") if key in node.meta}
            self._done[node] = element
        for node in region.outputs:
            for user in node.users:
                if is_reduce(user):
                    self._value(user)

    def _value(self, node: fx.Node) -> fx.Node:
        if node not in self._done:
            self._done[node] = self._copy(node)
        return self._done[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        """Copies a node that belongs to no region: a gather, a reduction, a constant, arithmetic of sizes."""
        if is_compute(node):
            raise RuntimeError(
                f"{self._name}: {node.name} is read before the region that computes it. This is a bug: please "
                "report it."
            )
        for source in node.all_input_nodes:
            self._value(source)
        if node.op == "get_attr":
            value = attribute(self._parent, node)
            name = f"constant_{str(node.target).replace('.', '_')}"
            while getattr(self._root, name, value) is not value:  # `a.b` beside `a_b`
                name += "_"
            setattr(self._root, name, value)
            copy = self._graph.get_attr(name)
        else:
            copy = self._graph.node_copy(node, lambda n: self._done[n])
        copy.meta = dict(node.meta)
        return copy
