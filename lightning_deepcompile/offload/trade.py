"""Moves optimizer states between device and host when a new plan is better with them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_deepcompile.offload.residency import Residency
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.offload import StatePlaces
from lightning_deepcompile.plan.optimize import PassEffect
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.plan.state_trade import Planned, StateMemory, Trade, trade_states, with_away
from lightning_deepcompile.program.printer import format_bytes

__all__ = ["StateTrade"]


@dataclass(frozen=True)
class _Before:
    """The state before states moved."""

    places: StatePlaces
    reason: str
    profile: Profile


class StateTrade:
    """Plans together with the location of states. Call every method on all ranks alike: their inputs are the same.

    Args:
        residency: Keeps states where they are; None if nothing of them leaves.
        others: Says what else is in host memory for good; "" for nothing.

    Attributes:
        movement: What moved with the last plan, in words; "" for nothing.
        must: Whether it had to, as what ran before needs more memory than it may.
    """

    def __init__(self, residency: Residency | None = None, others: Callable[[], str] = str) -> None:
        self._residency, self._others = residency, others
        self._before: _Before | None = None
        self.movement, self.must = "", False

    @property
    def travel(self) -> bool:
        """True if plans must know how fast states are copied."""
        return self._memory is not None

    @property
    def _memory(self) -> StateMemory | None:
        return None if self._residency is None else self._residency.memory()

    @property
    def places(self) -> StatePlaces | None:
        """The location of the states; None if none is offloaded, and before that is decided."""
        return None if self._residency is None else self._residency.places

    def expect(self, places: StatePlaces | None) -> None:
        """Sets where the loaded plan has the states; call before the first optimizer step."""
        if self._residency is not None:
            self._residency.expected = places

    def least(self, profile: Profile) -> Profile:
        """Returns the profile of a step with as many states in host memory as possible."""
        memory = self._memory
        return profile if memory is None else with_away(profile, memory, memory.at_least(memory.total))

    def plan(self, profile: Profile, plan: Callable[[Profile], Planned]) -> tuple[Profile, Planned]:
        """Makes a plan, and moves states where it needs them. A collective if they move.

        Args:
            profile: As measured.
            plan: Makes a plan with a profile.

        Returns:
            The profile with states where they are now, and the plan; its effects tell of them.
        """
        self.movement, self.must = "", False
        residency, memory = self._residency, self._memory
        if residency is None or memory is None:
            schedules, effects = plan(profile)
            return profile, (schedules, self._told(effects))
        now, best = trade_states(profile, memory, plan)
        residency.set_slots(now.slots)
        if best.away != now.away and self._move(residency, now, best):
            schedules, effects = best.planned
            measured = replace(effects[0], prediction=simulate(profile.schedules, now.profile))
            residency.set_slots(best.slots)
            text = "; ".join(filter(None, (self._others(), self.movement)))
            placed = PassEffect("offload", text, effects[0].prediction)
            return best.profile, (schedules, [measured, placed, *effects[1:]])
        schedules, effects = now.planned
        return now.profile, (schedules, self._told(effects))

    def undo(self, profile: Profile) -> Profile:
        """Call when the last plan is given up: moves states back. A collective if they move.

        Args:
            profile: What `plan` returned.

        Returns:
            The profile with states where they are now.
        """
        before, self._before = self._before, None
        if not self.movement or self._residency is None or before is None:
            return profile
        self.movement = ""
        if not self._residency.place(before.places.away, before.reason):
            return profile
        self._residency.set_slots(before.places.slots)
        return before.profile

    def _told(self, effects: list[PassEffect]) -> list[PassEffect]:
        states = "" if self._residency is None else self._residency.describe()
        text = "; ".join(filter(None, (self._others(), states)))
        return [effects[0], replace(effects[0], name="offload", changed=text), *effects[1:]] if text else effects

    def _move(self, residency: Residency, now: Trade, best: Trade) -> bool:
        reason = "" if residency.decision is None else residency.decision.reason
        before = _Before(StatePlaces(now.away, now.slots), reason, now.profile)
        other = (
            f"{now.seconds * 1e3:.1f} ms" if now.over <= 0 else f"would need {format_bytes(now.over)} more than it may"
        )
        reason = f"a planned step takes {best.seconds * 1e3:.1f} ms; with {format_bytes(now.away)} there, {other}"
        if residency.place(best.away, reason):
            self._before, self.movement, self.must = before, _movement(now.away, best.away), now.over > 0
        return bool(self.movement)


def _movement(before: int, after: int) -> str:
    return f"optimizer states in host memory: {format_bytes(before)} become {format_bytes(after)}"
