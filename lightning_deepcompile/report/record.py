"""The contents of a report: a measured step, the schedules in use, and the rounds of planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.limits import Limit, limits
from lightning_deepcompile.plan.measured import MeasuredStep, StepTime
from lightning_deepcompile.plan.optimize import optimize
from lightning_deepcompile.plan.report import PassReport, Round
from lightning_deepcompile.plan.scaling import ScalingPoint
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.simulate import Prediction, simulate
from lightning_deepcompile.plan.step_pass import Pass
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.summary import Summary

_SHOWN_MICRO_BATCHES = 2


@dataclass(frozen=True)
class StepRecord:
    """The contents of a report.

    Args:
        profile: The measured step; None if no step was measured.
        schedules: The programs of a micro-batch as they run now, in order; none without a profile.
        rounds: The rounds of planning.
        summary: The summary of a run; None if only a profile is known.
        programs: The printed programs, by name.
        scaling: The step on more ranks; none unless asked for.
        facts: What was trained, with which settings, and where, for people.
        measured: A step as ranks measured it; None if none was.
        times: Durations of steps.
        operations: Floating-point operations of regions, by key.
        peak: The device's floating-point operations a second; None if not known.
        graphs: Of each captured graph its programs, the line at which it ends, and why; then why it was compiled anew.
    """

    profile: Profile | None = None
    schedules: tuple[Schedule, ...] = ()
    rounds: Sequence[Round] = ()
    summary: Summary | None = None
    programs: Mapping[str, str] = field(default_factory=dict)
    scaling: Sequence[ScalingPoint] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    measured: MeasuredStep | None = None
    times: Sequence[StepTime] = ()
    operations: Mapping[str, int] = field(default_factory=dict)
    peak: float | None = None
    graphs: Sequence[tuple[str, str, str, str]] = ()

    def predict(self) -> Prediction | None:
        """Simulates the step; None without a profile."""
        return None if self.profile is None else simulate(self.schedules, self.profile)

    def limits(self) -> list[Limit]:
        """Returns what limits the step, the largest cost first; nothing without a profile."""
        if self.profile is None:
            return []
        skew, usual = (self.rounds[-1].skew_seconds, self.rounds[-1].after_seconds) if self.rounds else (0.0, None)
        return limits(self.schedules, self.profile, skew, self.measured, usual)

    def shortened(self) -> StepRecord:
        """Returns the record of a step of at most two micro-batches: those between the first and the last are alike."""
        if self.profile is None or self.profile.micro_batches <= _SHOWN_MICRO_BATCHES:
            return self
        return replace(self, profile=replace(self.profile, micro_batches=_SHOWN_MICRO_BATCHES))


def plan_record(profile: Profile, passes: Sequence[Pass], settings: PlanSettings | None = None) -> StepRecord:
    """Plans a profiled step, and records it.

    Returns:
        A record with one round, of which nothing was measured afterwards.
    """
    schedules, effects = optimize(profile.schedules, passes, PlanContext(settings or PlanSettings(), profile))
    reports = tuple(PassReport.of(effect) for effect in effects)
    times = profile.step_seconds, profile.exposed_seconds
    done = Round(0, reports, profile.budget, *times, outcome="planned from the profile")
    return StepRecord(profile, tuple(schedules), (done,))
