"""Places gathers: splits a schedule into a body and the gathers, which may move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_deepcompile.program.schedule import RELEASES, Instruction, Schedule


@dataclass(frozen=True)
class Group:
    """A group of gathers within a schedule.

    Args:
        gather: The instruction.
        earliest: The first place in the body where it may be launched: behind earlier releases of its parameters.
        need: The place of the first wait for it.
        position: The place of its launch: before the body's instruction of that number.
    """

    gather: Instruction
    earliest: int
    need: int
    position: int


@dataclass(frozen=True)
class Placement:
    """A schedule as a body without gathers, and its groups in order of their launch.

    Args:
        schedule: The schedule it was made of.
        body: All instructions but the gathers.
        groups: The gathers.
    """

    schedule: Schedule
    body: tuple[Instruction, ...]
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Placement:
        """Splits `schedule`."""
        body: list[Instruction] = []
        launched: list[tuple[Instruction, int]] = []
        for instruction in schedule.instructions:
            if instruction.op == "gather":
                launched.append((instruction, len(body)))
            else:
                body.append(instruction)
        groups = []
        for gather, position in launched:
            ids = set(gather.ids)
            waits = (i for i in range(position, len(body)) if body[i].op == "wait" and ids & set(body[i].ids))
            need = next(waits, position)
            released = [i + 1 for i in range(position) if body[i].op in RELEASES and ids & set(body[i].ids)]
            groups.append(Group(gather, max(released, default=0), need, position))
        return cls(schedule, tuple(body), tuple(groups))

    def fit(self, positions: Sequence[int]) -> list[int]:
        """Returns the places next to `positions` at which the groups can be launched in unchanged order."""
        latest = len(self.body)
        fitted = []
        for group, position in zip(reversed(self.groups), reversed(positions), strict=True):
            latest = max(group.earliest, min(position, group.need, latest))
            fitted.append(latest)
        return fitted[::-1]

    def at(self, positions: Sequence[int]) -> Schedule:
        """Returns the schedule with its groups launched at `positions`, or as near as possible, in unchanged order."""
        fitted = self.fit(positions)
        result: list[Instruction] = []
        launched = 0
        for index, instruction in enumerate(self.body):
            while launched < len(fitted) and fitted[launched] <= index:
                result.append(self.groups[launched].gather)
                launched += 1
            result.append(instruction)
        result.extend(group.gather for group in self.groups[launched:])
        return self.schedule.with_instructions(result)
