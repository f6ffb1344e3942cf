"""Merges the ranks' profiles into the one that all plan with: each number is that of the rank for which it is worst.

A profile is a frame, equal on ranks that ran the same programs on the same shapes, and numbers, of which the largest
counts. Ranks with equal frames need not exchange them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from lightning_deepcompile.plan.costs import Contention, Link, Profile, ProfileError, RegionCost
from lightning_deepcompile.program.schedule import Schedule

__all__ = ["frame_of", "merge_profiles", "numbers_of", "with_numbers"]

_MOST = ("optimizer_seconds", "launch_seconds", "hold_ratio", "step_seconds", "exposed_seconds")
_MOST_BYTES = ("room", "micro_batches")
_ALL = ("accumulates", "early_gathers", "head_start")
_LEAST_BYTES = ("budget", "host_budget")
_COSTS = tuple(field.name for field in fields(RegionCost))
_SECONDS = ("seconds", "host")


def numbers_of(profile: Profile) -> list[float]:
    """The numbers of one rank's profile, with signs such that the largest over all ranks counts."""
    regions = [getattr(profile.cost(*key), name) for key in _regions(profile) for name in _COSTS]
    links: list[float] = []
    for link in (profile.gather, profile.reduce):
        # A rank that comes late makes all others wait: the shortest time that any rank measured is the transfer's own.
        links += [-link.latency, link.bandwidth]
    for link in (profile.copy_out, profile.copy_in):
        links += [link.latency, -link.bandwidth]
    least = [-math.inf if (size := getattr(profile, name)) is None else -size for name in _LEAST_BYTES]
    return [
        *regions,
        *links,
        profile.contention.compute,
        profile.contention.duplex,
        *(getattr(profile, name) for name in (*_MOST, *_MOST_BYTES)),
        *(-float(getattr(profile, name)) for name in _ALL),
        *least,
        -profile.between_seconds,
        -1.0 if profile.hold_seconds is None else profile.hold_seconds,
    ]


def with_numbers(profile: Profile, numbers: Sequence[float]) -> Profile:
    """Returns the frame of `profile` with other numbers, in the order of `numbers_of`."""
    left = iter(numbers)
    regions = {}
    for schedule, region in _regions(profile):
        cost: dict[str, Any] = {name: next(left) if name in _SECONDS else int(next(left)) for name in _COSTS}
        regions[f"{schedule.name}/{region}"] = RegionCost(**cost)
    gather, reduce = (Link(-next(left), next(left)) for _ in range(2))
    copy_out, copy_in = (Link(next(left), -next(left)) for _ in range(2))
    contention = Contention(compute=next(left), duplex=next(left))
    others: dict[str, Any] = {name: next(left) for name in _MOST}
    others |= {name: int(next(left)) for name in _MOST_BYTES}
    others |= {name: next(left) < 0 for name in _ALL}
    others |= {name: None if (size := -next(left)) == math.inf else int(size) for name in _LEAST_BYTES}
    between, hold = -next(left), next(left)
    return replace(
        profile,
        regions=regions,
        gather=gather,
        reduce=reduce,
        copy_out=copy_out,
        copy_in=copy_in,
        contention=contention,
        between_seconds=between,
        hold_seconds=None if hold < 0 else hold,
        **others,
    )


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


def _regions(profile: Profile) -> list[tuple[Schedule, str]]:
    return [
        (schedule, schedule.instructions[position].region)
        for schedule in profile.schedules
        for position in schedule.at("compute")
    ]
