"""The table of instructions: their names, how a program writes them, and their effects.

All code that reads, changes, prints, simulates or measures instructions asks this table. A new instruction is a row
here, a branch in the simulator if its effect is new, one in code generation if it hands on values, and an operator in
``csrc/bindings/ops.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_deepcompile import compat

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
    "reload_states",
    "wait_states",
]
Verb = Literal["launch", "wait", "launch and wait", "free", "compute", "end"]
Subject = Literal["parameters", "gradients", "saved tensors", "states", ""]
Stream = Literal["host", "compute", "gather", "reduce", "out", "in", "states out", "states in"]
"""What an instruction keeps busy: the host alone, or a stream of the device."""
Argument = Literal["graph", "boundary graph", "shards", "ids", "dtypes", "tensors", "size", "sizes"]

AT_BOUNDARY = 1 << 31
"""Of a graph's id: the graph whose gradients are added up whole and reduced at the boundary."""


@dataclass(frozen=True)
class Tally:
    """A number by which a change of schedules is described.

    Args:
        of: What is counted of the instructions.
        text: What it is the number of.
    """

    of: Literal["groups", "items", "bytes"]
    text: str


@dataclass(frozen=True)
class Traits:
    """A row of the table.

    Args:
        op: Name in schedules, and so in plan files.
        effect: The action, and its object.
        operator: Operator of ``torch.ops.dc`` in programs; a ``compute`` is a call of a region instead.
        arguments: The operator's arguments. ``ids`` are parameters' (or one's), or chunks' of states; saved
            tensors have their numbers in the metadata of ``tensors``.
        printed: Its label in a printed program, if that is not its name.
        stream: The stream that executes it.
        collective: The name by which ranks compare it; empty if it involves no other rank.
        at_boundary: Whether it happens only in the last micro-batch before the optimizer steps.
        in_forward: Whether only forward programs contain it (True) or never (False); None if either may.
        fixed: Whether no schedule may move it.
        counts: Numbers that it counts in.
    """

    op: Operation
    effect: tuple[Verb, Subject]
    operator: str = ""
    arguments: tuple[Argument, ...] = ()
    printed: str = ""
    stream: Stream = "host"
    collective: str = ""
    at_boundary: bool = False
    in_forward: bool | None = None
    fixed: bool = False
    counts: tuple[Tally, ...] = ()

    @property
    def label(self) -> str:
        """Its label in a printed program."""
        return self.printed or self.op.replace("_", " ")

    @property
    def exposes(self) -> bool:
        """True if compute stalls in it until other ranks have sent something."""
        return self.effect == ("wait", "parameters") or self.effect[0] == "launch and wait"

    @property
    def recordable(self) -> bool:
        """True if a CUDA graph may contain it: host memory is handed out anew in every step."""
        return self.effect[1] not in ("saved tensors", "states")

    @property
    def overload(self) -> compat.OpOverload:
        """The operator."""
        return getattr(torch.ops.dc, self.operator).default

    def values(self, graph_id: int, **given: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments that the operator is called with.

        Args:
            graph_id: Runtime id of the graph.
            given: The other arguments, by name; those that the operator does not take are left out.
        """
        graphs = {"graph": graph_id, "boundary graph": graph_id | AT_BOUNDARY}
        return tuple(graphs[name] if name in graphs else list(given[name]) for name in self.arguments)


_REDUCTIONS = Tally("groups", "groups of reductions")

_ROWS = (
    # Launches one group; parameters that are gathered already are not sent again.
    Traits(
        "gather",
        ("launch", "parameters"),
        "prefetch_params_fused",
        ("graph", "shards", "ids", "dtypes"),
        stream="gather",
        collective="gather",
        counts=(Tally("groups", "groups of gathers"),),
    ),
    # Makes the compute stream wait for gathers, and returns the parameters.
    Traits("wait", ("wait", "parameters"), "wait_allgather_fused", ("graph", "ids"), fixed=True),
    Traits("compute", ("compute", ""), stream="compute", fixed=True),
    Traits("release", ("free", "parameters"), "release_params_fused", ("graph", "ids"), collective="release"),
    # No-op in micro-batches before the last one, so that the next one finds the parameters gathered.
    Traits(
        "release_at_boundary",
        ("free", "parameters"),
        "release_params_at_boundary",
        ("graph", "ids"),
        collective="release at the boundary",
        at_boundary=True,
        in_forward=False,
        counts=(Tally("items", "parameters kept for the next micro-batch"),),
    ),
    # Launches the reduction of one group of gradients, which the runtime owns from then on.
    Traits(
        "reduce",
        ("launch", "gradients"),
        "reduce_grads_fused",
        ("graph", "tensors", "ids"),
        stream="reduce",
        collective="reduce",
        counts=(_REDUCTIONS,),
    ),
    # Adds the group to sums of whole gradients, and launches their reduction at the boundary. The time of reduction is
    # a property of a graph in the runtime, so the operator is the same and names another graph.
    Traits(
        "reduce_at_boundary",
        ("launch", "gradients"),
        "reduce_grads_fused",
        ("boundary graph", "tensors", "ids"),
        stream="reduce",
        collective="reduce at the boundary",
        at_boundary=True,
        counts=(_REDUCTIONS, Tally("items", "gradients reduced at the boundary")),
    ),
    # At the boundary, also reduces held gradients of the graph if no group of it has come.
    Traits(
        "end",
        ("end", ""),
        "end_backward",
        ("graph",),
        printed="end of backward",
        collective="end of backward",
        fixed=True,
    ),
    # Written by lowering: functions of tensors.
    Traits(
        "gather_now",
        ("launch and wait", "parameters"),
        "gather",
        ("shards", "ids", "size", "dtypes"),
        printed="gather",
        stream="gather",
        collective="dc.gather.default",
        fixed=True,
    ),
    Traits(
        "reduce_now",
        ("launch and wait", "gradients"),
        "reduce",
        ("tensors", "ids", "size", "dtypes"),
        printed="reduce",
        stream="reduce",
        collective="dc.reduce.default",
        fixed=True,
    ),
    # Starts copying saved tensors to the host, and back. Their memory is freed when the copy out is waited for, and
    # allocated when the copy back starts.
    Traits(
        "offload",
        ("launch", "saved tensors"),
        "offload_tensors_fused",
        ("graph", "tensors"),
        stream="out",
        in_forward=True,
        counts=(Tally("bytes", "activations in host memory"),),
    ),
    Traits(
        "reload",
        ("launch", "saved tensors"),
        "reload_tensors_fused",
        ("graph", "tensors"),
        stream="in",
        in_forward=False,
    ),
    Traits("wait_copy", ("wait", "saved tensors"), "wait_copies_fused", ("graph", "tensors")),
    # Starts copying optimizer states from the host.
    Traits(
        "reload_states",
        ("launch", "states"),
        "reload_states",
        ("graph", "ids", "sizes"),
        printed="reload",
        stream="states in",
        at_boundary=True,
        in_forward=False,
        counts=(Tally("items", "chunks of optimizer states fetched in backward"),),
    ),
    # Makes the compute stream wait until the states that the optimizer has stepped have left the device.
    Traits(
        "wait_states", ("wait", "states"), "wait_states", ("graph", "ids", "sizes"), printed="wait", in_forward=True
    ),
)

TABLE: dict[Operation, Traits] = {row.op: row for row in _ROWS}

RELEASES = frozenset(row.op for row in _ROWS if row.effect == ("free", "parameters"))
"""The operations that end the use of a gathered parameter."""

REDUCTIONS = frozenset(row.op for row in _ROWS if row.effect == ("launch", "gradients"))
"""The operations that hand a group of gradients to the runtime."""

COPIES = frozenset(row.op for row in _ROWS if row.effect[1] == "saved tensors")
"""The operations on saved tensors; their ids are numbers of `Schedule.saved`, not parameters."""

STATE_COPIES = frozenset(row.op for row in _ROWS if row.effect[1] == "states")
"""The operations on optimizer states that wait in host memory; their ids are numbers of chunks."""
