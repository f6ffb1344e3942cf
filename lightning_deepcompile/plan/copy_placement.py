"""Places copies of saved tensors: splits a schedule into a body and its copies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_deepcompile.program.saved import Saved
from lightning_deepcompile.program.schedule import COPIES, Instruction, Operation, Schedule

Key = tuple[int, int]
"""A frame, and the number of one of its saved tensors."""

COPY_AHEAD = 2  # regions between a copy and what needs it, while no times are known


def without_copies(schedule: Schedule) -> Schedule:
    """Returns `schedule` with all saved tensors on the device."""
    return schedule.with_instructions(i for i in schedule.instructions if i.op not in COPIES)


def resize(schedule: Schedule, saved: Sequence[Saved]) -> Schedule:
    """Returns `schedule` for a batch of other sizes.

    Args:
        schedule: Of a program.
        saved: The program's saved tensors, at these sizes.
    """
    known = {one.number: one.size for one in saved}
    changed = (
        replace(one, sizes=tuple(known.get(n, size) for n, size in zip(one.ids, one.sizes, strict=True)))
        if one.op in COPIES
        else one
        for one in schedule.instructions
    )
    saved = tuple(replace(one, size=known.get(one.number, one.size)) for one in schedule.saved)
    return schedule.with_instructions(changed, saved=saved)


def offload_saved(
    schedules: Sequence[Schedule], numbers: Mapping[int, Collection[int]], ahead: int = COPY_AHEAD
) -> list[Schedule]:
    """The schedules with copies of saved tensors at a fixed distance from where they are made and read.

    Args:
        schedules: Any programs; copies that they have are dropped.
        numbers: Of the tensors that shall leave, by frame.
        ahead: Regions between a copy and what needs it.
    """
    result = []
    for schedule in schedules:
        placement = CopyPlacement.of(schedule)
        wanted = numbers.get(schedule.frame, ())
        result.append(placement.at_distance([n for n in placement.saved if n in wanted], ahead))
    return result


def offload_all(schedules: Sequence[Schedule], ahead: int = COPY_AHEAD) -> list[Schedule]:
    """Returns the schedules with copies of every saved tensor that may leave; arguments as of `offload_saved`."""
    numbers = {s.frame: {one.number for one in s.saved} for s in schedules if s.kind == "forward"}
    return offload_saved(schedules, numbers, ahead)


def fit_copies(wanted: Schedule, current: Schedule, offloaded: Collection[int]) -> Schedule:
    """Gives a plan's schedule the copies that the current program allows.

    Programs of one structure communicate alike whatever their shapes, but may save other tensors, or larger ones.

    Args:
        wanted: Schedule of a plan for the program's structure.
        current: The program's own.
        offloaded: The tensors to offload if the plan's copies do not fit, or are for another shape and this program
            copies any; for a backward program, those that forward offloads in any case.
    """
    known = {(one.number, one.first, one.last) for one in current.saved}
    copied = set(wanted.offloaded)
    fits = all((one.number, one.first, one.last) in known for one in wanted.saved if one.number in copied)
    own = replace(wanted, saved=current.saved, frame=current.frame)
    if current.kind == "forward" and offloaded and wanted.content != current.content:
        fits = False
    if fits and (current.kind == "forward" or copied == {one.number for one in current.saved} & set(offloaded)):
        return own
    return offload_saved([own], {current.frame: offloaded})[0]


@dataclass(frozen=True)
class CopyPlacement:
    """A schedule as a body without copies, and the tensors that may be copied.

    Args:
        schedule: The schedule it was made of.
        body: All instructions but the copies.
        saved: The tensors that may be copied, by number.
        computes: Places of the regions in the body.
    """

    schedule: Schedule
    body: tuple[Instruction, ...]
    saved: dict[int, Saved]
    computes: list[int]
    _place: dict[str, int] = field(repr=False)

    @classmethod
    def of(cls, schedule: Schedule) -> CopyPlacement:
        """Splits `schedule`."""
        body = without_copies(schedule).instructions
        computes = [place for place, instruction in enumerate(body) if instruction.op == "compute"]
        places = {body[place].region: place for place in computes}
        saved = {one.number: one for one in schedule.saved} if schedule.kind in ("forward", "backward") else {}
        return cls(schedule, body, saved, computes, places)

    def first(self, number: int) -> int:
        """The place of the region that makes (forward), or first reads (backward) a tensor."""
        return self._place[self.saved[number].first]

    def free(self, number: int) -> int:
        """The first place in a forward body at which nothing reads a tensor any more."""
        return self._place[self.saved[number].last] + 1

    def at_distance(self, numbers: Iterable[int], ahead: int) -> Schedule:
        """Returns the schedule with copies that have the time of so many regions to run in."""
        turns: dict[int, int] = {}
        for number in numbers:
            region = self.computes.index(self.first(number))
            if self.schedule.kind == "forward":
                later = self.computes[region + ahead :]
                turns[number] = max(later[0] if later else len(self.body), self.free(number))
            else:
                turns[number] = self.computes[region - ahead] if region >= ahead else 0
        return self.at(turns)

    def at(self, turns: Mapping[int, int]) -> Schedule:
        """Returns the schedule with copies.

        A copy out starts as soon as the tensor is made, and a copy in is waited for when it is first read; `turns`
        gives the other end.

        Args:
            turns: By number, the place before which a copy out is waited for (forward) or a copy in starts (backward).
        """
        forward = self.schedule.kind == "forward"
        starts: dict[int, list[int]] = {}
        waits: dict[int, list[int]] = {}
        for number in sorted(turns, key=lambda n: (turns[n], self.first(n), n)):
            first = self.first(number)
            starts.setdefault(first + 1 if forward else min(turns[number], first), []).append(number)
            waits.setdefault(max(turns[number], self.free(number)) if forward else first, []).append(number)
        result: list[Instruction] = []
        for place in range(len(self.body) + 1):
            if place in starts:
                result.append(self._copy("offload" if forward else "reload", starts[place]))
            if place in waits:
                result.append(self._copy("wait_copy", waits[place]))
            if place < len(self.body):
                result.append(self.body[place])
        return self.schedule.with_instructions(result)

    def _copy(self, op: Operation, numbers: Sequence[int]) -> Instruction:
        return Instruction(op, tuple(numbers), tuple(self.saved[n].size for n in numbers))
