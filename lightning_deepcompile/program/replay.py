"""Programs as CUDA graphs: the work that a program issues, collectives included, is recorded and launched as a whole.

A step of a small model waits for its host: every kernel, gather and reduction is a call of its own. A CUDA graph is one
call for all of them. PyTorch's ``mode="reduce-overhead"`` does so for compute; here the runtime's streams take part
(``csrc/executors/recorder.h``).

A graph reads and writes the addresses that it was recorded with. So a forward program's saved tensors lie in the
graphs' memory, where the backward program's graph reads them; results for anybody else are copied out, and inputs are
copied in unless they are the same tensor every time. A forward program runs without its graph while its last saved
tensors may still be read.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, fx

from lightning_deepcompile import compat
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.schedule import ProgramKind

__all__ = ["Examined", "Follower", "Frame", "ProgramGraphs", "Replays", "Trial"]

_log = logging.getLogger(__name__)

_RUNS = 2
"""A program runs so often before it is recorded: kernels are loaded and tuned, and connections made."""

_MOST = 8
"""Graphs of one program, for other numbers among its inputs or other states of the runtime; beyond, it runs."""

_WATCHED = 24
"""Steps whose times are compared to know whether graphs pay."""

_ALL = 10**6
"""More programs than there are."""

_RECORDABLE = frozenset({
    "gather", "wait", "compute", "release", "release_at_boundary", "reduce", "reduce_at_boundary", "end", "gather_now",
    "reduce_now",
})  # fmt: skip

_HOSTS_WAIT = frozenset({torch.Tag.data_dependent_output, torch.Tag.cudagraph_unsafe})

Run = Callable[[list[Any]], Sequence[Any]]

T = TypeVar("T")


class Follower(Protocol):
    """An object that has graphs.

    Attributes:
        begins: Whether recording begins for its sake.
    """

    @property
    def begins(self) -> bool:
        """True if recording begins for its sake."""

    def forget(self) -> None:
        """Drops the graphs."""


@dataclass(frozen=True)
class Examined:
    """Facts about a program's operators, known before it runs.

    Args:
        obstacle: The reason why it cannot be recorded; empty if nothing is known.
        written: Places of inputs that it writes to.
    """

    obstacle: str = ""
    written: tuple[int, ...] = ()


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
class Frame:
    """State that the forward and the backward program of one graph share.

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


class Trial:
    """Decides whether graphs pay: devices must be found waiting for their hosts, and steps must become shorter.

    Attributes:
        outcome: Empty until graphs were tried; then whether they stay, and why.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_WATCHED)
        self._waits: deque[bool] = deque(maxlen=_WATCHED)
        self._since: float | None = None
        self._idle = False  # at the beginning of a backward pass of the step under way
        self._before = 0.0
        self._left = 0  # steps until the trial ends
        self.outcome = ""

    @property
    def host_is_late(self) -> bool:
        """True if the device was idle when most of the last steps, or their backward passes, began.

        Where all gradients are reduced behind a backward pass, as at stage 1, the device is busy with that when a step
        begins, however late the host is.
        """
        return len(self._waits) == _WATCHED and sum(self._waits) > 0.8 * _WATCHED

    def begin_step(self, idle: bool, now: float) -> None:
        """Call before a training step.

        Args:
            idle: Whether the device has done all that it was given.
            now: Time in seconds.
        """
        if self._since is not None:
            self._times.append(now - self._since)
            self._waits.append(idle or self._idle)
        self._since, self._idle = now, False
        if self._left == 0:
            return
        self._left -= 1
        if self._left == 0:
            after = self._seconds()
            kept = after < 0.98 * self._before
            self.outcome = (
                f"CUDA graphs {'are kept' if kept else 'were no faster, and are not used'}: "
                f"{1e3 * after:.1f} ms a step ({1e3 * self._before:.1f} ms before)"
            )

    def begin_backward(self, idle: bool) -> None:
        """Call before a backward pass; `idle` as for `begin_step`."""
        self._idle |= idle

    def start(self) -> None:
        """Starts the trial: programs are recorded from now on."""
        if self._left == 0 and not self.outcome:
            self._before, self._left = self._seconds(), 2 * _WATCHED  # the first half may still record

    @property
    def failed(self) -> bool:
        """True if graphs were tried, and were no faster."""
        return "no faster" in self.outcome

    def _seconds(self) -> float:
        """Mean seconds of the last steps, without the longest: something else may have happened in it."""
        return sum(sorted(self._times)[:-1]) / max(len(self._times) - 1, 1)


class Replays:
    """Decides when the programs of one engine are recorded, and holds their shared state.

    Args:
        runtime: ``_C.Runtime``.
        device: Where the programs run.
        wanted: Whether to use graphs; ``"auto"``: where they pay.
        limit: Bytes that the device's allocator may hand out; None: no limit.

    Attributes:
        reasons: The reasons why programs, or the work between them, are not recorded, by name.
        recorded: The number of graphs recorded since all were dropped, without those of swapped programs.
        replayed: Names of the programs, and of the work between them, that were replayed.
        enabled: Whether programs are recorded and replayed in the step under way.
    """

    def __init__(
        self, runtime: Any, device: torch.device, wanted: Literal["auto"] | bool, limit: int | None = None
    ) -> None:
        self._graphs, self._limit = runtime.graphs, limit
        self.device, self._wanted = device, bool(wanted)
        self._trial = Trial() if wanted == "auto" else None
        self._agreed: Callable[[], bool] = lambda: True
        self._in_use = False
        self._failures = 0
        self._fresh = 0  # runs in the step before that were among the first of their program
        self._seen = 0
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self.reasons: dict[str, str] = {}
        self.replayed: set[str] = set()
        self.recorded = 0
        self.enabled = False

    @property
    def outcome(self) -> str:
        """The outcome of the trial; empty if none has ended."""
        return "" if self._trial is None else self._trial.outcome

    @property
    def ready(self) -> bool:
        """True if this rank's programs have run often enough to be recorded, and recording would pay."""
        if not self.enabled or self._fresh > 0 or not any(follower.begins for follower in self._followers):
            return False
        return self._trial is None or self.recorded > 0 or (self._trial.host_is_late and self._has_room())

    def begin_step(self, settled: bool) -> None:
        """Call before a training step.

        Args:
            settled: Whether programs stay as they are.
        """
        if self._trial is not None and not self._trial.outcome and settled and self._wanted:
            self._try(self._trial)
        if self._in_use and not settled:
            self.forget()  # steps are measured without the memory of graphs
        self.enabled = self._wanted and settled
        self._fresh, self._seen = self._seen, 0

    def begin_backward(self) -> None:
        """Call before a backward pass."""
        if self._trial is not None and self.enabled and not self._trial.outcome:
            self._trial.begin_backward(torch.cuda.current_stream().query())

    def _try(self, trial: Trial) -> None:
        trial.begin_step(torch.cuda.current_stream().query(), time.perf_counter())
        if trial.outcome:
            _log.info("%s.", trial.outcome)

    def _has_room(self) -> bool:
        """Returns whether a step's activations fit into memory twice: for graphs, and for programs without one.

        As much again must be free, for larger batches, and for validation.
        """
        taken = torch.cuda.memory_allocated()
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - taken
        if self._limit is not None:
            free = min(free, self._limit - taken)
        return torch.cuda.max_memory_allocated() - taken < 0.4 * free

    def agree(self, agreed: Callable[[], bool]) -> None:
        """Sets the function that tells whether all ranks are `ready`; it is called where one would record."""
        self._agreed = agreed

    @property
    def in_use(self) -> bool:
        """True if ranks have begun to record; the same on all of them, even if recording fails on one."""
        if not self._in_use and self.enabled and self._agreed():
            self._in_use = True
            self._graphs.begin()
        return self._in_use

    def refuse(self, name: str, reason: str) -> None:
        """Records the reason why `name` is not recorded, if anything is."""
        if self._trial is None or self._in_use:
            self.reasons[name] = reason

    @property
    def failures(self) -> int:
        """Programs of this rank that were given up; very many if graphs were no faster, or left too little memory."""
        return _ALL if self._trial is not None and self._trial.failed else self._failures

    def give_up(self) -> None:
        """Counts a program of this rank that is not recorded any more, for what it does or finds in a step."""
        self._failures += 1

    def failed_on_ranks(self, least: int, most: int) -> None:
        """Drops all graphs for good if ranks differ in them: their gathers, and the times of these, would differ, too.

        Args:
            least: The fewest `failures` of a rank.
            most: The most.
        """
        if self._wanted and (least != most or most >= _ALL):
            if most < _ALL:
                _log.warning("CUDA graphs are switched off: not all ranks can record the same programs.")
            self.forget()
            self._wanted = False

    def examine(self, gm: fx.GraphModule) -> Examined:
        """Examines the operators of a program, before it is lowered."""
        places = {node: place for place, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
        writes = [n for n in gm.graph.nodes if n.target is torch.ops.aten.copy_.default and n.args[0] in places]
        return Examined(_obstacle(gm, self.device), tuple(sorted({places[node.args[0]] for node in writes})))

    def of(self, frame: Frame, program: Program, outputs: int, examined: Examined) -> ProgramGraphs:
        """Returns the object that runs one program.

        Args:
            frame: Of its graph.
            program: The program.
            outputs: How many of a forward program's outputs are not saved.
            examined: Facts about its operators.
        """
        graphs = ProgramGraphs(self, frame, program, outputs, examined)
        self.follow(graphs)
        return graphs

    def follow(self, follower: Follower) -> None:
        """Registers `follower`, which is held weakly: its `forget` is called when all graphs are dropped."""
        self._followers.add(follower)

    def may_record(self, runs: int) -> bool:
        """Returns whether to record a program that has run so often; all ranks record in the same step."""
        if runs < _RUNS:
            self._seen += 1
            return False
        return self.ready and self._agreed() and self.in_use  # which begins it, before anything is recorded

    def record(self, run: Run, inputs: list[Any]) -> tuple[torch.cuda.CUDAGraph, Any, list[Any]]:
        """Records the work that `run` issues; nothing of it reaches the device.

        Returns:
            The graph, the runtime's state around it, and the program's outputs.
        """
        if self._stream is None or not self._alive:  # a pool ends with the last graph in it
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()  # activations lie in the graphs' memory from now on
        if self._trial is not None:
            self._trial.start()
        self._graphs.prepare()

        def on_all_streams() -> tuple[Any, list[Any]]:
            self._graphs.fork()
            outputs = list(run(inputs))
            return self._graphs.join(), outputs

        try:
            graph, (recording, outputs) = self._capture(on_all_streams)
        except BaseException:
            self._graphs.cancel()
            raise
        self.recorded += 1
        return graph, recording, outputs

    def record_alone(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Records the work that `run` issues on the current stream, where programs are recorded already.

        Returns:
            The graph, and the result of `run`.
        """
        return self._capture(run)

    def _capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random = generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                # Other threads may use the device meanwhile: a watchdog, a loader of data.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = run()
                finally:
                    graph.capture_end()
        except BaseException:
            # The generator still believes that it is being recorded. Existing graphs would draw from it, others from
            # the copy: so all graphs are dropped.
            generator.graphsafe_set_state(random)
            self._drop()
            raise
        torch.cuda.current_stream().wait_stream(self._stream)
        self._alive.add(graph)
        return graph, result

    def explain(self, error: BaseException) -> None:
        """Adds a note on the memory of graphs to an out-of-memory error."""
        if self.recorded and isinstance(error, torch.OutOfMemoryError):
            error.add_note(
                "CUDA graphs keep the memory of training steps, also while others compute: "
                "CompileConfig(cuda_graphs=False) trains without."
            )

    def fits(self, recording: Any) -> bool:
        """Returns whether a replay would find the runtime in the recording's state."""
        return bool(self._graphs.fits(recording))

    def launch(self, graph: _Graph, name: str) -> None:
        """Replays the program `name`."""
        self.launch_alone(graph.graph, name)
        self._graphs.replayed(graph.recording, name)

    def launch_alone(self, graph: torch.cuda.CUDAGraph, name: str) -> None:
        """Replays the graph called `name`, which was recorded by itself."""
        graph.replay()
        self.replayed.add(name)

    def give_back(self) -> int:
        """Drops this rank's graphs, as the device is short of memory; soon no rank has graphs (`failed_on_ranks`).

        Returns:
            Bytes that they had.
        """
        if not self._alive:
            return 0
        before = torch.cuda.memory_reserved()
        self._drop()
        torch.cuda.empty_cache()
        self._failures = _ALL
        given = before - torch.cuda.memory_reserved()
        _log.warning(
            "CUDA graphs are switched off: the device ran out of memory while graphs held %.2f GiB.",
            given / 2**30,
        )
        return given

    def forget(self) -> None:
        """Drops all graphs, and the memory that they take; programs then run without them."""
        self._drop()
        self._graphs.forget()
        self._pool = self._stream = None
        self.enabled = self._in_use = False

    def _drop(self) -> None:
        for follower in self._followers:
            follower.forget()
        self.recorded = 0


class ProgramGraphs:
    """Runs one program, either directly or as a graph.

    Args:
        replays: The state that all programs share.
        frame: The state that it shares with its partner.
        program: The program.
        outputs: How many of a forward program's outputs are not saved.
        examined: Facts about its operators.
    """

    def __init__(self, replays: Replays, frame: Frame, program: Program, outputs: int, examined: Examined) -> None:
        self._replays, self._frame, self._name, self._outputs = replays, frame, program.name, outputs
        self._kind: ProgramKind = program.kind
        self._obstacle = self._own_obstacle = examined.obstacle
        self._written = examined.written
        self._runs: Counter[Any] = Counter()
        self._graphs: dict[Any, list[_Graph]] = {}
        self._recorded: Counter[Any] = Counter()  # by the numbers among its inputs
        self._before: list[weakref.ref[Tensor] | None] = []  # the inputs of the last run
        self._changing: set[int] = set()  # places of inputs that are not always the same tensor

    def swapped(self, program: Program) -> None:
        """Call when the program was swapped."""
        self.forget()
        unknown = {i.op for i in program.schedule.instructions} - _RECORDABLE
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
        self._frame.saved, self._frame.graph, self._frame.alive = [], None, None

    def __call__(self, args: list[Any], run: Run) -> Sequence[Any]:
        """Runs the program, either by ``run(args)`` or as a graph."""
        if not self._replays.enabled or self._kind == "inference":
            return run(args)
        if self._obstacle:
            self._replays.refuse(self._name, self._obstacle)
            return run(args)
        key = tuple(a for a in args if not isinstance(a, Tensor))
        if self._kind == "forward":
            if self._frame.is_read:
                return run(args)
        elif not self._frame.has_saved(args):
            self._runs[key] += 1
            return run(args)
        else:
            self._frame.has_been_read()  # or is, by what follows
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
        forward = self._frame.graph
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
            if self._is_same_every_time(i, value):
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
            return any(_is_same(value, saved) for saved in self._frame.saved)
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
        self._frame.saved, self._frame.graph, self._frame.alive = tensors, graph, None
        if graph.mark is not None:
            place = graph.mark - self._outputs
            saved[place] = compat.alias(saved[place])  # AOTAutograd would save another object for a view
            self._frame.alive = weakref.ref(saved[place])
        return [*handed, *saved]


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


def _is_same(value: Tensor, known: Tensor) -> bool:
    """Returns whether `value` is at the address of `known`, whose memory is held, with its shape and dtype."""
    return value is known or (
        value.data_ptr() == known.data_ptr() and value.shape == known.shape and value.dtype == known.dtype
    )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
