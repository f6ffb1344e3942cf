"""Merges the ranks' profiles into the one that all plan with: each number is that of the rank for which it is worst.

A profile is a frame, equal on ranks that ran the same programs on the same shapes, and numbers, of which the largest
counts. Ranks with equal frames need not exchange them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_deepcompile.plan.costs import WORST, Profile, ProfileError


def numbers_of(profile: Profile) -> list[float]:
    """The numbers of one rank's profile, with signs such that the largest over all ranks counts."""
    numbers: list[float] = []

    def note(number: float) -> float:
        numbers.append(number)
        return number

    _mapped(_in_order(profile), 1, note)
    return numbers


def with_numbers(profile: Profile, numbers: Sequence[float]) -> Profile:
    """Returns the frame of `profile` with other numbers, in the order of `numbers_of`."""
    left = iter(numbers)
    merged: Profile = _mapped(_in_order(profile), 1, lambda _: next(left))
    return merged


def _mapped(record: Any, sign: int, change: Callable[[float], float]) -> Any:
    """Returns a dataclass with other numbers in the fields that have a worst one."""
    changed = {}
    for one in dataclasses.fields(record):
        if WORST in one.metadata:
            own, kind = one.metadata[WORST]
            changed[one.name] = _changed(getattr(record, one.name), sign * own, kind, change)
    return replace(record, **changed)


def _changed(value: Any, sign: int, kind: type, change: Callable[[float], float]) -> Any:
    if dataclasses.is_dataclass(value):
        return _mapped(value, sign, change)
    if isinstance(value, dict):
        return {key: _mapped(one, sign, change) for key, one in value.items()}
    number = change(-math.inf if value is None else sign * float(value))
    return None if number == -math.inf else kind(sign * number)


def _in_order(profile: Profile) -> Profile:
    """Returns the profile with regions in the order of its schedules, which is that of all ranks."""
    regions = ((schedule, call.region) for schedule in profile.schedules for call in schedule.groups("compute"))
    costs = {f"{schedule.name}/{region}": profile.cost(schedule, region) for schedule, region in regions}
    return replace(profile, regions=costs)


def frame_of(profile: Profile) -> str:
    """Everything in a profile but its numbers, as text."""
    return repr(with_numbers(profile, [0.0] * len(numbers_of(profile))))


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Merges profiles: the slowest rank's times, the most memory, the least budget.

    Args:
        profiles: One per rank; fields that are not numbers are taken from the first one.

    Returns:
        The merged profile, the same on every rank.

    Raises:
        ProfileError: If ranks ran different programs in the profiled step.
    """
    first = profiles[0]
    for rank, other in enumerate(profiles):
        if [s.structure for s in other.schedules] != [s.structure for s in first.schedules]:
            raise ProfileError(
                f"Rank 0 ran {[s.name for s in first.schedules]} in the profiled step and rank {rank} "
                f"{[s.name for s in other.schedules]}, which communicate differently."
            )
    return with_numbers(first, [max(column) for column in zip(*map(numbers_of, profiles), strict=True)])
