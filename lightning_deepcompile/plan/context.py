"""The inputs of passes besides the schedules."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.settings import PlanSettings

NO_LIMIT = 1 << 62
"""A budget that everything fits into."""


@dataclass(frozen=True)
class PlanContext:
    """The inputs of passes besides the schedules.

    Args:
        settings: The user's choices.
        profile: A measured step; None before there is one.
    """

    settings: PlanSettings = field(default_factory=PlanSettings)
    profile: Profile | None = None

    @property
    def budget(self) -> int:
        """Bytes that may be allocated."""
        return NO_LIMIT if self.profile is None or self.profile.budget is None else self.profile.budget

    @property
    def whole_budget(self) -> int:
        """The same, plus the room that is left for larger batches."""
        return self.budget if self.profile is None else self.budget + self.profile.room

    def require_profile(self, name: str, micro_batches: int = 2) -> Profile:
        """Returns the profile of a step of at most `micro_batches`, for the pass `name` that requires one.

        As a rule, more than two micro-batches run the same programs as the first of two: they would change no decision,
        and simulating them takes time. The step's time that its programs do not explain is scaled accordingly.

        Raises:
            ValueError: If there is none.
        """
        if self.profile is None:
            raise ValueError(f"The pass {name!r} needs a profile: give it a `step` of at least 1 in the schedule.")
        kept = min(self.profile.micro_batches, micro_batches)
        unexplained = self.profile.unexplained_seconds * kept / self.profile.micro_batches
        return replace(self.profile, micro_batches=kept, unexplained_seconds=unexplained)
