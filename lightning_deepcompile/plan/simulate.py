"""Predicts the time and the memory of a training step from its schedules and a profile.

The model is the runtime's: the host issues instructions one after another; compute, gathers and reductions are streams;
slots of the arena are acquired and released in the host's order, and reused after their last reader. Time comes from
discrete events (`events`), memory from the host's order alone, as the allocator's bookkeeping is the host's.
`state_copies` models the copies of optimizer states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_deepcompile.plan.costs import Link, Profile, RegionCost
from lightning_deepcompile.plan.events import Task, Timing, run_tasks
from lightning_deepcompile.plan.gathered import MOVES, GatherModel
from lightning_deepcompile.plan.gradients import GradientModel
from lightning_deepcompile.plan.state_copies import StateCopyModel
from lightning_deepcompile.program.instructions import Stream
from lightning_deepcompile.program.schedule import REDUCTIONS, Instruction, Schedule, first_gather_positions


class Span(NamedTuple):
    """The work of a stream from `start` to `end` in seconds."""

    stream: Stream
    label: str
    start: float
    end: float


class MemoryPoint(NamedTuple):
    """The most memory while an instruction was issued.

    Args:
        micro_batch: Number of the micro-batch.
        schedule: Index of the schedule within it.
        instruction: Position of the instruction.
        seconds: When the device gets there.
        arena: Bytes of slots for gathered parameters, and of windows that they are gathered to.
        bytes: All allocated bytes.
        away: Bytes of saved tensors in host memory.
        gradients: Bytes of whole gradients that the runtime holds, or has on their way; less those of shards that
            come later in the step.
        states: Bytes of optimizer states that are on their way between the device and host memory.
    """

    micro_batch: int
    schedule: int
    instruction: int
    seconds: float
    arena: int
    bytes: int
    away: int
    gradients: int
    states: int


class Estimate(NamedTuple):
    """The two values by which a search compares steps: seconds and peak bytes, as of a `Prediction`."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Prediction:
    """The predicted behaviour of a step.

    Args:
        seconds: Its duration, `Profile.unexplained_seconds` included.
        compute_seconds: The time that compute, the optimizer included, is busy.
        exposed_seconds: The time that compute waits for communication.
        gather_seconds: The time that gathers take.
        reduce_seconds: The time that reductions take.
        peak_bytes: The most memory.
        memory: Memory, in the host's order.
        spans: The work of each stream, with its times.
        window_bytes: Of the peak, windows that parameters are gathered to, which stay from step to step.
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    gather_seconds: float
    reduce_seconds: float
    peak_bytes: int
    memory: tuple[MemoryPoint, ...]
    spans: tuple[Span, ...]
    window_bytes: int = 0

    @property
    def estimate(self) -> Estimate:
        """The two values by which a search compares steps."""
        return Estimate(self.seconds, self.peak_bytes)

    def over(self, budget: int | None) -> int:
        """Bytes by which the peak exceeds `budget`; at most 0 if it fits."""
        return self.peak_bytes - budget if budget is not None else -1


def simulate(schedules: Sequence[Schedule], profile: Profile) -> Prediction:
    """Predicts a training step that runs `schedules` once per micro-batch, then the optimizer.

    Args:
        schedules: The programs of a micro-batch, in order.
        profile: Costs of their regions, models of the links.

    Raises:
        ProfileError: If the profile does not cover a region.
    """
    return _Simulation(profile).run(schedules)


def step_seconds(schedules: Sequence[Schedule], profile: Profile) -> float:
    """Returns the duration that `simulate` predicts, at half the cost."""
    return _TimeOnly(profile).step_seconds(schedules)


def memory_bytes(schedules: Sequence[Schedule], profile: Profile) -> list[list[int]]:
    """The most bytes allocated while each instruction is issued, by schedule; needs no events."""
    first, *others = memory_rows(schedules, profile)
    return [[max(sizes) for sizes in zip(row, *more, strict=True)] for row, *more in zip(first, *others, strict=True)]


def memory_rows(schedules: Sequence[Schedule], profile: Profile) -> list[list[list[int]]]:
    """Bytes allocated while each instruction is issued, by micro-batch and schedule; needs no events."""
    return _MemoryOnly(profile).rows(schedules)


def peak_bytes(schedules: Sequence[Schedule], profile: Profile) -> int:
    """Returns the most bytes allocated in a micro-batch; needs no events."""
    return max(map(max, memory_bytes(schedules, profile)), default=0)


def arena_bytes(schedules: Sequence[Schedule], **fields: Any) -> list[list[int]]:
    """Bytes beyond the programs' own memory, after every instruction of every schedule of a micro-batch.

    Args:
        schedules: The programs of a micro-batch.
        **fields: As of a `Profile`: ``hosted``, ``window_from``, ``world_size``, ``device_type``.

    Returns:
        Bytes of the arena's slots, without windows, less those of saved tensors that are in host memory.
    """
    found = simulate(schedules, replace(_without_costs(schedules), **fields))
    rows: list[list[int]] = [[] for _ in schedules]
    for point in found.memory:
        rows[point.schedule].append(point.arena - found.window_bytes - point.away)
    return rows


def window_bytes(schedules: Sequence[Schedule], profile: Profile) -> int:
    """Bytes of the windows that parameters are gathered to; they are allocated all the time."""
    if not profile.window_from:
        return 0
    gathers = GatherModel(profile)
    for micro_batch in range(profile.micro_batches):
        for instruction in (one for schedule in schedules for one in schedule.instructions if one.op in MOVES):
            gathers.follow(instruction, profile.at_boundary(micro_batch))
    return gathers.window_bytes


def first_gather_bytes(schedules: Sequence[Schedule], profile: Profile) -> int:
    """Bytes of the arena's slots for the gathers that a step begins with, without windows."""
    gathers = GatherModel(profile)
    first = schedules[0].instructions if schedules and schedules[0].kind == "forward" else ()
    for position in first_gather_positions(first):
        gathers.gather(first[position])
    return gathers.bytes


def gradient_bytes(
    schedules: Sequence[Schedule], ratio: float, micro_batches: int, world_size: int
) -> list[list[list[int]]]:
    """Bytes of gradients in the runtime (`GradientModel.bytes`), if compute waits for every reduction at once.

    Args:
        schedules: The programs of a micro-batch.
        ratio: Bytes of a sum of gradients per byte of a gradient.
        micro_batches: Of an optimizer step that accumulates gradients.
        world_size: Number of ranks.

    Returns:
        Bytes while each instruction runs, by micro-batch and schedule.
    """
    fields: dict[str, Any] = {"hold_ratio": ratio, "micro_batches": micro_batches, "world_size": world_size}
    profile = replace(_without_costs(schedules), device_type="cuda", reduce_window=0, **fields)
    rows: list[list[list[int]]] = [[[] for _ in schedules] for _ in range(micro_batches)]
    for point in simulate(schedules, profile).memory:
        rows[point.micro_batch][point.schedule].append(point.gradients)
    return rows


def _without_costs(schedules: Sequence[Schedule]) -> Profile:
    regions = {f"{s.name}/{call.region}": RegionCost(0.0) for s in schedules for call in s.groups("compute")}
    link = Link(0.0, 1.0)
    return Profile(1, "cpu", tuple(schedules), regions, link, link)


class _Simulation:
    """Turns instructions into tasks while tracking memory as the host sees it."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._tasks: list[Task] = []
        self._gathers = GatherModel(profile)
        self._window_bytes = 0  # of all that the step will take: they exist since the step before
        self._barrier: list[int] = []  # the tasks that the next task on the compute stream has to wait for
        self._computed: int | None = None  # the last task on the compute stream
        self._gradients = GradientModel(
            profile.hold_ratio, profile.reduce_window, profile.world_size, replicated=profile.replicated
        )
        self._accumulates = profile.accumulates and profile.micro_batches > 1
        self._boundary = False  # in the last micro-batch
        self._copies: dict[tuple[int, int], int] = {}  # the last copy of a frame's saved tensor
        self._away = 0
        self._states = StateCopyModel(profile)
        self._launches: dict[float, Task] = {}  # of the host, by seconds: equal ones are interchangeable
        self._held: list[list[int]] = []  # of each schedule, bytes that are neither in the arena nor gradients
        # Of every `MemoryPoint` the next task (the optimizer if there is none), and what it consists of.
        self._memory: list[tuple[int, ...]] = []

    def run(self, schedules: Sequence[Schedule]) -> Prediction:
        self._issue_step(schedules)
        timing = run_tasks(self._tasks, self._profile.contention)
        spans = [
            Span(task.stream, task.label, start, end)
            for task, start, end in zip(self._tasks, timing.start, timing.end, strict=True)
            if task.seconds > 0
        ]
        memory = [
            MemoryPoint(micro_batch, index, position, timing.start[task], *sizes)
            for task, micro_batch, index, position, *sizes in self._memory
        ]
        return Prediction(
            seconds=self._seconds(timing),
            compute_seconds=timing.busy["compute"],
            exposed_seconds=timing.exposed,
            gather_seconds=timing.busy["gather"],
            reduce_seconds=timing.busy["reduce"],
            peak_bytes=max((point.bytes for point in memory), default=0),
            window_bytes=self._window_bytes,
            memory=tuple(memory),
            spans=tuple(spans),
        )

    def _seconds(self, timing: Timing) -> float:
        return max(max(timing.end, default=0.0) + self._profile.unexplained_seconds, 0.0)

    def _issue_step(self, schedules: Sequence[Schedule]) -> None:
        last_backward = max((k for k, s in enumerate(schedules) if s.kind == "backward"), default=len(schedules) - 1)
        self._states.begin(schedules, self._add)
        costs = [
            [self._profile.cost(schedule, one.region) if one.region else None for one in schedule.instructions]
            for schedule in schedules
        ]
        self._expect(schedules, costs)
        for micro_batch in range(self._profile.micro_batches):
            self._boundary = self._profile.at_boundary(micro_batch)
            for index, schedule in enumerate(schedules):
                self._run_schedule(micro_batch, index, schedule, costs[index])
                if index == last_backward:
                    self._barrier.extend(self._gradients.drain())
        for seconds, after in self._states.step(self._compute_point()):
            self._barrier.extend(after)
            self._compute(seconds, 0.0, "optimizer")
            self._states.stepped(self._computed)

    def _expect(self, schedules: Sequence[Schedule], costs: Sequence[Sequence[RegionCost | None]]) -> None:
        """Finds the memory that does not depend on the order in which the host issues instructions."""
        self._window_bytes = window_bytes(schedules, self._profile)
        self._held = list(map(_held, schedules, costs))
        counted = not self._profile.host_computes
        last = []  # reduced by the last micro-batch, and so behind those that every one reduces
        for group in (one for schedule in schedules for one in schedule.instructions if one.op in REDUCTIONS):
            if self._accumulates and group.traits.at_boundary:
                last.append(group)
            elif counted:
                self._gradients.reserve(group, adds=self._profile.micro_batches > 1)
        for group in last:
            self._gradients.expect(group, counted=counted)

    def _remember(self, task: int, micro_batch: int, index: int, position: int, beside: int | None) -> None:
        """Records the memory of an instruction; `beside` is what `_communicate` returns."""
        arena, away, states = self._gathers.bytes + self._window_bytes, self._away, self._states.bytes
        gradients = self._gradients.bytes if beside is None else beside
        size = arena + self._held[index][position] + gradients - away + states
        self._memory.append((task, micro_batch, index, position, arena, size, away, gradients, states))

    def _run_schedule(
        self, micro_batch: int, index: int, schedule: Schedule, costs: Sequence[RegionCost | None]
    ) -> None:
        if schedule.kind == "backward":
            self._states.left()
        for position, (instruction, cost) in enumerate(zip(schedule.instructions, costs, strict=True)):
            task, beside = len(self._tasks), None
            if cost is None:
                beside = self._communicate(schedule, instruction)
            else:
                self._compute(cost.seconds, cost.host, f"{schedule.name}/{instruction.region}")
            self._remember(task, micro_batch, index, position, beside)

    def _communicate(self, schedule: Schedule, instruction: Instruction) -> int | None:
        """Returns the bytes of gradients besides those that are handed over, if any are sent."""
        host = self._issue(self._profile.launch_seconds)
        traits = instruction.traits
        now = self._boundary or not traits.at_boundary
        match traits.effect:
            case _, "gradients":
                return self._reduce(instruction, host, f"{schedule.name}/{instruction.text}")
            case "wait", "parameters":
                self._barrier += self._gathers.wait(instruction.ids)
            case "free", "parameters" if now:
                self._barrier += self._gathers.release(instruction.ids, self._computed)
            case "launch" | "launch and wait", "parameters":
                self._gather(instruction, host, f"{schedule.name}/{instruction.text}")
            case "launch", "saved tensors":
                self._copy(schedule.frame, instruction, host, f"{schedule.name}/{instruction.text}")
            case "wait", "saved tensors":
                self._barrier.extend(self._copies[schedule.frame, number] for number in instruction.ids)
                if schedule.kind == "forward":
                    self._away += instruction.bytes
            case "wait", "states":
                self._barrier.extend(self._states.wait(instruction.ids))
            case "launch", "states" if now:
                self._states.reload(instruction.ids, [*host, *self._compute_point()])
        return None

    def _copy(self, frame: int, instruction: Instruction, host: list[int], label: str) -> None:
        stream = instruction.traits.stream
        out = stream == "out"
        link = self._profile.copy_out if out else self._profile.copy_in
        for number, size in zip(instruction.ids, instruction.sizes, strict=True):
            after = [*host, *self._compute_point()]
            if not out:
                after.append(self._copies[frame, number])
                self._away -= size  # its memory is taken when the copy is launched
            self._copies[frame, number] = self._add(stream, link.copy_seconds(size), after, label)

    def _issue(self, seconds: float) -> list[int]:
        """Adds the host's part of an instruction; returns the tasks that the device's part has to wait for."""
        if self._profile.host_computes:
            return self._compute_point()
        if seconds <= 0:
            return []
        launch = self._launches.get(seconds)
        if launch is None:
            launch = self._launches[seconds] = Task("host", seconds, [], "launch")
        self._tasks.append(launch)
        return [len(self._tasks) - 1]

    def _add(self, stream: Stream, seconds: float, after: list[int], label: str) -> int:
        self._tasks.append(Task(stream, seconds, after, label))
        return len(self._tasks) - 1

    def _compute(self, seconds: float, host: float, label: str) -> None:
        issued = self._issue(host)
        self._computed = self._add("compute", seconds, [*issued, *self._barrier], label)
        self._barrier = []

    def _compute_point(self) -> list[int]:
        """The tasks that the compute stream has to finish first: its last one, and those it was told to wait for."""
        return [*self._barrier, *([] if self._computed is None else [self._computed])]

    def _gather(self, instruction: Instruction, host: list[int], label: str) -> None:
        stream = instruction.traits.stream
        if instruction.traits.effect[0] == "launch and wait":
            seconds = self._profile.gather_seconds(instruction.sizes)
            self._barrier.append(self._add(stream, seconds, [*host, *self._compute_point()], label))
        elif group := self._gathers.gather(instruction):
            # Kernels launched before may still use new memory; of a slot that is reused, the last reader is known. The
            # last reader of a window that is not reused in this step was in the one before.
            after = host
            if group.slot.last_user is not None:
                after = [*host, group.slot.last_user]
            elif not group.in_window:
                after = [*host, *self._compute_point()]
            group.task = self._add(stream, self._profile.gather_seconds(group.sizes), after, label)

    def _reduce(self, instruction: Instruction, host: list[int], label: str) -> int | None:
        if instruction.traits.at_boundary and self._accumulates:
            self._compute(instruction.bytes * (self._profile.hold_seconds or 0.0), 0.0, label)
            if not self._boundary:
                self._gradients.hold(instruction)
                return None
        seconds = self._profile.reduce_seconds(instruction.sizes)
        done = self._add(instruction.traits.stream, seconds, [*host, *self._compute_point()], label)
        now = instruction.traits.effect[0] == "launch and wait"
        waited, beside = self._gradients.send(instruction, done, wait=now)
        self._barrier.extend(waited)
        return None if now else beside


class _MemoryOnly(_Simulation):
    """Simulates memory without tasks: allocation does not depend on when they run."""

    def rows(self, schedules: Sequence[Schedule]) -> list[list[list[int]]]:
        self._issue_step(schedules)
        rows: list[list[list[int]]] = [[[] for _ in schedules] for _ in range(self._profile.micro_batches)]
        for _, micro_batch, index, _, _, size, *_ in self._memory:
            rows[micro_batch][index].append(size)
        return rows

    def _add(self, stream: Stream, seconds: float, after: list[int], label: str) -> int:
        return 0

    def _issue(self, seconds: float) -> list[int]:
        return []

    def _compute(self, seconds: float, host: float, label: str) -> None:
        self._computed, self._barrier = 0, []

    def _compute_point(self) -> list[int]:
        return []


class _TimeOnly(_Simulation):
    """Simulates time without a record of memory."""

    def step_seconds(self, schedules: Sequence[Schedule]) -> float:
        self._issue_step(schedules)
        return self._seconds(run_tasks(self._tasks, self._profile.contention))

    def _expect(self, schedules: Sequence[Schedule], costs: Sequence[Sequence[RegionCost | None]]) -> None:
        """Does nothing."""

    def _remember(self, task: int, micro_batch: int, index: int, position: int, beside: int | None) -> None:
        """Does nothing."""


def _held(schedule: Schedule, costs: Sequence[RegionCost | None]) -> list[int]:
    """Bytes of values that the program holds while each instruction is issued."""
    held, other = [], next((cost.before for cost in costs if cost is not None), 0)
    for instruction, cost, waiting in zip(schedule.instructions, costs, schedule.waiting, strict=True):
        most = other
        if cost is not None:
            most, other = max(cost.before, cost.peak, cost.after) + waiting, cost.after + waiting
        elif instruction.op in REDUCTIONS:  # the runtime owns them now, or has added them to sums
            other = max(other - instruction.bytes, 0)
        held.append(most)
    return held
