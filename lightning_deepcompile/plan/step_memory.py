"""The memory of a step whose gathers and releases change: all that they do not concern is simulated once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lightning_deepcompile.plan.context import NO_LIMIT
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.gathered import MOVES, GatherModel
from lightning_deepcompile.plan.simulate import memory_rows, window_bytes
from lightning_deepcompile.program.schedule import Instruction, Schedule

_NOTHING = Instruction("gather")


class StepMemory:
    """Predicts what `peak_bytes` and `memory_bytes` do, for schedules that differ in `MOVES` alone.

    Args:
        schedules: The programs of a micro-batch, in order.
        profile: Costs of their regions.
    """

    def __init__(self, schedules: Sequence[Schedule], profile: Profile) -> None:
        self._profile = profile
        # Bytes besides gathered parameters, before and while each instruction that does not move them is issued, and
        # after the last.
        self._beside = memory_rows([_without_moves(schedule) for schedule in schedules], profile)

    def peak(self, schedules: Sequence[Schedule], limit: int = NO_LIMIT) -> int:
        """Returns the most bytes allocated; beyond `limit`, the first number that exceeds it."""
        most = 0
        for _, _, size in self._sizes(schedules):
            if size > most:
                most = size
                if most > limit:
                    break
        return most

    def first_excess(self, schedules: Sequence[Schedule], limit: int, index: int) -> int | None:
        """Returns the first position in the schedule `index` at which more than `limit` bytes are allocated, if any."""
        found = (place for k, place, size in self._sizes(schedules) if k == index and size > limit)
        return next(found, None)

    def _sizes(self, schedules: Sequence[Schedule]) -> Iterator[tuple[int, int, int]]:
        """Yields schedule, position and bytes of each instruction, in the host's order."""
        gathers, windows = GatherModel(self._profile), window_bytes(schedules, self._profile)
        for micro_batch, rows in enumerate(self._beside):
            boundary = self._profile.at_boundary(micro_batch)
            for index, (schedule, row) in enumerate(zip(schedules, rows, strict=True)):
                place = 0
                for position, instruction in enumerate(schedule.instructions):
                    if instruction.op in MOVES:
                        gathers.follow(instruction, boundary)
                        beside = row[place]
                    else:
                        beside = row[place + 1]
                        place += 2
                    yield index, position, gathers.bytes + windows + beside


def _without_moves(schedule: Schedule) -> Schedule:
    others = (instruction for instruction in schedule.instructions if instruction.op not in MOVES)
    return schedule.with_instructions([*itertools.chain(*((_NOTHING, one) for one in others)), _NOTHING])
