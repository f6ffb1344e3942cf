"""Computes in backward again what memory asks for: less than the model checkpoints, or more than makes a step fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.offload.trade import StateTrade
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.leaner import Shortage, is_of, leaner_budget
from lightning_deepcompile.plan.recompute import Checkpoint, choose_recompute
from lightning_deepcompile.plan.report import PassReport, Round
from lightning_deepcompile.plan.state_trade import Planned
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.schedule import Schedule

__all__ = ["Recomputation"]


class Recomputation:
    """Decides once, in the first round of planning. Every call is the same on all ranks, as what it depends on is.

    Args:
        capture: Traces the step.
        states: Knows what waits in host memory: where that is short of memory already, nothing is kept.
    """

    def __init__(self, capture: Capture, states: StateTrade) -> None:
        self._capture, self._states = capture, states
        self._decided = capture.config.recompute != "auto"

    @property
    def pending(self) -> bool:
        """Whether the next round of planning decides."""
        return not self._decided

    def unplanned(self) -> str:
        """What to know where no round of planning comes; "" if there is nothing to decide."""
        if self._decided:
            return ""
        stage, settings = self._capture.stage, "CompileConfig(recompute='auto')"
        if stage == 3:
            remedy = f"{settings} needs a measured step, and CompileConfig(schedule=...) plans nothing: leave it 'auto'"
        else:
            remedy = f"{settings} is for stage 3, and this is stage {stage}: use stage 3"
        return f"All that the model checkpoints is computed again. {remedy}, or checkpoint less in the model."

    def adopt(self, uncheckpointed: int, sparing: bool) -> None:
        """Does as the plan that was read; call before the step is traced."""
        if not self._decided:
            self._capture.uncheckpointed, self._capture.sparing, self._decided = uncheckpointed, sparing, True

    def seen(self, schedules: Sequence[Schedule]) -> list[list[Checkpoint]]:
        """What this rank's programs compute again and could keep, a list for each forward program.

        Args:
            schedules: Those of a micro-batch.
        """
        return [self._capture.checkpoints(schedule.frame) for schedule in schedules if schedule.kind == "forward"]

    def spare(self, step: int, profile: Profile, least: int) -> Round | None:
        """Has little saved for backward if nothing else makes a step fit.

        Args:
            step: Optimizer steps done.
            profile: As measured.
            least: Bytes of the leanest plan.

        Returns:
            What the report says of it; None if the step stays as it is.
        """
        if self._decided or profile.budget is None or least <= profile.budget:
            return None
        self._decided = True
        self._capture.trace_anew(0, sparing=True)
        times = profile.step_seconds, profile.exposed_seconds
        over = format_bytes(least - profile.budget)
        text = f"The leanest plan needs {over} too much, so what is cheap is computed again from step {step} on."
        return Round(step, (), profile.budget, *times, outcome="traced anew", reason=text)

    def choose(
        self, step: int, profile: Profile, seen: Sequence[list[list[Checkpoint]]], plan: Callable[[Profile], Planned]
    ) -> Round | None:
        """Decides, and has the capture forget the step if it is to be traced anew.

        Args:
            step: Optimizer steps done.
            profile: As measured.
            seen: What every rank has `seen`.
            plan: Makes a plan with a profile.

        Returns:
            What the report says of it; None if the step stays as it is.
        """
        decided, self._decided = self._decided, True
        places = self._states.places
        short = (places is not None and places.away > 0) or any(s.offloaded for s in profile.schedules)
        if decided or short or any([*map(len, one)] != [*map(len, seen[0])] for one in seen):
            return None
        frames = [schedule.frame for schedule in profile.schedules if schedule.kind == "forward"]
        # Ranks may meet batches of different lengths.
        largest = [
            [max(same, key=lambda one: one.bytes) for same in zip(*blocks, strict=True)]
            for blocks in zip(*seen, strict=True)
        ]
        blocks = dict(zip(frames, largest, strict=True))
        doubles = self._capture.config.memory_budget is None
        chosen = choose_recompute(profile, blocks, plan, doubles=doubles)
        if chosen is None:
            return None
        self._capture.trace_anew(chosen.uncheckpointed, sparing=False)
        reports = tuple(PassReport.of(effect) for effect in chosen.effects)
        times = profile.step_seconds, profile.exposed_seconds
        return Round(step, reports, profile.budget, *times, outcome="traced anew")

    def give_up(
        self, step: int, shortages: Sequence[Shortage], planned: Sequence[Schedule], profile: Profile | None
    ) -> Round | None:
        """Has everything computed again that the model checkpoints, when a rank was short of memory.

        Args:
            step: Optimizer steps done.
            shortages: Of all ranks; at least one.
            planned: The schedules that failed; none if nothing was planned yet.
            profile: What they were made with; None for a plan out of a file.

        Returns:
            What the report says of it; None if everything is already.
        """
        if not self._capture.uncheckpointed:
            return None
        budget = None
        if planned and profile is not None and is_of(profile, planned):
            budget = leaner_budget(shortages, planned, profile)
        self._capture.trace_anew(0, sparing=False)
        text = f"{shortages[0]} From step {step} on, all that the model checkpoints is computed again."
        return Round(step, (), budget, 0.0, 0.0, outcome="leaner", reason=text)
