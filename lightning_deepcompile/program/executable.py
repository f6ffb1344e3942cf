"""A program that is ready to run; its schedule can be swapped while its regions stay compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_deepcompile import compat
from lightning_deepcompile.program.codegen import Guard, Marks, generate
from lightning_deepcompile.program.printer import format_program
from lightning_deepcompile.program.program import CompiledRegion, Program
from lightning_deepcompile.program.program_graphs import ProgramGraphs

_log = logging.getLogger(__name__)

UNCHECKPOINTED = "uncheckpointed"
"""In a program's history: it keeps activations that the model would compute again."""

# Programs that use memory which was free.
_GUARDED = frozenset(["plan", UNCHECKPOINTED])


@dataclass(eq=False, repr=False)
class Executable:
    """The function that AOTAutograd calls for one graph.

    Args:
        base: The program in functional form, from which every schedule is planned.
        program: The current schedule.
        before: Called before every run: begins the backward pass, or does nothing.
        check: Called with the program before every run; compares it with the other ranks'. A function that it returns
            is called after the run.
        guard: What programs call for a region that are planned, profiled, or computed without the checkpoints that the
            model asks for; by default the region itself.
        graphs: Replays the program as a CUDA graph; None: it always runs.
        derived: The program's last inputs, which its caller does not know; see `derive`.

    Attributes:
        calls: Number of runs.
        seconds: The host time that they took.
        waits_for_states: Whether it waits for optimizer states that leave the device.
        running: The program as it runs: the current one, or the one that is profiled in its place.
        watch: Called before every run with the program's name and its arguments, until `swap`; None: nothing is.
    """

    base: Program
    program: Program
    before: Callable[[], None]
    check: Callable[[Program], Callable[[], None] | None]
    guard: Guard | None = None
    graphs: ProgramGraphs | None = None
    derived: Sequence[torch.Tensor] = ()
    calls: int = 0
    seconds: float = 0.0
    source: str = field(init=False, default="")
    waits_for_states: bool = field(init=False)
    running: Program = field(init=False)
    watch: Callable[[str, Sequence[Any]], None] | None = field(init=False, default=None)
    _run: Callable[[list[Any]], Sequence[Any]] = field(init=False)
    _guard: Guard | None = field(init=False)
    _with_names: Callable[[list[Any]], Sequence[Any]] | None = field(init=False)
    _replay: ProgramGraphs | None = field(init=False)
    _boxed_call: bool = field(init=False)

    def __post_init__(self) -> None:
        # AOTAutograd looks for this mark in the instance, not the class, and then passes its argument list itself.
        self._boxed_call = True
        self.swap(self.program)

    def swap(self, program: Program) -> None:
        """Swaps in another schedule of `base`; nothing is recompiled. Call between optimizer steps, on all ranks."""
        if program.graph_id != self.base.graph_id:
            raise ValueError(f"The program {program.name!r} belongs to another graph than {self.base.name!r}.")
        self.program = self.running = program
        self.watch = None
        self._guard = None if _GUARDED.isdisjoint(program.history) else self.guard
        self._run, self.source = generate(program, guard=self._guard)
        self._with_names = None
        self._replay = self.graphs
        if self._replay is not None:
            self._replay.swapped(program)
        self.waits_for_states = program.schedule.waits_for_states
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s", format_program(program))

    def profile(self, program: Program, marks: Marks) -> None:
        """Runs `program` in place of the current one, with marks, until `swap`.

        Args:
            program: A schedule planned from `base`.
            marks: Called while it runs.
        """
        self._run, _ = generate(program, marks, self.guard)
        self._replay = None
        self.running = program
        self.waits_for_states = program.schedule.waits_for_states

    def _call(self, args: list[Any], run: Callable[[list[Any]], Sequence[Any]]) -> Sequence[Any]:
        return run(args) if self._replay is None else self._replay(args, run)

    def _named(self) -> Callable[[list[Any]], Sequence[Any]]:
        """Returns the program with its regions named for profilers, which costs time."""
        if self.running is not self.program:  # it is being profiled
            return self._run
        if self._with_names is None:
            guard = self._guard

            def named(program: str, name: str, region: CompiledRegion) -> Callable[[list[Any]], Sequence[Any]]:
                run = region.run if guard is None else guard(program, name, region)
                label = f"deepcompile: {program} {name} ({', '.join(region.info.blocks)})"

                def call(inputs: list[Any]) -> Sequence[Any]:
                    with torch.profiler.record_function(label):
                        return run(inputs)

                return call

            self._with_names, _ = generate(self.program, guard=named)
        return self._with_names

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the program on `args`, which is emptied."""
        args.extend(self.derived)
        if self.watch is not None:
            self.watch(self.program.name, args)
        behind = self.check(self.running)
        self.calls += 1
        self.before()
        start = time.perf_counter()
        try:
            if compat.is_profiling():
                with torch.profiler.record_function(f"deepcompile: {self.program.name}"):
                    results = self._call(args, self._named())
            else:
                results = self._call(args, self._run)
        finally:
            self.seconds += time.perf_counter() - start
        if behind is not None:
            behind()
        return results
