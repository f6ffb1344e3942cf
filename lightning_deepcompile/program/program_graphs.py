"""The CUDA graphs of one program: the work that it issues, collectives included, is recorded and launched as a whole.

A graph reads and writes the addresses that it was recorded with. So a forward program's saved tensors lie in the
graphs' memory, where the backward program's graph reads them; results for anybody else are copied out, and inputs are
copied in unless they are the same tensor every time. A forward program runs without its graph while its last saved
tensors may still be read.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from lightning_deepcompile import compat
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.replay import Replays, Run
from lightning_deepcompile.program.schedule import ProgramKind

_log = logging.getLogger(__name__)

_MOST = 8
"""Graphs of one program, for other numbers among its inputs or other states of the runtime; beyond, it runs."""

_HOSTS_WAIT = frozenset({torch.Tag.data_dependent_output, torch.Tag.cudagraph_unsafe})


@dataclass(frozen=True)
class Examined:
    """Facts about a program's operators, known before it runs.

    Args:
        obstacle: The reason why it cannot be recorded; empty if nothing is known.
        written: Places of inputs that it writes to.
    """

    obstacle: str = ""
    written: tuple[int, ...] = ()


def examine(gm: fx.GraphModule, device: torch.device) -> Examined:
    """Examines the operators of a program, before it is lowered."""
    places = {node: place for place, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    writes = [n for n in gm.graph.nodes if n.target is torch.ops.aten.copy_.default and n.args[0] in places]
    return Examined(_obstacle(gm, device), tuple(sorted({places[node.args[0]] for node in writes})))


def _obstacle(gm: fx.GraphModule, device: torch.device) -> str:
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.device.type != device.type:
            return f"`{node.name}` is computed on {value.device}"
        if not isinstance(node.target, compat.OpOverload):
            continue
        # Some operators have data-dependent shapes only for some arguments, such as boolean indices.
        shaped = torch.Tag.dynamic_output_shape in node.target.tags and not _has_fixed_shape(value)
        if shaped or not _HOSTS_WAIT.isdisjoint(node.target.tags):
            return f"the host waits in `{node.target}`"
    return ""


def _has_fixed_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)


@dataclass(eq=False)
class _Graph:
    """A recorded program.

    Args:
        graph: The CUDA graph.
        recording: The runtime's state around it.
        inputs: The tensors that it reads: its own, or those that are the same every time.
        copied: Places of those that are copied in.
        given: Places of those that must be the same.
        outputs: The tensors that it writes, or hands on.
        mark: Of a forward program: the place of the first output that is saved and lies in the graphs' memory.
        backward: Of a forward program: the graphs of its backward program that read what this one saves.
    """

    graph: torch.cuda.CUDAGraph
    recording: Any
    inputs: list[Any]
    copied: list[int]
    given: list[int]
    outputs: list[Any]
    mark: int | None = None
    backward: dict[Any, list[_Graph]] = field(default_factory=dict)

    def changed(self, args: Sequence[Any]) -> list[int]:
        """Places of inputs that have changed and cannot be copied in."""
        return [i for i in self.given if not _is_same(args[i], self.inputs[i])] + [
            i for i in self.copied if args[i].shape != self.inputs[i].shape
        ]


@dataclass(eq=False)
class LastReplay:
    """The last replay of a forward program, which its backward program reads.

    Attributes:
        saved: The tensors that the forward program's last replay has saved.
        graph: The graph that was replayed.
        alive: One of the saved tensors, as an object of its own: autograd keeps it for as long as a backward pass may
            read it, and possibly longer.
    """

    saved: list[Tensor] = field(default_factory=list)
    graph: _Graph | None = None
    alive: weakref.ref[Tensor] | None = None

    @property
    def is_read(self) -> bool:
        """True if a backward pass may still read the tensors that the last replay saved."""
        return self.alive is not None and self.alive() is not None

    def has_been_read(self) -> None:
        """Call in a backward pass that has read the tensors of the last replay."""
        if not compat.keeps_graph():
            self.alive = None

    def has_saved(self, args: Sequence[Any]) -> bool:
        """Returns whether a backward program's inputs are those that the last replay has saved."""
        alive = None if self.alive is None else self.alive()
        return alive is not None and any(isinstance(a, Tensor) and _is_same(a, alive) for a in args)


class ProgramGraphs:
    """Runs one program, either directly or as a graph.

    Args:
        replays: The state that all programs share.
        last: The last replay of the forward program, shared with its partner.
        program: The program.
        outputs: How many of a forward program's outputs are not saved.
        examined: Facts about its operators.
    """

    def __init__(self, replays: Replays, last: LastReplay, program: Program, outputs: int, examined: Examined) -> None:
        self._replays, self._last, self._name, self._outputs = replays, last, program.name, outputs
        self._kind: ProgramKind = program.kind
        self._obstacle = self._own_obstacle = examined.obstacle
        self._written = examined.written
        # Derived values come last among its inputs, and are always the same tensors.
        self._derived = sum(not value.is_gathered for block in program.derived for value in block.values)
        self._runs: Counter[Any] = Counter()
        self._graphs: dict[Any, list[_Graph]] = {}
        self._recorded: Counter[Any] = Counter()  # by the numbers among its inputs
        self._before: list[weakref.ref[Tensor] | None] = []  # the inputs of the last run
        self._changing: set[int] = set()  # places of inputs that are not always the same tensor
        replays.follow(self)

    def swapped(self, program: Program) -> None:
        """Call when the program was swapped."""
        self.forget()
        unknown = {i.op for i in program.schedule.instructions if not i.traits.recordable}
        self._obstacle = self._own_obstacle or (f"it does {', '.join(sorted(unknown))}" if unknown else "")

    @property
    def begins(self) -> bool:
        """True if nothing is known that prevents a recording."""
        return not self._obstacle and self._kind != "inference"

    def forget(self) -> None:
        """Drops its graphs."""
        self._graphs = {}
        self._recorded.clear()
        self._runs.clear()
        self._last.saved, self._last.graph, self._last.alive = [], None, None

    def __call__(self, args: list[Any], run: Run) -> Sequence[Any]:
        """Runs the program, either by ``run(args)`` or as a graph."""
        if not self._replays.enabled or self._kind == "inference":
            return run(args)
        if self._obstacle:
            self._replays.refuse(self._name, self._obstacle)
            return run(args)
        key = tuple(a for a in args if not isinstance(a, Tensor))
        if self._kind == "forward":
            if self._last.is_read:
                return run(args)
        elif not self._last.has_saved(args):
            self._runs[key] += 1
            return run(args)
        else:
            self._last.has_been_read()  # or is, by what follows
        graphs = self._graphs_for(key)
        for graph in list(graphs):
            if changed := graph.changed(args):
                self._changing.update(changed)
                graphs.remove(graph)
            elif self._replays.fits(graph.recording):
                return self._replay(graph, args)
        if not self._replays.may_record(self._runs[key]):
            self._runs[key] += 1
            self._before = [weakref.ref(a) if isinstance(a, Tensor) else None for a in args]
            return run(args)
        if self._recorded.total() == _MOST:
            if self._recorded[key] == _MOST:
                self._give_up(
                    f"it was recorded {_MOST} times, as its inputs or gradients lie elsewhere again and again"
                )
            return run(args)  # or graphs of other sizes are all that there may be
        try:
            graph = self._record(args, run, key)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            return run(args)
        graphs.append(graph)
        return self._replay(graph, args)

    def _graphs_for(self, key: Any) -> list[_Graph]:
        """The graphs that were recorded with the numbers in `key` among their inputs."""
        forward = self._last.graph
        known = self._graphs if self._kind == "forward" or forward is None else forward.backward
        return known.setdefault(key, [])

    def _give_up(self, reason: str) -> None:
        self._replays.give_up()
        self._obstacle = self._replays.reasons[self._name] = reason
        self._graphs = {}
        _log.warning("The program %s runs without a CUDA graph: %s.", self._name, reason)

    @torch.no_grad()
    def _record(self, args: list[Any], run: Run, key: Any) -> _Graph:
        inputs, copied, given = list(args), [], []
        for i, value in enumerate(args):
            if not isinstance(value, Tensor):
                continue
            if value.device != self._replays.device:
                raise ValueError(f"it reads a tensor on {value.device}")
            if i >= len(args) - self._derived or self._is_same_every_time(i, value):
                given.append(i)
            elif i in self._written:
                raise ValueError("it writes to an input that is not the same tensor every time")
            else:
                copied.append(i)
                inputs[i] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                ).copy_(value)
        recorded, recording, outputs = self._replays.record(run, list(inputs))
        graph = _Graph(
            recorded, recording, inputs, copied, given, outputs, self._mark(outputs, [inputs[i] for i in given])
        )
        self._recorded[key] += 1
        return graph

    def _mark(self, outputs: list[Any], own: list[Any]) -> int | None:
        if self._kind == "backward":
            return None
        places = range(self._outputs, len(outputs))
        mine = (i for i in places if isinstance(outputs[i], Tensor) and not any(outputs[i] is one for one in own))
        return next(mine, None)

    def _is_same_every_time(self, place: int, value: Tensor) -> bool:
        if self._kind == "backward":
            return any(_is_same(value, saved) for saved in self._last.saved)
        if place in self._changing or place >= len(self._before):
            return False
        before = self._before[place]
        return before is not None and before() is value

    @torch.no_grad()
    def _replay(self, graph: _Graph, args: list[Any]) -> Sequence[Any]:
        for i in graph.copied:
            graph.inputs[i].copy_(args[i])
        args.clear()
        self._replays.launch(graph, self._name)
        if self._kind == "backward":
            return [_copy(value) for value in graph.outputs]
        handed = [_copy(value) for value in graph.outputs[: self._outputs]]
        saved = graph.outputs[self._outputs :]
        tensors = [value for value in saved if isinstance(value, Tensor)]
        self._last.saved, self._last.graph, self._last.alive = tensors, graph, None
        if graph.mark is not None:
            place = graph.mark - self._outputs
            saved[place] = compat.alias(saved[place])  # AOTAutograd would save another object for a view
            self._last.alive = weakref.ref(saved[place])
        return [*handed, *saved]


def _is_same(value: Tensor, known: Tensor) -> bool:
    """Returns whether `value` is at the address of `known`, whose memory is held, with its shape and dtype."""
    return value is known or (
        value.data_ptr() == known.data_ptr() and value.shape == known.shape and value.dtype == known.dtype
    )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
