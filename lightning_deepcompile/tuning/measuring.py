"""The measured steps of a round, what one rank saw of them as a profile, and what all ranks plan with.

Batches may differ from step to step. Links, and the memory of regions, follow from two steps that ran the same
programs; if the first two did not, more are measured until two of them did. Where sizes vary, several such pairs give
the times of regions as functions of sizes, and a plan is made for the mean of the steps seen, with memory for the
largest. Durations are compared between steps of equal work, or by what is predicted for the sizes of each.
"""

from __future__ import annotations

import functools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.plan.copy_placement import resize
from lightning_deepcompile.plan.costs import Profile, RegionCost
from lightning_deepcompile.plan.step_pass import Pass
from lightning_deepcompile.profile.build import build_profile, leave_room, limit_memory, reconcile
from lightning_deepcompile.profile.copies import measure_copies
from lightning_deepcompile.profile.holds import hold_ratio, measure_holds
from lightning_deepcompile.profile.instrument import instrument
from lightning_deepcompile.profile.links import Transfer, transfers_of
from lightning_deepcompile.profile.marks import Isolation, StepMarks
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.profile.region_times import RegionTimes
from lightning_deepcompile.profile.workload import Workload
from lightning_deepcompile.program.executable import Executable
from lightning_deepcompile.program.live import live_bytes
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.saved import Saved
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.program.sizes import Noted, Sizes
from lightning_deepcompile.ranks.exchange import maxima, number_of

# A round, in steps from its first profiled one: two ordinary steps before are timed. One runs as scheduled, with marks;
# the next waits for every collective at once.
OBSERVED, ISOLATED, PLANNED, TIMED, VERIFIED = 0, 1, 2, 3, 6
# Of the timed ones, the last has marks, for reports. So does one of those before: both are compared alike.
MARKED = 5

_MOST_REPEATS = 6
"""With batches of few kinds (full ones and a last one, one sample and several), two of thirteen steps are alike."""

_ENOUGH = 6
"""Profiled steps of the same programs from which times follow as functions of sizes."""

_MARGIN = 8  # of a chosen budget, plans leave 1 / 2^8 free: predictions are not better than that


Marked = tuple[StepMarks, dict[str, Schedule]]
"""A step with marks, and the schedules that ran in it, by program name."""


class Comparison(NamedTuple):
    """Steps before and after a plan.

    Args:
        before: Seconds of a step before.
        after: Seconds of one after.
        slowest: Of the steps before, the slowest one's.
        fastest: Of those after, the fastest one's: a plan is slower if this is more.
    """

    before: float
    after: float
    slowest: float
    fastest: float


class Measurement:
    """The steps of one round: decides which of them are timed or run with marks, and keeps the measurements.

    Steps are counted from the round's first profiled one (`moment`).

    Args:
        first: That step, in optimizer steps since training began.
        searching: Whether the round is for programs that were not measured yet.

    Attributes:
        workload: The steps seen before the plan, merged over ranks; None before they are.
        ran: The schedules of the profiled steps.
        marked: A step under the plan, with marks, and its schedules by program name; None before there is one.
        elements: Of this rank's batches in the steps that were timed or profiled.
    """

    def __init__(self, first: int, searching: bool = False) -> None:
        self.first, self.searching = first, searching
        self._marks: dict[int, StepMarks] = {}
        self._repeats = 0
        # Profiled steps, with what ran in them: as scheduled, and with every collective by itself.
        self._observed: list[Marked] = []
        self._isolated: list[Marked] = []
        self._times: RegionTimes | None = None
        self._larger: Mapping[str, Iterable[Noted]] = {}
        self.workload: Workload | None = None
        self.ran: tuple[Schedule, ...] = ()
        self.marked: Marked | None = None
        self.elements: list[int] = []

    def marks(
        self, moment: int, device: torch.device, memory: PeakMemory, runtime: Any, capture: Capture
    ) -> StepMarks | None:
        """Returns the marks of the step that begins; None if it is not timed. Profiled programs set marks, too.

        Programs that are compiled in such a step get them, too: where other ranks have theirs from before, all must
        communicate alike.

        Args:
            moment: The step.
            device: Where it runs.
            memory: Of that device.
            runtime: ``_C.Runtime``; in the isolated step every collective waits for compute, and compute for it.
            capture: Has the programs.
        """
        capture.measures = None
        for executable in capture.frames.executables:
            executable.watch = None
        if not (-2 <= moment < PLANNED or TIMED <= moment < VERIFIED):
            return None
        # Of the round it may know nothing: programs with marks outlive a training that ends during one.
        isolation = Isolation(functools.partial(runtime.gradients.free, []), runtime.parameters.order_gathers)
        marks = self._marks[moment] = StepMarks(device, memory, isolation if moment == ISOLATED else None)
        training = capture.frames.training
        if moment in (OBSERVED, ISOLATED, MARKED):
            schedules = instrument(training, marks)
        if moment == MARKED:
            self.marked = marks, schedules
        if moment in (OBSERVED, ISOLATED):
            (self._observed if moment == OBSERVED else self._isolated).append((marks, schedules))
            capture.measures = functools.partial(_measure, schedules, marks)
        else:
            marks.watch(training)
            capture.measures = functools.partial(_compiled, marks)
        return marks

    def repeat(self) -> bool:
        """Measures two more steps, if there may be more; call on all ranks where a rank has no two of equal programs.

        Returns:
            Whether the step that begins is the first of them.
        """
        if self._repeats == _MOST_REPEATS:
            return False
        self._repeats += 1
        self.first += PLANNED
        self._marks = {moment - PLANNED: marks for moment, marks in self._marks.items() if moment != ISOLATED}
        return True

    def fastest(self, first: int, last: int) -> float:
        """Seconds of the shortest of the steps from `first` up to `last` of equal work; 0 if none was timed.

        Equal to the work of the step that the profile is made of, or else of the last one.
        """
        known = [self._marks[m] for m in range(first, last) if m in self._marks]
        if not known:
            return 0.0
        reference = self._pair()[0][0] if first < OBSERVED else known[-1]
        # A step in which something was compiled tells nothing.
        equal = [one for one in known if one.work == reference.work and not one.compiled]
        times = [one.seconds() for one in equal or [one for one in known if not one.compiled]]
        return min((t for t in times if t > 0), default=0.0)

    @property
    def repeats(self) -> bool:
        """Returns whether more than one pair of steps is measured."""
        return self._repeats > 0

    def compare(
        self, group: dist.ProcessGroup, profile: Profile, before: Sequence[Schedule], after: Sequence[Schedule]
    ) -> Comparison | None:
        """Compares steps before and after the plan; a collective.

        Where work differs, measured ÷ predicted counts, each at the sizes of that very step: a time is that of the mean
        step for which it would be as much longer, or shorter, than predicted. As predictions are no better than they
        were before the plan, the slowest step before counts then.

        Args:
            group: The ranks.
            profile: Of the mean step.
            before: The schedules that ran before the plan.
            after: Those of the plan.

        Returns:
            The times; None if no two steps can be compared, zeros if the work of all steps is equal.
        """
        assert self._times is not None and self.workload is not None
        timed = [moment for moment in self._marks if moment < ISOLATED or moment >= TIMED]
        digests = [float(number_of(repr(self._marks[moment].work))) for moment in timed]
        numbers = Workload.of(*self._totals(self._marks[moment] for moment in timed), varied=False)
        told = maxima([*digests, *(-one for one in digests), *numbers], group)
        count = len(timed)
        work = [(told[k], told[count + k]) for k in range(count)]
        steps = Workload.merged(told[2 * count :])
        valid = [k for k in range(count) if steps.seconds[k] > 0]
        kinds = {work[k]: [[], []] for k in valid}  # type: dict[tuple[float, float], list[list[float]]]
        for k in valid:
            kinds[work[k]][timed[k] >= TIMED].append(steps.seconds[k])
        if len(kinds) == 1 and all(next(iter(kinds.values()))):
            return Comparison(0.0, 0.0, 0.0, 0.0)
        pairs = [(min(one), min(other)) for one, other in kinds.values() if one and other]
        if pairs:
            pair = min(pairs, key=lambda pair: pair[1] / pair[0])
            return Comparison(*pair, *pair)

        def of_mean(schedules: Sequence[Schedule], places: Sequence[int]) -> list[float]:
            columns = [steps.longest[k] for k in places], [steps.seconds[k] for k in places]
            return self.workload.at_mean(profile, schedules, *columns) if self.workload is not None else []

        first = of_mean(before, [k for k in valid if timed[k] < TIMED])
        then = of_mean(after, [k for k in valid if timed[k] >= TIMED])
        if not first or not then:
            return None
        return Comparison(statistics.median(first), statistics.median(then), max(first), min(then))

    def _totals(self, known: Iterable[StepMarks]) -> tuple[list[float], list[float]]:
        """Returns for how long regions compute in steps, and how long these took; 0 where that tells nothing."""
        assert self._times is not None
        totals, seconds = [], []
        for marks in known:
            isolated = any(marks is one for one, _ in self._isolated)
            totals.append(self._times.total(marks.work))
            seconds.append(0.0 if marks.compiled or isolated or not marks.work else max(marks.seconds(), 0.0))
        return totals, seconds

    def numbers(self) -> list[float]:
        """This rank's part of the workload; call after `profile`."""
        return Workload.of(*self._totals(self._seen), varied=self._varied)

    @property
    def unknown(self) -> list[float]:
        """Returns as many numbers for a rank that could not make a profile."""
        return Workload.of([0.0] * len(self._seen), [0.0] * len(self._seen), varied=False)

    @property
    def _seen(self) -> list[StepMarks]:
        """The steps before the plan."""
        return [*(p for m, p in self._marks.items() if m < ISOLATED), *(marks for marks, _ in self._isolated)]

    @property
    def _varied(self) -> bool:
        """Returns whether the steps before the plan differ in their work."""
        works = [marks.work for marks in self._seen if marks.work and not marks.compiled]
        return any(work != works[0] for work in works)

    @property
    def programs(self) -> set[str]:
        """The names of the programs that the profile is made of, and of others of their structures that ran."""
        structures = {s.name: s.structure for _, schedules in self._isolated for s in schedules.values()}
        wanted = {structures.get(run.program) for run in self._pair()[1][0].runs}
        return {name for marks in self._seen for name, _ in marks.work if structures.get(name) in wanted}

    @property
    def observed(self) -> Marked:
        """A step that ran as scheduled before the plan, with marks, and its schedules by program name."""
        return self._pair()[0]

    @property
    def usual_programs(self) -> set[str]:
        """The names of the programs that the profile is made of: most steps ran them."""
        return {run.program for run in self._pair()[1][0].runs}

    @property
    def complete(self) -> bool:
        """Returns whether two profiled steps ran the same programs, and enough of them did where sizes vary."""
        (observed, _), (isolated, _) = self._pair()
        wanted = _programs(isolated)
        if _programs(observed) != wanted:
            return False
        return not self._varied or sum(_programs(p) == wanted for p, _ in self._observed + self._isolated) >= _ENOUGH

    def _pair(self) -> tuple[Marked, Marked]:
        """Two profiled steps that ran the same programs, which most steps ran, rather with arguments of equal sizes."""
        steps = Counter(_programs(marks) for marks, _ in self._observed + self._isolated)
        pairs = [(o, i) for i in self._isolated for o in self._observed]
        alike = [(o, i) for o, i in pairs if _programs(o[0]) == _programs(i[0])]
        ranked = enumerate(alike or pairs[-1:])
        return max(ranked, key=lambda at: (steps[_programs(at[1][0][0])], at[1][0][0].work == at[1][1][0].work, at[0]))[
            1
        ]

    def transfers(self) -> list[Transfer]:
        """Returns the gathers and reductions of the step that the profile is made of.

        Raises:
            ProfileError: If a program ended early.
        """
        return transfers_of(*self._pair()[1])

    def profile(
        self,
        capture: Capture,
        device: torch.device,
        transfers: Sequence[Transfer],
        passes: Sequence[Pass],
        *,
        step_seconds: float,
        window_from: int,
        budget: int,
        host_room: Callable[[], int] | None,
        states_travel: bool,
        larger: Mapping[str, Iterable[Noted]],
    ) -> tuple[Profile, tuple[Schedule, ...]]:
        """Returns the profile of the programs that this rank ran, and the schedules that planning starts from.

        Args:
            capture: Has compiled them.
            device: Where they ran.
            transfers: Those of `transfers`, which ranks agreed on.
            passes: What planning uses.
            step_seconds: Duration of an ordinary step.
            window_from: Bytes of the smallest group of parameters that is gathered to a window.
            budget: Bytes that may be allocated.
            host_room: Bytes of host memory that saved tensors may take; None where none may leave.
            states_travel: Whether optimizer states come and go.
            larger: Sizes with which programs ran earlier, where batches were larger than all before.
        """
        (observed, schedules), (isolated, isolated_schedules) = self._pair()
        config, model = capture.config, capture.model
        names = list(dict.fromkeys(run.program for run in isolated.runs))
        start = capture.scheduling.start(names, passes)
        programs = {e.program.name: e.program for e in capture.frames.executables}
        self._larger = larger
        self._times = times = RegionTimes(capture.frames.program)
        for marks, ran in self._observed + self._isolated:
            times.add(marks, ran)
        noted = {run.program: run.noted for run in isolated.runs}
        now = {name: programs[name].sizes(sizes) for name, sizes in noted.items()}
        profile = build_profile(
            observed,
            isolated,
            schedules,
            isolated_schedules,
            transfers,
            world_size=model.ranks.shards,
            replicated=model.ranks.replicas > 1,
            hold_ratio=hold_ratio(model.gradient_dtypes),
            hosted=model.hosted_bytes,
            window_from=window_from,
            budget=budget,
            step_seconds=step_seconds,
            live={name: live_bytes(programs[name], sizes=now[name]) for name in names},
        )
        if self._varied or larger:
            profile = replace(profile, regions=self._of_all_steps(profile, programs, now))
        if capture.scheduling.settings.reduce == "auto" and profile.micro_batches > 1 and profile.hold_seconds is None:
            profile = replace(profile, hold_seconds=measure_holds(model.gradient_dtypes, device))
        if config.memory_budget is None:
            profile = leave_room(profile)
        if host_room is not None or states_travel:
            out, back, duplex = measure_copies(device)
            room, contention = host_room and host_room(), replace(profile.contention, duplex=duplex)
            profile = replace(profile, copy_out=out, copy_in=back, contention=contention, host_budget=room)
        largest = {name: _largest(programs[name], self._sizes_of(name)) for name in names}
        return profile, tuple(resize(start[s.name], largest[s.name]) for s in profile.schedules)

    def _of_all_steps(
        self, profile: Profile, programs: Mapping[str, Program], now: Mapping[str, Sizes]
    ) -> dict[str, RegionCost]:
        """Returns the costs of regions: mean times over the steps seen, and memory of the largest.

        Args:
            profile: Of steps that ran with the sizes `now`.
            programs: By name.
            now: Sizes by program.
        """
        assert self._times is not None
        inside = profile.device_type == "cuda"  # an allocator counts it
        times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        memory: dict[tuple[str, str], tuple[int, ...]] = {}
        for name, noted in (one for marks in self._seen for one in marks.work):
            for key, seconds in (self._times.seconds(name, noted) or {}).items():
                times[key].append(seconds)
        for name in {name for marks in self._seen for name, _ in marks.work}.union(self._larger) & programs.keys():
            structure = programs[name].schedule.structure
            for sizes in self._sizes_of(name):
                for region, found in live_bytes(
                    programs[name], inside=inside, sizes=programs[name].sizes(sizes)
                ).items():
                    key = structure, region
                    memory[key] = tuple(map(max, memory.get(key, found), found))
        costs = dict(profile.regions)
        for schedule in profile.schedules:
            measured = live_bytes(programs[schedule.name], inside=inside, sizes=now[schedule.name])
            for region, bytes_now in measured.items():
                cost, key = profile.cost(schedule, region), (schedule.structure, region)
                most = memory.get(key, bytes_now)
                more = [max(one - other, 0) for one, other in zip(most, bytes_now, strict=True)]
                costs[f"{schedule.name}/{region}"] = RegionCost(
                    statistics.fmean(times[key]) if times[key] else cost.seconds,
                    cost.host,
                    cost.before + more[0],
                    cost.peak + more[1],
                    cost.after + more[2],
                )
        return costs

    def _sizes_of(self, name: str) -> set[Noted]:
        """The sizes with which a program ran, those of earlier, larger batches included."""
        seen = {noted for marks in self._seen for program, noted in marks.work if program == name}
        return seen.union(self._larger.get(name, ()))


def _measure(schedules: dict[str, Schedule], marks: StepMarks, executable: Executable) -> None:
    schedules |= instrument([executable], marks)
    marks.compiled = True


def _compiled(marks: StepMarks, executable: Executable) -> None:
    marks.compiled = True


def _largest(program: Program, seen: Iterable[Noted]) -> list[Saved]:
    """Returns the program's saved tensors, each with the most bytes that it had."""
    found: dict[int, Saved] = {}
    for noted in seen:
        for one in program.saved(program.sizes(noted)):
            if one.number not in found or found[one.number].size < one.size:
                found[one.number] = one
    return list(found.values())


def _programs(marks: StepMarks) -> tuple[str, ...]:
    return tuple(run.program for run in marks.runs)


def agreed_profile(
    merged: Profile,
    workload: Workload,
    start: Sequence[Schedule],
    memory_budget: object,
    limit: int | None,
    excess: int,
) -> tuple[Profile, int]:
    """Returns the profile that all ranks plan with.

    Args:
        merged: What ranks measured, put together.
        workload: The steps that the plan is for.
        start: The schedules that planning starts from.
        memory_budget: As configured.
        limit: Bytes that were there when a rank ran out of memory; None if none did.
        excess: Bytes that steps took beyond the budget, which their plan had kept.

    Returns:
        The profile, and the bytes that steps may allocate, of which its budget may leave some free.
    """
    merged = reconcile(workload.settle(merged))
    budget = merged.budget or 0
    margin = 0 if memory_budget is None else budget >> _MARGIN
    merged = limit_memory(merged, limit)
    left = max((merged.budget or 0) - margin - excess, 1)
    return replace(merged, schedules=tuple(start), budget=left), budget
