"""Prefetching at a fixed distance: a block's parameters are gathered while the blocks before it compute."""

from __future__ import annotations

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.placement import Placement
from lightning_deepcompile.program.schedule import Schedule


def prefetch(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Moves every launch of a group ``prefetch_blocks`` groups ahead of where it is needed.

    Looks for: ``gather`` right before its ``wait``, as `zero3` leaves them.

    Changes: the launch of the k-th group moves before the wait for group ``k - prefetch_blocks`` (behind that group's
    own launch), that of the first ones to the program's start. A launch never moves before an earlier release of one of
    its own parameters, which would turn the release into a use after free. Launches keep their order, so all ranks
    issue the same collectives.

    Promises: same values; at most ``prefetch_blocks`` more groups gathered at a time.
    """
    return [_ahead(Placement.of(schedule), context.settings.prefetch_blocks) for schedule in schedules]


def _ahead(placement: Placement, distance: int) -> Schedule:
    waits = [group.need for group in placement.groups]
    start = next((place for place, instruction in enumerate(placement.body) if instruction.op == "compute"), 0)
    positions, earliest = [], 0
    for k, group in enumerate(placement.groups):
        place = max(earliest, k - distance)
        while place < k and waits[place] < group.earliest:
            place += 1
        opens = k < distance and place == 0 and group.earliest == 0
        positions.append(min(start, waits[0]) if opens else waits[place])
        earliest = place
    return placement.at(positions)
