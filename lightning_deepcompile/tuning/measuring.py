"""The measured steps of a round, what one rank saw of them as a profile, and what all ranks plan with.

Batches may differ from step to step. A profile is made of two steps that ran the same programs; if the first two did
not, more are measured until two of them did. Durations are compared only between steps of equal work: the same programs
with arguments of the same sizes, on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.pass_manager import Pass
from lightning_deepcompile.profile.build import build_profile, explain, leave_room, limit_memory
from lightning_deepcompile.profile.copies import measure_copies
from lightning_deepcompile.profile.holds import hold_ratio, measure_holds
from lightning_deepcompile.profile.instrument import instrument
from lightning_deepcompile.profile.memory import memory_limit
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.profile.probe import Run, StepProbe
from lightning_deepcompile.program.executable import Executable
from lightning_deepcompile.program.live import live_bytes
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.ranks.exchange import exchange, number_of

__all__ = ["ISOLATED", "OBSERVED", "PLANNED", "TIMED", "VERIFIED", "Measurement", "agreed_profile"]

# A round, in steps from its first profiled one: two ordinary steps before are timed. One runs as scheduled, with marks;
# the next waits for every collective at once.
OBSERVED, ISOLATED, PLANNED, TIMED, VERIFIED = 0, 1, 2, 3, 6

_MOST_REPEATS = 6
"""With batches of few kinds (full ones and a last one, one sample and several), two of thirteen steps are alike."""

_MARGIN = 8  # of a chosen budget, plans leave 1 / 2^8 free: predictions are not better than that


class Measurement:
    """The steps of one round: decides which of them are timed or run with marks, and keeps the measurements.

    Steps are counted from the round's first profiled one (`moment`).

    Args:
        first: That step, in optimizer steps since training began.
        searching: Whether the round is for programs that were not measured yet.
    """

    def __init__(self, first: int, searching: bool = False) -> None:
        self.first, self.searching = first, searching
        self._probes: dict[int, StepProbe] = {}
        self._repeats = 0
        # Profiled steps, with what ran in them: as scheduled, and with every collective by itself.
        self._observed: list[tuple[StepProbe, dict[str, Schedule]]] = []
        self._isolated: list[tuple[StepProbe, dict[str, Schedule]]] = []

    def probe(
        self, moment: int, device: torch.device, memory: PeakMemory, runtime: Any, capture: Capture
    ) -> StepProbe | None:
        """Returns the probe that times the step that begins; None if it is not timed. Profiled steps get marks.

        Programs that are compiled in such a step get them, too: where other ranks have theirs from before, all must
        communicate alike.

        Args:
            moment: The step.
            device: Where it runs.
            memory: Of that device.
            runtime: ``_C.Runtime``; in the isolated step it waits for every collective at once.
            capture: Has the programs.
        """
        capture.measures = None
        for executable in capture.executables:
            executable.watch = None
        if not (-2 <= moment < PLANNED or TIMED <= moment < VERIFIED):
            return None
        # Of the round it may know nothing: programs with marks outlive a training that ends during one.
        drain = functools.partial(runtime.gradients.free, []) if moment == ISOLATED else None
        probe = self._probes[moment] = StepProbe(device, memory, drain)
        training = [e for e in capture.executables if e.program.kind != "inference"]
        if moment in (OBSERVED, ISOLATED):
            schedules = instrument(training, probe)
            (self._observed if moment == OBSERVED else self._isolated).append((probe, schedules))
            capture.measures = functools.partial(_measure, schedules, probe)
        else:
            probe.watch(training)
            capture.measures = functools.partial(_compiled, probe)
        return probe

    def repeat(self) -> bool:
        """Measures two more steps, if there may be more; call on all ranks where a rank has no two of equal programs.

        Returns:
            Whether the step that begins is the first of them.
        """
        if self._repeats == _MOST_REPEATS:
            return False
        self._repeats += 1
        self.first += PLANNED
        self._probes = {moment - PLANNED: probe for moment, probe in self._probes.items() if moment != ISOLATED}
        return True

    def fastest(self, first: int, last: int) -> float:
        """Seconds of the shortest of the steps from `first` up to `last` of equal work; 0 if none was timed.

        Equal to the work of the step that the profile is made of, or else of the last one.
        """
        probes = [self._probes[m] for m in range(first, last) if m in self._probes]
        if not probes:
            return 0.0
        reference = self._pair()[0][0] if first < OBSERVED else probes[-1]
        # A step in which something was compiled tells nothing.
        equal = [one for one in probes if one.work == reference.work and not one.compiled]
        times = [one.seconds() for one in equal or [one for one in probes if not one.compiled]]
        return min((t for t in times if t > 0), default=0.0)

    def compare(self, group: dist.ProcessGroup) -> tuple[float, float] | None:
        """Compares steps before and after the plan that did the same on every rank; a collective.

        Args:
            group: The ranks.

        Returns:
            Seconds of the fastest step before, and of the fastest after, of equal work; None if no two can be compared.
            (0, 0) if the work of all steps is equal.
        """
        timed = [m for m in self._probes if m < ISOLATED or m >= TIMED]
        mine = {m: (number_of(repr(self._probes[m].work)), self._probes[m].seconds()) for m in timed if self._valid(m)}
        ranks = exchange(mine, group)
        kinds: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}
        for moment in timed:
            if all(moment in rank for rank in ranks):
                seconds = max(rank[moment][1] for rank in ranks)
                before_and_after = kinds.setdefault(tuple(rank[moment][0] for rank in ranks), ([], []))
                before_and_after[moment >= TIMED].append(seconds)
        if len(kinds) == 1 and all(next(iter(kinds.values()))):
            return 0.0, 0.0
        pairs = [(min(before), min(after)) for before, after in kinds.values() if before and after]
        return min(pairs, key=lambda pair: pair[1] / pair[0], default=None)

    def _valid(self, moment: int) -> bool:
        probe = self._probes[moment]
        return bool(probe.work) and not probe.compiled and probe.seconds() > 0

    @property
    def runs(self) -> list[Run]:
        """The runs of the isolated step that the profile is made of."""
        return self._pair()[1][0].runs

    @property
    def paired(self) -> bool:
        """Returns whether two profiled steps ran the same programs."""
        (observed, _), (isolated, _) = self._pair()
        return _programs(observed) == _programs(isolated)

    def _pair(self) -> tuple[tuple[StepProbe, dict[str, Schedule]], tuple[StepProbe, dict[str, Schedule]]]:
        """The last two profiled steps that ran the same programs, rather with arguments of the same sizes."""
        pairs = [(o, i) for i in reversed(self._isolated) for o in reversed(self._observed)]
        alike = [(o, i) for o, i in pairs if _programs(o[0]) == _programs(i[0])]
        equal = [(o, i) for o, i in alike if o[0].work == i[0].work]
        return next(iter([*equal, *alike, *pairs]))

    def profile(
        self,
        capture: Capture,
        device: torch.device,
        passes: Sequence[Pass],
        *,
        step_seconds: float,
        launched: Mapping[str, bool],
        windows: tuple[int, int],
        host_room: Callable[[], int] | None,
        states_travel: bool,
    ) -> tuple[Profile, tuple[Schedule, ...]]:
        """Returns the profile of the programs that this rank ran, and the schedules that planning starts from.

        Args:
            capture: Has compiled them.
            device: Where they ran.
            passes: What planning uses.
            step_seconds: Duration of an ordinary step.
            launched: When a step's first gathers are launched, as fields of a `Profile`.
            windows: Bytes of the windows that parameters are gathered to, and of the smallest group that gets one.
            host_room: Bytes of host memory that saved tensors may take; None where none may leave.
            states_travel: Whether optimizer states come and go.
        """
        (observed, schedules), (isolated, isolated_schedules) = self._pair()
        window_size, window_from = windows
        between = [second.seconds_since(first) for first, second in self._successive()]
        config, model = capture.config, capture.model
        names = list(dict.fromkeys(run.program for run in isolated.runs))
        start = capture.schedules(names, passes)
        programs = {e.program.name: e.program for e in capture.executables}
        dtypes = {(p.gather_dtype, p.local.dtype) for p in model.parameters if p.dtensor.requires_grad}
        profile = build_profile(
            observed,
            isolated,
            schedules,
            isolated_schedules,
            world_size=model.ranks.shards,
            hold_ratio=hold_ratio(dtypes),
            window_from=window_from,
            budget=memory_limit(device, config.memory_budget, window_size),
            step_seconds=step_seconds,
            live={name: live_bytes(programs[name]) for name in names},
        )
        early, in_optimizer = (launched.get(name, False) for name in ("early_gathers", "head_start"))
        profile = replace(
            profile, early_gathers=early, head_start=in_optimizer, between_seconds=min(between, default=0.0)
        )
        if capture.settings.reduce == "auto" and profile.micro_batches > 1 and profile.hold_seconds is None:
            profile = replace(profile, hold_seconds=measure_holds(dtypes, device))
        if config.memory_budget is None:
            profile = leave_room(profile)
        if host_room is not None or states_travel:
            out, back, duplex = measure_copies(device)
            room, contention = host_room and host_room(), replace(profile.contention, duplex=duplex)
            profile = replace(profile, copy_out=out, copy_in=back, contention=contention, host_budget=room)
        return profile, tuple(start[s.name] for s in profile.schedules)

    def _successive(self) -> Iterator[tuple[StepProbe, StepProbe]]:
        for moment, probe in self._probes.items():
            if moment < OBSERVED and moment + 1 in self._probes:
                yield probe, self._probes[moment + 1]


def _measure(schedules: dict[str, Schedule], probe: StepProbe, executable: Executable) -> None:
    schedules |= instrument([executable], probe)
    probe.compiled = True


def _compiled(probe: StepProbe, executable: Executable) -> None:
    probe.compiled = True


def _programs(probe: StepProbe) -> list[str]:
    return [run.program for run in probe.runs]


def agreed_profile(
    merged: Profile, start: Sequence[Schedule], memory_budget: object, limit: int | None, excess: int
) -> tuple[Profile, int]:
    """Returns the profile that all ranks plan with.

    Args:
        merged: What ranks measured, put together.
        start: The schedules that planning starts from.
        memory_budget: As configured.
        limit: Bytes that were there when a rank ran out of memory; None if none did.
        excess: Bytes that steps took beyond the budget, which their plan had kept.

    Returns:
        The profile, and the bytes that steps may allocate, of which its budget may leave some free.
    """
    merged = explain(merged)
    budget = merged.budget or 0
    margin = 0 if memory_budget is None else budget >> _MARGIN
    merged = limit_memory(merged, limit)
    left = max((merged.budget or 0) - margin - excess, 1)
    return replace(merged, schedules=tuple(start), budget=left), budget
