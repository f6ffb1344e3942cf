"""Records marks of time and memory that profiled programs set behind every instruction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lightning_deepcompile.plan.costs import ProfileError
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.program.executable import Executable
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.program.sizes import Noted, note


@dataclass(frozen=True)
class Mark:
    """A moment of a step.

    Args:
        host: The host's clock, in seconds.
        left: The same after the mark was set: asking the allocator can take longer than an instruction.
        event: An event on the compute stream; None where the host computes.
        allocated: Bytes that torch's allocator has handed out; 0 where it does not count.
        peak: The most since the mark before.
    """

    host: float
    left: float
    event: Any = None
    allocated: int = 0
    peak: int = 0

    def since(self, earlier: Mark) -> float:
        """Seconds since `earlier` on the compute stream. The device must have passed both."""
        if self.event is None:
            return self.host_since(earlier)
        return earlier.event.elapsed_time(self.event) / 1e3

    def at(self, start: Mark) -> float:
        """Seconds since `start`, the time to set marks included."""
        return self.host - start.host if self.event is None else self.since(start)

    def host_since(self, earlier: Mark) -> float:
        """Seconds of the host since `earlier`, without the time to set marks."""
        return self.host - earlier.left


@dataclass
class ProgramRun:
    """One run of a program: a mark at its start and one behind every instruction, and the sizes of its arguments."""

    program: str
    micro_batch: int
    marks: list[Mark] = field(default_factory=list)
    noted: Noted = ()

    def seconds(self) -> list[float]:
        """Time per instruction, on the compute stream."""
        return [b.since(a) for a, b in zip(self.marks, self.marks[1:], strict=False)]

    def host_seconds(self) -> list[float]:
        """Time per instruction in which the host issued it."""
        return [b.host_since(a) for a, b in zip(self.marks, self.marks[1:], strict=False)]


class Isolation(NamedTuple):
    """The calls that keep the collectives of a step apart from all else.

    Args:
        drain: Makes the compute stream wait for all reductions.
        order: Makes the next gather wait for the compute stream; else it begins as soon as there is memory for it.
    """

    drain: Callable[[], None]
    order: Callable[[], None]


@dataclass(eq=False)
class StepMarks:
    """All marks of one optimizer step.

    Args:
        device: Where the programs run.
        memory: Of that device.
        isolation: Keeps its collectives apart; None lets them overlap as usual.

    Attributes:
        runs: Runs of programs, in order.
        start: Begin of the step.
        reduced: End of the last backward pass, and of its reductions.
        end: End of the optimizer's step.
        micro_batches: Forward and backward passes seen.
        accumulating: Numbers of those whose gradients only accumulate.
        work: The programs that ran, each with the sizes of its arguments, in order. Steps are compared where these are
            equal.
        compiled: Whether programs were compiled during the step, which makes it long.
    """

    device: torch.device
    memory: PeakMemory
    isolation: Isolation | None = None
    runs: list[ProgramRun] = field(default_factory=list)
    start: Mark | None = None
    reduced: Mark | None = None
    end: Mark | None = None
    micro_batches: int = 0
    accumulating: set[int] = field(default_factory=set)
    work: list[tuple[str, Noted]] = field(default_factory=list)
    compiled: bool = False

    def watch(self, executables: Iterable[Executable]) -> None:
        """Notes what `executables` run, until their programs are swapped."""
        for executable in executables:
            executable.watch = self._note

    def _note(self, program: str, args: Sequence[Any]) -> None:
        self.work.append((program, note(args)))

    def begin_micro_batch(self) -> None:
        """Call before a forward pass."""
        if self.start is None:
            self.start = self.mark()
        self.micro_batches += 1

    def begin_backward(self, update: bool) -> None:
        """Call before a backward pass; `update` says whether the optimizer may step after it."""
        if not update:
            self.accumulating.add(self.micro_batches - 1)

    def end_backward(self) -> None:
        """Call when a backward pass has ended, and the compute stream waits for its reductions."""
        self.reduced = self.mark()

    def at_boundary(self, run: ProgramRun) -> bool:
        """Returns whether the optimizer may step after `run`'s micro-batch."""
        return run.micro_batch not in self.accumulating

    def finish(self) -> None:
        """Call when the optimizer has stepped."""
        self.end = self.mark()

    def seconds(self) -> float:
        """Duration of the step; waits for the device."""
        if self.start is None or self.end is None:
            return 0.0
        self.synchronize()
        return self.end.since(self.start)

    def runs_of(self, schedule: Schedule) -> list[ProgramRun]:
        """Returns the runs of a program.

        Raises:
            ProfileError: If a run has not as many marks as `schedule` has instructions.
        """
        runs = [run for run in self.runs if run.program == schedule.name]
        if any(len(run.marks) != len(schedule.instructions) + 1 for run in runs):
            raise ProfileError(f"A run of {schedule.name} ended early, or ran another program than expected.")
        return runs

    def synchronize(self) -> None:
        """Waits until the device has passed all marks."""
        if self.end is not None and self.end.event is not None:
            self.end.event.synchronize()

    def mark(self, memory: bool = False) -> Mark:
        """Makes a mark now."""
        now = time.perf_counter()
        if self.device.type != "cuda":
            return Mark(now, now)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        allocated = peak = 0
        if memory:
            beside = self.memory.beside()  # plans predict these bytes
            allocated, peak = self.memory.current - beside, self.memory.restart()
        return Mark(now, time.perf_counter(), event, allocated, peak)

    def marks_of(self, program: str) -> ProgramMarks:
        """Returns the object that the program of that name calls."""
        return ProgramMarks(self, program)


@dataclass(eq=False)
class ProgramMarks:
    """The marks of one program within a step."""

    step: StepMarks
    program: str

    def begin(self) -> None:
        """Call when a run starts."""
        noted = next((sizes for name, sizes in reversed(self.step.work) if name == self.program), ())
        self.step.runs.append(ProgramRun(self.program, self.step.micro_batches - 1, noted=noted))
        self.mark()

    def mark(self) -> None:
        """Call when an instruction was issued."""
        # Another program may run within this one's backward pass, but not between two of its instructions.
        isolation = self.step.isolation
        self.step.runs[-1].marks.append(self.step.mark(memory=isolation is not None))
        if isolation is not None:
            isolation.order()  # a gather would begin before the mark, if the host is ahead of the device

    def drain(self) -> None:
        """Call when a reduction was launched."""
        if self.step.isolation is not None:
            self.step.isolation.drain()
