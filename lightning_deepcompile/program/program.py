"""The program: a straight line of compiled regions and communication, as an FX graph that passes rewrite.

Node kinds, all in one flat graph:

* ``placeholder``/``output``: those of the graph that AOTAutograd handed over;
* ``call_module region_k``: a compiled region, returning a tuple;
* ``torch.ops.dc.*``: communication. Right after lowering there are only the functional ``dc.gather`` and ``dc.reduce``;
  passes replace them by scheduled instructions;
* arithmetic of symbolic sizes, and ``operator.getitem`` of tuples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import fx, nn

from lightning_deepcompile import compat
from lightning_deepcompile.program.instructions import AT_BOUNDARY, instructions_of

__all__ = ["LOCAL_ID", "ParamInfo", "Program", "ProgramKind", "RegionInfo", "RegionModule", "collective_sequence"]

ProgramKind = Literal["forward", "backward", "inference"]

LOCAL_ID = 0xFFFFFFFF
"""The part of an id that is the same on all ranks: the rest is the runtime's number."""


@dataclass(frozen=True)
class ParamInfo:
    """What passes know of a parameter.

    Args:
        ds_id: Runtime id.
        name: Fully qualified name.
        block: Block it communicates with.
        gathered_bytes: Bytes of the gathered parameter in its compute dtype, padding included.
        dtype: Compute dtype, which is the dtype on the wire.
    """

    ds_id: int
    name: str
    block: str
    gathered_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class RegionInfo:
    """What is known of a region besides its code.

    Args:
        key: Content key; equal regions share it.
        blocks: Blocks that it works for.
        nodes: Number of operators before compilation.
        repeatable: Whether it may be called again with the same inputs; see `is_repeatable`.
        lookups: What it exchanges with other ranks: of each look-up in a table its part in it, and the table's id.
    """

    key: str
    blocks: tuple[str, ...]
    nodes: int
    repeatable: bool = False
    lookups: tuple[tuple[str, int], ...] = ()


class RegionModule(nn.Module):
    """A compiled region inside a program's graph module.

    Args:
        run: The compiled function, taking its inputs as one list that it empties.
        info: What is known of it.
    """

    def __init__(self, run: Callable[[list[Any]], Sequence[Any]], info: RegionInfo) -> None:
        super().__init__()
        self.run = run
        self.info = info

    def forward(self, *args: Any) -> Sequence[Any]:
        """Runs the region; programs call `run` directly instead."""
        return self.run(list(args))


@dataclass(frozen=True)
class Program:
    """A program and what it belongs to. Passes return new programs and leave their argument as it is.

    Args:
        name: For people: frame and kind.
        kind: Whether it is a forward program (a backward follows), a backward, or neither needs gradients.
        graph_id: Runtime id of the graph.
        gm: The instructions.
        params: Parameters by id, those of the whole model.
        kept: Ids that the forward program of the same frame leaves gathered for this backward program.
        history: Passes applied so far.
        frame: Number of the captured graph; a forward and its backward program share it.
    """

    name: str
    kind: ProgramKind
    graph_id: int
    gm: fx.GraphModule
    params: dict[int, ParamInfo]
    kept: tuple[int, ...] = ()
    history: tuple[str, ...] = field(default=())
    frame: int = 0

    @property
    def boundary_id(self) -> int:
        """Runtime id of the graph for gradients that are added up whole and reduced at the boundary.

        When gradients travel is a graph's property in the runtime. So a backward program is two graphs there, and each
        of its reductions names one of them.
        """
        return self.graph_id | AT_BOUNDARY

    @functools.cached_property
    def signature(self) -> str:
        """What the program communicates, as lines of text, the same on all ranks; empty if nothing.

        Without its name: ranks that meet other shapes at a time have other numbers in their programs' names.
        """
        sequence = collective_sequence(self)
        return "\n".join([f"{self.kind} program", *(f"{kind} {ids}" for kind, ids in sequence)]) if sequence else ""

    def copy(self, **changes: Any) -> Program:
        """A program with a graph of its own (regions are shared), and `changes` to its fields."""
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(self.gm.graph, values)
        source_output = next(n for n in reversed(self.gm.graph.nodes) if n.op == "output")
        node = graph.output(output)
        node.meta = dict(source_output.meta)
        return replace(self, gm=compat.graph_module(self.gm, graph), **changes)

    def regions(self) -> list[fx.Node]:
        """The nodes that call regions, in order."""
        return [node for node in self.gm.graph.nodes if node.op == "call_module"]

    def region(self, node: fx.Node) -> RegionModule:
        """The region that `node` calls."""
        return cast(RegionModule, self.gm.get_submodule(str(node.target)))

    def finish(self, history: str) -> Program:
        """Checks and recompiles the graph after a pass named `history`."""
        self.gm.graph.lint()
        self.gm.recompile()
        return replace(self, history=(*self.history, history))


def collective_sequence(program: Program) -> list[tuple[str, tuple[int, ...]]]:
    """The collectives that a program issues, in order, with parameter ids local to the model: equal on all ranks.

    A gather that finds its parameters sends nothing, so what stays gathered, and until when, belongs to it.
    """
    sequence: list[tuple[str, tuple[int, ...]]] = []
    if program.kept:
        sequence.append(("keep", _local(sorted(program.kept))))
    for node, traits in instructions_of(program.gm.graph):
        if node.op == "call_module":
            sequence += [(part, _local([ds_id])) for part, ds_id in program.region(node).info.lookups]
        elif traits.collective:
            sequence.append((traits.collective, _local(traits.argument(node, "ids"))))
    return sequence


def _local(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(i & LOCAL_ID for i in ids)
