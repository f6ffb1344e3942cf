"""Predicts a profile for a step that has not run: memory from the sizes of its programs' values, and no times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_deepcompile.plan.costs import Link, Profile, RegionCost
from lightning_deepcompile.program.live import live_bytes
from lightning_deepcompile.program.program import Program

__all__ = ["forecast"]

_NO_TIME = Link(0.0, 1e12)


def forecast(programs: Sequence[Program], standing: int, **fields: Any) -> Profile:
    """Returns a profile with predicted memory, for decisions that are made before anything runs.

    Args:
        programs: Those of a micro-batch, in the order in which they run.
        standing: Bytes that are allocated all through the step.
        **fields: Of the `Profile`, such as ``world_size``, ``device_type`` and ``budget``.
    """
    regions: dict[str, RegionCost] = {}
    for program in programs:
        for name, (before, peak, after) in live_bytes(program, inside=True).items():
            memory = (standing + size for size in (before, peak, after))
            regions[f"{program.name}/{name}"] = RegionCost(0.0, 0.0, *memory)
    schedules = tuple(program.schedule for program in programs)
    return Profile(schedules=schedules, regions=regions, gather=_NO_TIME, reduce=_NO_TIME, **fields)
