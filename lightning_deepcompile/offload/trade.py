"""Optimizer states as planning sees them: they move when a plan takes over that is better with them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_deepcompile.offload.residency import Residency
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.pass_manager import PassEffect
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.plan.state_trade import Planned, Trade, trade_states, with_away
from lightning_deepcompile.program.printer import format_bytes

__all__ = ["StateTrade"]


class StateTrade:
    """Plans together with the states' places. Every call is the same on all ranks, as what it depends on is.

    Args:
        residency: Keeps states where they are; None if nothing of them leaves.
        others: Says what else is in host memory for good; "" for nothing.

    Attributes:
        moved: Whether states moved with the last plan.
        must: Whether they had to, as what ran before needs more memory than it may.
    """

    def __init__(self, residency: Residency | None = None, others: Callable[[], str] = str) -> None:
        self._residency, self._others = residency, others
        self._before: tuple[int, str] | None = None
        self.moved = self.must = False

    @property
    def travel(self) -> bool:
        """Whether plans must know how fast states travel."""
        return self._residency is not None and self._residency.memory() is not None

    def least(self, profile: Profile) -> Profile:
        """The profile of a step with as many states in host memory as there may be."""
        memory = None if self._residency is None else self._residency.memory()
        return profile if memory is None else with_away(profile, memory, memory.at_least(memory.total))

    def plan(self, profile: Profile, plan: Callable[[Profile], Planned]) -> tuple[Profile, Planned]:
        """Makes a plan, and moves states as it needs them. A collective if they move.

        Args:
            profile: As measured.
            plan: Makes a plan with a profile.

        Returns:
            The profile with states where they are now, and the plan; its effects tell of them.
        """
        self.moved, self.must, residency = False, False, self._residency
        memory = None if residency is None else residency.memory()
        if residency is None or memory is None:
            schedules, effects = plan(profile)
            return profile, (schedules, self._told(effects))
        now, best = trade_states(profile, memory, plan)
        residency.set_slots(now.slots)
        if best.away != now.away and self._move(residency, now, best):
            schedules, effects = best.planned
            measured = replace(effects[0], prediction=simulate(profile.schedules, now.profile))
            sizes = f"{format_bytes(now.away)} become {format_bytes(best.away)}"
            text = "; ".join(filter(None, (self._others(), f"optimizer states in host memory: {sizes}")))
            residency.set_slots(best.slots)
            placed = PassEffect("offload", text, effects[0].prediction)
            return best.profile, (schedules, [measured, placed, *effects[1:]])
        schedules, effects = now.planned
        return now.profile, (schedules, self._told(effects))

    def undo(self) -> None:
        """Call when the last plan is given up: states go back to where they were. A collective if they moved."""
        if self.moved and self._residency is not None and self._before is not None:
            self._residency.place(*self._before)
            self.moved = False

    def _told(self, effects: list[PassEffect]) -> list[PassEffect]:
        states = "" if self._residency is None else self._residency.describe()
        text = "; ".join(filter(None, (self._others(), states)))
        return [effects[0], replace(effects[0], name="offload", changed=text), *effects[1:]] if text else effects

    def _move(self, residency: Residency, now: Trade, best: Trade) -> bool:
        before = now.away, "" if residency.decision is None else residency.decision.reason
        other = (
            f"{now.seconds * 1e3:.1f} ms" if now.over <= 0 else f"would need {format_bytes(now.over)} more than it may"
        )
        reason = f"a planned step takes {best.seconds * 1e3:.1f} ms; with {format_bytes(now.away)} there, {other}"
        if residency.place(best.away, reason):
            self._before, self.moved, self.must = before, True, now.over > 0
        return self.moved
