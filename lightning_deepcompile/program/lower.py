"""Lowers a partitioned graph to a program: cuts regions, compiles each distinct one once, and orders everything."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx

from lightning_deepcompile import compat
from lightning_deepcompile.program.extract import ExtractedRegion, add_symbol_inputs, extract_region, symbol_sources
from lightning_deepcompile.program.flops import count_flops
from lightning_deepcompile.program.functional import functional_program
from lightning_deepcompile.program.graph import is_lookup, is_of_statistics, looked_up_name
from lightning_deepcompile.program.normalize import normalize
from lightning_deepcompile.program.program import CompiledRegion, ParamInfo, Program, RegionInfo
from lightning_deepcompile.program.region_memory import region_memory
from lightning_deepcompile.program.regions import cut_regions
from lightning_deepcompile.program.repeatable import is_repeatable
from lightning_deepcompile.program.schedule import ProgramKind


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
        compiled.append(CompiledRegion(compile_region(extracted, kind), info))
    return functional_program(
        gm, regions, compiled, name=name, kind=kind, graph_id=graph_id, params=params, frame=frame
    )


def _brief(node: fx.Node) -> str:
    return compat.schema_of(cast(compat.OpOverload, node.target)).name.partition("::")[2].replace("_", " ")
