"""Builds a profile from the marks of two steps: one as scheduled, one in which every operation ran by itself."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from lightning_deepcompile.plan.costs import Contention, Profile, ProfileError, RegionCost
from lightning_deepcompile.plan.simulate import arena_bytes, gradient_bytes, simulate
from lightning_deepcompile.profile.links import Transfer, fit_link
from lightning_deepcompile.profile.marks import ProgramRun, StepMarks
from lightning_deepcompile.program.schedule import Schedule

_TELLS = 0.02  # of a step: the least slow-down by a shared link from which a step's length tells anything about it
_TELLS_BESIDE = 0.05  # of regions: the least communication beside them that tells how much it slows them down
_HALVINGS = 6


def build_profile(
    observed: StepMarks,
    isolated: StepMarks,
    schedules: Mapping[str, Schedule],
    isolated_schedules: Mapping[str, Schedule],
    transfers: Sequence[Transfer],
    *,
    world_size: int,
    replicated: bool,
    hold_ratio: float,
    hosted: dict[str, int],
    window_from: int,
    budget: int | None,
    step_seconds: float,
    live: Mapping[str, Mapping[str, tuple[int, int, int]]],
) -> Profile:
    """Makes a profile of two steps.

    Args:
        observed: A step that ran as scheduled.
        isolated: A step whose programs waited for every gather and every reduction at once.
        schedules: The schedules that ran in `observed`, by program name.
        isolated_schedules: The schedules that ran in `isolated`, by program name.
        transfers: Those of `isolated`.
        world_size: Number of ranks that share the parameters.
        replicated: As of a `Profile`.
        hold_ratio: Bytes of a sum of whole gradients per byte of a gradient.
        hosted: As of a `Profile`.
        window_from: As of a `Profile`.
        budget: Bytes that may be allocated.
        step_seconds: Duration of ordinary steps.
        live: Estimated memory of regions by program name, for devices whose allocator does not count.

    Returns:
        The profile of this rank.

    Raises:
        ProfileError: If the steps did not run the programs that they should have.
    """
    isolated.synchronize()
    observed.synchronize()
    order = [run.program for run in isolated.runs if run.micro_batch == 0]
    marked = {run.program for run in isolated.runs}
    if not order or marked - isolated_schedules.keys():
        raise ProfileError("The profiled step ran no program of the training step, or one that is not known.")
    if others := {run.program for run in observed.runs} - marked | marked - schedules.keys():
        raise ProfileError(
            f"{sorted(others)} ran, or could be measured, in one of the two profiled steps only. A plan needs "
            'two successive steps with the same programs: name them by CompileConfig(schedule=[..., {"step": n, ...}]).'
        )
    on_device = isolated.device.type == "cuda"
    accumulates = len(isolated.accumulating) > 0
    ran = [isolated_schedules[name] for name in order]
    memory = _Memory(
        order,
        arena_bytes(
            ran, hosted=hosted, window_from=window_from, world_size=world_size, device_type=isolated.device.type
        ),
        gradient_bytes(ran, hold_ratio, isolated.micro_batches if accumulates else 1, world_size),
        None if on_device else live,
    )
    # Regions of another batch's sizes take another time: of the step whose duration is known.
    samples = _Samples(isolated, memory, _region_times(observed, schedules), equal=observed.work == isolated.work)
    for name in dict.fromkeys(run.program for run in isolated.runs):
        samples.add(isolated_schedules[name])
    profile = Profile(
        world_size=world_size,
        device_type=isolated.device.type,
        schedules=tuple(schedules[name] for name in order),
        regions=samples.regions,
        gather=fit_link([one for one in transfers if one.kind == "parameters"], world_size),
        reduce=fit_link([one for one in transfers if one.kind == "gradients"], world_size),
        micro_batches=isolated.micro_batches,
        accumulates=accumulates,
        optimizer_seconds=_optimizer_seconds(isolated),
        launch_seconds=statistics.median(samples.launches) if on_device and samples.launches else 0.0,
        hold_seconds=_rate(samples.holds) if samples.holds else None,
        hold_ratio=hold_ratio,
        hosted=hosted,
        window_from=window_from,
        budget=budget,
        step_seconds=step_seconds,
        replicated=replicated,
    )
    programs = _side_by_side(observed, schedules, profile)
    return replace(profile, exposed_seconds=_total(programs).exposed, contention=_contention(programs))


class _Memory:
    """Bytes before, at the peak of and after a region, without those that the runtime holds.

    Args:
        order: Programs of a micro-batch, by name.
        arenas: Of gathered parameters, by program and instruction.
        gradients: Of whole gradients, by micro-batch, program and instruction.
        live: Estimates by program and region, for devices whose allocator does not count; None: it does.
    """

    def __init__(
        self,
        order: Sequence[str],
        arenas: Sequence[Sequence[int]],
        gradients: Sequence[Sequence[Sequence[int]]],
        live: Mapping[str, Mapping[str, tuple[int, int, int]]] | None,
    ) -> None:
        self._order, self._arenas, self._gradients, self._live = order, arenas, gradients, live

    def of(self, schedule: Schedule, position: int, runs: Sequence[ProgramRun]) -> tuple[int, int, int]:
        """Returns the bytes of the region at `position`, the most of all `runs`."""
        if self._live is not None:
            return self._live[schedule.name][schedule.instructions[position].region]
        if schedule.name not in self._order:
            return _allocated(runs, position, 0, [0] * len(self._gradients))
        place = self._order.index(schedule.name)
        whole = [part[place][position] for part in self._gradients]
        return _allocated(runs, position, self._arenas[place][position], whole)


class _Samples:
    """Samples from the isolated step, by kind of instruction: bytes and seconds, or only seconds.

    Args:
        isolated: The step.
        memory: Has the memory of regions.
        ordinary: Seconds of regions, and of their launch, in the step that ran as scheduled.
        equal: Whether both steps had batches of the same sizes.
    """

    def __init__(
        self, isolated: StepMarks, memory: _Memory, ordinary: Mapping[str, tuple[float, float]], equal: bool
    ) -> None:
        self._equal = equal
        self._marks, self._memory, self._ordinary = isolated, memory, ordinary
        self._on_device = isolated.device.type == "cuda"
        self.regions: dict[str, RegionCost] = {}
        self.holds: list[tuple[int, float]] = []
        self.launches: list[float] = []

    def add(self, schedule: Schedule) -> None:
        """Adds the samples from the runs of one program."""
        runs = self._marks.runs_of(schedule)
        rows = [run.seconds() for run in runs]
        seconds, host = _typical(rows), _typical([run.host_seconds() for run in runs])
        for position, instruction in enumerate(schedule.instructions):
            traits = instruction.traits
            if instruction.region:
                key = f"{schedule.name}/{instruction.region}"
                alone = (seconds[position], host[position])
                ordinary = self._ordinary.get(key, alone)
                # Either step may have met with a hiccup; communication beside a region makes it no faster.
                device, launched = map(min, zip(alone, ordinary, strict=True)) if self._equal else ordinary
                cost = (device, launched if self._on_device else 0.0)
                self.regions[key] = RegionCost(*cost, *self._memory.of(schedule, position, runs))
            elif traits.effect == ("launch", "gradients") and traits.at_boundary:
                held = [row[position] for run, row in zip(runs, rows, strict=True) if not self._marks.at_boundary(run)]
                if held:
                    self.holds.append((instruction.bytes, statistics.median(held)))
            elif traits.effect == ("free", "parameters") and not traits.at_boundary:
                self.launches.append(host[position])


def _known_runs(marks: StepMarks, schedules: Mapping[str, Schedule]) -> list[tuple[ProgramRun, Schedule]]:
    return [(run, schedules[run.program]) for run in marks.runs if run.program in schedules]


def _region_times(marks: StepMarks, schedules: Mapping[str, Schedule]) -> dict[str, tuple[float, float]]:
    """Medians over a step's runs: the seconds of each region, and of its launch by the host."""
    times: dict[str, tuple[list[float], list[float]]] = {}
    for run, schedule in _known_runs(marks, schedules):
        for instruction, seconds, host in zip(schedule.instructions, run.seconds(), run.host_seconds(), strict=False):
            if instruction.region:
                known = times.setdefault(f"{schedule.name}/{instruction.region}", ([], []))
                known[0].append(seconds)
                known[1].append(host)
    return {key: (statistics.median(a), statistics.median(b)) for key, (a, b) in times.items()}


def _rate(samples: Sequence[tuple[int, float]]) -> float:
    size = sum(size for size, _ in samples)
    return max(sum(seconds for _, seconds in samples), 0.0) / size if size else 0.0


def _optimizer_seconds(isolated: StepMarks) -> float:
    """Seconds from the end of the last program, whose reductions had ended, to the end of the optimizer's step."""
    marks = isolated.runs[-1].marks
    return max(isolated.end.since(marks[-1]), 0.0) if isolated.end is not None and marks else 0.0


def _typical(rows: Sequence[Sequence[float]]) -> list[float]:
    """Returns the median over the runs, per instruction."""
    return [max(statistics.median(column), 0.0) for column in zip(*rows, strict=True)]


def _allocated(runs: Sequence[ProgramRun], position: int, arena: int, gradients: Sequence[int]) -> tuple[int, int, int]:
    """Bytes before, at the peak of and after a region, without those of the runtime, as if nothing had been offloaded.

    Args:
        runs: Of the program.
        position: Of the region.
        arena: Bytes of gathered parameters.
        gradients: Bytes of whole gradients, by micro-batch; those behind have as many as the last.
    """
    known = [arena + gradients[min(run.micro_batch, len(gradients) - 1)] for run in runs]
    before = max(run.marks[position].allocated - size for run, size in zip(runs, known, strict=True))
    peak = max(run.marks[position + 1].peak - size for run, size in zip(runs, known, strict=True))
    after = max(run.marks[position + 1].allocated - size for run, size in zip(runs, known, strict=True))
    return max(before, 0), max(peak, 0), max(after, 0)


@dataclass
class _Beside:
    """The runs of one program in the step as scheduled: seconds by what took them.

    Attributes:
        regions: Of regions.
        alone: Of the same regions, with nothing beside them.
        exposed: In which compute waited.
        gathers: Of gathers, as the model of the link has them.
        reductions: Of reductions, likewise.
    """

    regions: float = 0.0
    alone: float = 0.0
    exposed: float = 0.0
    gathers: float = 0.0
    reductions: float = 0.0

    @property
    def excess(self) -> float:
        """Seconds by which regions were longer than alone."""
        return self.regions - self.alone

    @property
    def hidden(self) -> tuple[float, float]:
        """Seconds of gathers and of reductions beside regions; what compute waited for is shared out by their time."""
        wires = self.gathers + self.reductions
        part = min(max(wires - self.exposed, 0.0), self.alone) / wires if wires else 0.0
        return self.gathers * part, self.reductions * part


def _side_by_side(marks: StepMarks, schedules: Mapping[str, Schedule], profile: Profile) -> list[_Beside]:
    """Returns the seconds of each program of a step as scheduled."""
    programs: dict[str, _Beside] = {}
    for run, schedule in _known_runs(marks, schedules):
        one = programs.setdefault(schedule.name, _Beside())
        for instruction, seconds in zip(schedule.instructions, run.seconds(), strict=False):
            traits = instruction.traits
            if instruction.region:
                one.regions += seconds
                one.alone += profile.cost(schedule, instruction.region).seconds
            elif traits.effect == ("launch", "parameters"):
                one.gathers += profile.gather_seconds(instruction.sizes)
            elif traits.effect == ("launch", "gradients") and (not traits.at_boundary or marks.at_boundary(run)):
                one.reductions += profile.reduce_seconds(instruction.sizes)
            if traits.exposes:
                one.exposed += seconds
    return list(programs.values())


def _contention(programs: Sequence[_Beside]) -> Contention:
    """Estimates how much slower regions were with communication beside them, if there was enough of it to tell.

    Programs beside which parameters alone travel, such as forward passes, tell of gathers; the others then of
    reductions. Where nothing tells them apart, one factor is for both.
    """
    plain = _total([one for one in programs if not one.reductions])
    mixed = _total([one for one in programs if one.reductions])
    (alone, _), (gathers, reductions) = plain.hidden, mixed.hidden
    if alone < _TELLS_BESIDE * plain.alone or not alone:
        factor = _factor(mixed.excess, gathers + reductions, mixed.alone)
        return Contention(factor, factor)
    beside_gathers = _factor(plain.excess, alone, plain.alone)
    excess = mixed.excess - gathers * (beside_gathers - 1)
    return Contention(beside_gathers, _factor(excess, reductions, mixed.alone))


def _total(programs: Sequence[_Beside]) -> _Beside:
    return _Beside(*(sum(getattr(one, each.name) for one in programs) for each in fields(_Beside)))


def _factor(excess: float, hidden: float, alone: float) -> float:
    """Returns the factor on regions that took `excess` longer beside `hidden` seconds; 1 where these are few."""
    return min(max(1 + excess / hidden, 1.0), 2.0) if hidden and hidden >= _TELLS_BESIDE * alone else 1.0


def reconcile(profile: Profile) -> Profile:
    """Adds to the profile the time that the model of a step does not explain: measured less predicted seconds.

    This is work outside of programs (the trainer's own, on host and device), and ranks that wait for each other.

    Args:
        profile: With the schedules that ran.
    """
    if profile.step_seconds <= 0:
        return profile
    profile = _with_shared_link(profile)
    return replace(profile, unexplained_seconds=profile.step_seconds - _explained(profile))


def _explained(profile: Profile) -> float:
    return simulate(profile.schedules, profile).seconds - profile.unexplained_seconds


def _with_shared_link(profile: Profile) -> Profile:
    """Estimates the part of a link that gathers and reductions share: all of it, unless the step was too short.

    They have channels of their own, which need not fill the link together.
    """

    def sharing(factor: float) -> Profile:
        return replace(profile, contention=replace(profile.contention, shared_link=factor))

    most, least = profile.contention.shared_link, 1.0
    taken = _explained(profile)
    if taken <= profile.step_seconds:
        return profile
    alone = _explained(sharing(least))
    if taken - alone < _TELLS * profile.step_seconds:
        return profile
    if alone >= profile.step_seconds:
        return sharing(least)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        if _explained(sharing(middle)) <= profile.step_seconds:
            least = middle
        else:
            most = middle
    return sharing(least)


def leave_room(profile: Profile) -> Profile:
    """Subtracts the activations' bytes from the budget, for larger batches: plans outlive the batches measured."""
    if profile.budget is None or not profile.regions:
        return profile
    peak = max(cost.peak for cost in profile.regions.values())
    activations = max(peak - min(cost.before for cost in profile.regions.values()), 0)
    left = max(profile.budget - activations, 1)
    return replace(profile, budget=left, room=profile.budget - left)


def limit_memory(profile: Profile, limit: int | None) -> Profile:
    """Subtracts from the budget, and from the room for larger batches, memory that was missing in a shortage.

    Args:
        profile: With the budget that the devices' sizes allow.
        limit: Bytes that were there; None if no rank was short.
    """
    if profile.budget is None or limit is None:
        return profile
    budget, whole = min(profile.budget, limit), min(profile.budget + profile.room, limit)
    return replace(profile, budget=budget, room=whole - budget)
