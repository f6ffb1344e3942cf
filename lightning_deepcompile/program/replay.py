"""Decides when the programs of an engine are recorded as CUDA graphs, and records them.

A step of a small model waits for its host: every kernel, gather and reduction is a call of its own. A CUDA graph is one
call for all of them. PyTorch's ``mode="reduce-overhead"`` does so for compute; here the runtime's streams take part
(``csrc/executors/recorder.h``).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch

from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.replay_trial import Trial

_log = logging.getLogger(__name__)

_RUNS = 2
"""A program runs so often before it is recorded: kernels are loaded and tuned, and connections made."""

_ALL = 10**6
"""More programs than there are."""

Run = Callable[[list[Any]], Sequence[Any]]

T = TypeVar("T")


class Follower(Protocol):
    """An object that has graphs."""

    @property
    def begins(self) -> bool:
        """True if recording begins for its sake."""

    def forget(self) -> None:
        """Drops the graphs."""


class Recorded(Protocol):
    """Recorded work.

    Attributes:
        graph: The CUDA graph.
        recording: The runtime's state around it.
    """

    graph: torch.cuda.CUDAGraph
    recording: Any


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

    def note_memory(self, error: BaseException) -> None:
        """Adds a note on the memory of graphs to an out-of-memory error."""
        if self.recorded and isinstance(error, torch.OutOfMemoryError):
            error.add_note(
                "CUDA graphs keep the memory of training steps, also while others compute: "
                "CompileConfig(cuda_graphs=False) trains without."
            )

    def fits(self, recording: Any) -> bool:
        """Returns whether a replay would find the runtime in the recording's state."""
        return bool(self._graphs.fits(recording))

    def launch(self, graph: Recorded, name: str) -> None:
        """Replays `graph`, the recording of the program `name`."""
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
            "CUDA graphs are switched off: the device ran out of memory while graphs held %s.", format_bytes(given)
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
