"""Predicts a profile for a step that has not run: memory from the sizes of its programs' values, and no times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_deepcompile.plan.copy_placement import resize
from lightning_deepcompile.plan.costs import Link, Profile, RegionCost
from lightning_deepcompile.program.live import live_bytes
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.schedule import REDUCTIONS
from lightning_deepcompile.program.sizes import Sizes

GradientShards = Sequence[tuple[frozenset[int], int]]
"""Buffers of gradient shards: the numbers of their parameters within the model, and bytes."""

_NO_TIME = Link(0.0, 1e12)


def arrived_gradients(programs: Sequence[Program], buffers: GradientShards) -> dict[str, int]:
    """Returns the bytes of gradient shards that are allocated when each region runs; none are when the step begins.

    Args:
        programs: Those of a micro-batch, in the order in which they run.
        buffers: A buffer is allocated when the first gradient of its parameters is reduced.

    Returns:
        Bytes by ``"<program name>/<region name>"``.
    """
    there, left, found = 0, list(buffers), {}
    for program in programs:
        for instruction in program.schedule.instructions:
            if instruction.region:
                found[f"{program.name}/{instruction.region}"] = there
            elif instruction.op in REDUCTIONS:
                there += sum(size for ids, size in left if not ids.isdisjoint(instruction.ids))
                left = [one for one in left if one[0].isdisjoint(instruction.ids)]
    return found


def forecast(
    programs: Sequence[Program],
    standing: int,
    *,
    arrived: Mapping[str, int] | None = None,
    sizes: Sizes | None = None,
    **fields: Any,
) -> Profile:
    """Returns a profile whose memory is predicted, for decisions that fall before anything runs.

    Args:
        programs: Those of a micro-batch, in the order in which they run.
        standing: Bytes that are there all through the step.
        arrived: Bytes of gradient shards that are there besides, as of `arrived_gradients`.
        sizes: Values of symbolic sizes; None: they count with their hints.
        **fields: Of the `Profile`, such as ``world_size``, ``device_type`` and ``budget``.
    """
    regions: dict[str, RegionCost] = {}
    for program in programs:
        for name, (before, peak, after) in live_bytes(program, inside=True, sizes=sizes).items():
            key = f"{program.name}/{name}"
            there = standing + (arrived or {}).get(key, 0)
            regions[key] = RegionCost(0.0, 0.0, there + before, there + peak, there + after)
    schedules = tuple(resize(one.schedule, one.saved(sizes)) for one in programs)
    return Profile(schedules=schedules, regions=regions, gather=_NO_TIME, reduce=_NO_TIME, **fields)
