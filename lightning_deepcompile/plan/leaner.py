"""Replaces a plan after an out-of-memory error: by one that needs less, and in the end the one that needs the least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.least import just_in_time
from lightning_deepcompile.plan.pass_manager import Pass, PassEffect, difference, optimize
from lightning_deepcompile.plan.report import PassReport, Round
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.plan.state_trade import Planned
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.schedule import Schedule

__all__ = ["FallBack", "Shortage", "States", "fall_back", "is_of", "leaner_budget"]

_MARGIN = 0.05  # of a budget that is known from a failure: memory comes in pieces


@dataclass
class Shortage:
    """A region that found no memory.

    Args:
        rank: The rank that was short.
        program: The program that ran; "" if the runtime itself was short, between regions.
        region: The region's name in it.
        asked: The request, as the allocator puts it; "" if it does not say.
        free: Bytes that the device had left; None where the allocator does not count.
        allocated: Bytes that were allocated; None where the allocator does not count.
        relieved: Bytes that the rank gave back to go on.
    """

    rank: int
    program: str
    region: str
    asked: str
    free: int | None = None
    allocated: int | None = None
    relieved: int = 0

    def __str__(self) -> str:
        """The shortage as a sentence."""
        where = f" in {self.region} of {self.program}" if self.program else " when it launched communication"
        asked = f"; {self.asked} were asked for" if self.asked else ""
        free = "" if self.free is None else f"; {format_bytes(self.free)} were free"
        return f"Rank {self.rank} ran out of memory{where}{asked}{free}."


def leaner_budget(shortages: Sequence[Shortage], schedules: Sequence[Schedule], profile: Profile) -> int:
    """Returns a budget with which the shortages would not have happened.

    It is a plan's memory where a rank was short, less what that rank gave back: that memory was in use, whatever the
    plan predicted. The memory that was allocated when the request failed was available, too.

    Args:
        shortages: Of all ranks.
        schedules: The plan's.
        profile: The profile it was made with.
    """
    prediction = simulate(schedules, profile)
    limits = [prediction.peak_bytes]
    for shortage in shortages:
        there = [
            point.bytes
            for point in prediction.memory
            if schedules[point.schedule].name == shortage.program
            and schedules[point.schedule].instructions[point.instruction].region == shortage.region != ""
        ]
        limits.append(max(there, default=prediction.peak_bytes) - shortage.relieved)
        if shortage.allocated is not None:
            limits.append(shortage.allocated)
    return max(int(min(limits) * (1 - _MARGIN)), 1)


def is_of(profile: Profile, schedules: Sequence[Schedule]) -> bool:
    """Returns whether `profile` covers all programs of `schedules`; after a return to an older plan it may not."""
    return {schedule.name for schedule in schedules} <= {schedule.name for schedule in profile.schedules}


class States(Protocol):
    """Moves optimizer states with plans; see `offload.trade.StateTrade`."""

    movement: str

    def plan(self, profile: Profile, plan: Callable[[Profile], Planned]) -> tuple[Profile, Planned]:
        """Plans, and moves states where the plan needs them."""

    def leave(self, profile: Profile | None) -> Profile | None:
        """Moves all states to host memory."""


@dataclass(frozen=True)
class FallBack:
    """A plan after a failure.

    Args:
        schedules: Its schedules.
        profile: The profile it was made with, with optimizer states where they are now.
        round: The entry of the report.
        last: Whether no plan needs less.
    """

    schedules: Sequence[Schedule]
    profile: Profile | None
    round: Round
    last: bool


def fall_back(
    step: int,
    shortages: Sequence[Shortage],
    planned: Sequence[Schedule],
    start: Sequence[Schedule],
    passes: Sequence[Pass],
    settings: PlanSettings,
    profile: Profile | None,
    states: States,
    *,
    last: bool,
) -> FallBack:
    """Makes the plan that takes over after shortages. A collective if optimizer states move.

    Args:
        step: Optimizer steps done.
        shortages: Of all ranks; at least one.
        planned: The schedules that failed, in the order in which they ran.
        start: The same programs', as planning starts from them: without a profile, the least of these is the plan.
        passes: The passes that made them.
        settings: What the user chose.
        profile: What they were made with; None for a plan out of a file.
        states: Optimizer states: some may leave under the leaner plan, and all do under the least.
        last: Whether this was not the first plan to fail: another one might, too.
    """
    budget: int | None = None
    schedules: list[Schedule] = []
    effects: list[PassEffect] = []
    moves: list[str] = []
    if profile is not None and not is_of(profile, planned):
        profile = None
    if profile is not None:
        budget = leaner_budget(shortages, planned, profile)
        if not last:
            profile, (schedules, effects) = states.plan(
                replace(profile, budget=budget, room=0),
                lambda p: optimize(p.schedules, passes, PlanContext(settings, p)),
            )
            moves.append(states.movement)
            last = effects[-1].prediction.peak_bytes > budget
    if last or profile is None:
        schedules, last = [just_in_time(schedule) for schedule in (profile.schedules if profile else start)], True
        profile = states.leave(profile)
        moves.append(states.movement)
        effects = [] if profile is None else [PassEffect("just in time", "", simulate(schedules, profile))]
    peak = f", for a peak of {format_bytes(effects[-1].prediction.peak_bytes)}" if effects else ""
    changes = "; ".join(filter(None, (difference(planned, schedules) + peak, *moves)))
    others = f" ({len(shortages) - 1} more times since)" if len(shortages) > 1 else ""
    text = (
        f"{shortages[0]}{others} It gave {format_bytes(max(s.relieved for s in shortages))} back and went on. From "
        f"step {step} on, all ranks run a leaner plan: {changes}."
    )
    done = Round(
        step,
        tuple(PassReport.of(effect) for effect in effects),
        budget,
        0.0 if profile is None else profile.step_seconds,
        0.0 if profile is None else profile.exposed_seconds,
        outcome="leaner",
        reason=text,
    )
    return FallBack(schedules, profile, done, last)
