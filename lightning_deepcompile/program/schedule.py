"""A program's schedule as plain data: the order of its instructions, without the code that computes.

Passes change schedules. Lowering writes the first one, in which all communication blocks; `reschedule` gives a program
another one, and `codegen` writes the function that runs it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_deepcompile.program.instructions import (
    COPIES,
    REDUCTIONS,
    RELEASES,
    STATE_COPIES,
    TABLE,
    Operation,
    Traits,
)
from lightning_deepcompile.program.saved import Saved

__all__ = [
    "COPIES",
    "REDUCTIONS",
    "RELEASES",
    "STATE_COPIES",
    "Instruction",
    "Operation",
    "ProgramKind",
    "Schedule",
    "ScheduleError",
    "check_copies",
    "check_schedule",
    "first_gather_positions",
]


ProgramKind = Literal["forward", "backward", "inference"]


class ScheduleError(ValueError):
    """A schedule that would compute another result, or use memory that is not there."""


@dataclass(frozen=True)
class Instruction:
    """An instruction of a schedule.

    Args:
        op: Its name, a row of `instructions.TABLE`.
        ids: Parameters concerned, numbered within the model; of a ``compute``, those it reads; of copies, the saved
            tensors, or chunks of states in the order in which they step.
        sizes: Bytes per parameter: gathered, or of its whole gradient; of copies, per tensor or chunk.
        region: Name of the region that a ``compute`` runs, or that a ``gather_now`` is for.
        made: Of a group of gradients, the region that makes each; () means the last one before. Of a ``reduce_now``,
            () means that its result is read, too, so that the instruction stays.
        values: Of a group of gradients, the names of the reduced ones among `Program.values`.
    """

    op: Operation
    ids: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    region: str = ""
    made: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @classmethod
    def group(cls, op: Operation, sizes: Mapping[int, int]) -> Instruction:
        """Returns an `op` of a group of parameters."""
        return cls(op, tuple(sizes), tuple(sizes.values()))

    @functools.cached_property
    def traits(self) -> Traits:
        """Its row of the table of instructions."""
        return TABLE[self.op]

    @functools.cached_property
    def size_of(self) -> dict[int, int]:
        """Bytes by parameter."""
        return dict(zip(self.ids, self.sizes, strict=True))

    def only(self, ids: Container[int]) -> Instruction:
        """Returns the same for those of its parameters that are among `ids`; it has no parameters if none is."""
        some = {i: size for i, size in self.size_of.items() if i in ids}
        return self if len(some) == len(self.ids) else Instruction.group(self.op, some)

    def without(self, ids: Container[int]) -> Instruction:
        """Returns the same for those of its parameters that are not among `ids`."""
        some = {i: size for i, size in self.size_of.items() if i not in ids}
        return self if len(some) == len(self.ids) else Instruction.group(self.op, some)

    def part(self, places: Sequence[int]) -> Instruction:
        """Returns the same for those of its gradients that are at these places in it."""
        ids, sizes = tuple(self.ids[k] for k in places), tuple(self.sizes[k] for k in places)
        made, values = (tuple(column[k] for k in places if column) for column in (self.made, self.values))
        return replace(self, ids=ids, sizes=sizes, made=made, values=values)

    @property
    def functional(self) -> bool:
        """True if it blocks for a region or its gradients, as lowering writes it: the first pass replaces it."""
        return self.traits.effect[0] == "launch and wait" and bool(self.region or self.made)

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of all its parameters."""
        return sum(self.sizes)

    @functools.cached_property
    def text(self) -> str:
        """The operation, and the numbers of its parameters."""
        return f"{self.op} {self.ids}"


@dataclass(frozen=True)
class Schedule:
    """The schedule of one program.

    Args:
        name: The program's name.
        kind: The program's kind.
        frame: Number of the captured graph that it belongs to; a forward and its backward program share it.
        instructions: The instructions, in the order in which the host issues them.
        kept: Parameters that a forward schedule leaves gathered, or that a backward schedule finds gathered.
        saved: Saved tensors that may leave the device between the two.
        content: Key of what the program computes and communicates, equal on all ranks and in every run.
        structure: The same without what its regions compute: programs for other shapes share it.
    """

    name: str
    kind: ProgramKind
    frame: int
    instructions: tuple[Instruction, ...]
    kept: tuple[int, ...] = ()
    saved: tuple[Saved, ...] = ()
    content: str = ""
    structure: str = ""

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Numbers of the saved tensors that a forward schedule leaves, or a backward schedule finds, on the host."""
        op: Operation = "offload" if self.kind == "forward" else "reload"
        return tuple(sorted(i for copy in self.groups(op) for i in copy.ids))

    @property
    def waits_for_states(self) -> bool:
        """True if it waits for optimizer states that leave the device."""
        return any(instruction.traits.effect == ("wait", "states") for instruction in self.instructions)

    @functools.cached_property
    def reductions(self) -> dict[int, Instruction]:
        """Groups of gradients by position, each with the regions that make them."""
        return {position: replace(group, made=made) for position, group, made in self._reduced()}

    @functools.cached_property
    def waiting(self) -> list[int]:
        """Bytes of gradients that wait for those of later regions, at each instruction."""
        changes = [0] * (len(self.instructions) + 1)
        made = {self.instructions[position].region: position for position in self.at("compute")}
        for position, group, makers in self._reduced():
            for maker, size in zip(makers, group.sizes, strict=True):
                changes[made.get(maker, -1) + 1] += size
            changes[position] -= group.bytes
        return list(itertools.accumulate(changes[:-1]))

    def _reduced(self) -> Iterator[tuple[int, Instruction, tuple[str, ...]]]:
        """Yields the position of each group of gradients, the group, and the region that makes each of them."""
        last = ""
        for position, instruction in enumerate(self.instructions):
            last = instruction.region or last
            if instruction.op in REDUCTIONS:
                yield position, instruction, instruction.made or (last,) * len(instruction.ids)

    def at(self, op: Operation) -> list[int]:
        """Positions of the instructions `op`."""
        return [i for i, instruction in enumerate(self.instructions) if instruction.op == op]

    def groups(self, op: Operation = "gather") -> list[Instruction]:
        """The instructions `op`, in order."""
        return [instruction for instruction in self.instructions if instruction.op == op]

    def drop(self, op: Operation, ids: Container[int]) -> Schedule:
        """Returns a copy in which no `op` concerns `ids`; an `op` without other parameters is left out.

        Args:
            op: A gather, or an operation of `RELEASES`.
            ids: Parameters.
        """
        parts = (i.without(ids) if i.op == op else i for i in self.instructions)
        return self.with_instructions(i for i in parts if i.op != op or i.ids)

    def keep(self, ids: Collection[int]) -> Schedule:
        """Returns a copy of a forward schedule that leaves parameters gathered: their last release is left out.

        Args:
            ids: Parameters that it gathers. The backward schedule of the same frame finds them if `kept` says so.
        """
        left, result = set(ids), []
        for instruction in reversed(self.instructions):
            if instruction.op == "release":
                last = left.intersection(instruction.ids)
                left -= last
                instruction = instruction.without(last)
            if instruction.op != "release" or instruction.ids:
                result.append(instruction)
        return self.with_instructions(reversed(result), kept=tuple(sorted({*self.kept, *ids})))

    def with_instructions(self, instructions: Iterable[Instruction], **changes: Any) -> Schedule:
        """Returns a copy that runs `instructions`."""
        return replace(self, instructions=tuple(instructions), **changes)


def first_gather_positions(instructions: Sequence[Instruction]) -> list[int]:
    """Positions of the gathers that come before the first wait."""
    effects = enumerate(instruction.traits.effect for instruction in instructions)
    before = itertools.takewhile(lambda pair: pair[1] != ("wait", "parameters"), effects)
    return [position for position, effect in before if effect == ("launch", "parameters")]


def check_schedule(schedule: Schedule) -> None:
    """Raises unless `schedule` can run: every parameter is gathered and waited for before it is read, and released.

    Parameters that a forward program left gathered do not count: a backward program names all that it reads in gathers
    of its own, which find the parameter there and send nothing. So a schedule is valid whatever ran before it.

    Raises:
        ScheduleError: Names the instruction and the parameter.
    """
    gathered: set[int] = set()
    waited: set[int] = set()
    for_region: set[int] = set()
    for position, instruction in enumerate(schedule.instructions):
        where = f"{schedule.name}, instruction {position} ({instruction.op} {instruction.region or instruction.ids})"
        ids = set(instruction.ids)
        traits = instruction.traits
        match traits.effect:
            case "launch", "parameters":
                gathered |= ids
            case "wait", "parameters":
                if missing := ids - gathered:
                    raise ScheduleError(f"{where}: parameters {sorted(missing)} were not gathered before.")
                waited |= ids
            case "launch and wait", "parameters" if instruction.region:
                for_region = ids
            case "compute", _:
                if missing := ids - (waited & gathered) - for_region:
                    raise ScheduleError(
                        f"{where}: parameters {sorted(missing)} are read but not gathered and waited for."
                    )
                for_region = set()
            case "free", "parameters":
                if traits.at_boundary and schedule.kind != "backward":
                    raise ScheduleError(f"{where}: only backward programs know whether the optimizer steps next.")
                gathered -= ids
                waited -= ids
            case _, "states" if traits.in_forward != (schedule.kind == "forward"):
                raise ScheduleError(
                    f"{where}: states are waited for in forward programs, and fetched in backward programs."
                )
    check_copies(schedule)
    _check_reductions(schedule)
    expected = set(schedule.kept) if schedule.kind == "forward" else set()
    if gathered != expected:
        raise ScheduleError(
            f"{schedule.name} ends with parameters {sorted(gathered)} gathered, and should with {sorted(expected)}: "
            "release them after their last use, or name them in `kept`."
        )


def _check_reductions(schedule: Schedule) -> None:
    computed = {""}  # the maker of a gradient that is an input
    ended = False
    for position, instruction in enumerate(schedule.instructions):
        computed.add(instruction.region)
        ended |= instruction.traits.effect[0] == "end"
        if instruction.op not in REDUCTIONS:
            continue
        where = f"{schedule.name}, instruction {position} ({instruction.op} {instruction.ids})"
        if ended:
            raise ScheduleError(f"{where}: backward has ended before it.")
        makers, names = instruction.made, instruction.values
        if {len(makers), len(names)} - {0, len(instruction.ids)}:
            raise ScheduleError(f"{where}: {len(instruction.ids)} gradients cannot come from {makers} as {names}.")
        if missing := set(instruction.made) - computed:
            raise ScheduleError(f"{where}: gradients are computed later, by {sorted(missing)}.")


def check_copies(schedule: Schedule) -> None:
    """Raises unless every saved tensor is copied after it is made, waited for, and back before it is read.

    Raises:
        ScheduleError: Names the instruction and the tensor.
    """
    saved = {one.number: one for one in schedule.saved}
    region = {schedule.instructions[position].region: position for position in schedule.at("compute")}
    forward = schedule.kind == "forward"
    started: dict[int, int] = {}
    waited: set[int] = set()
    for position, instruction in enumerate(schedule.instructions):
        if instruction.op not in COPIES:
            continue
        where = f"{schedule.name}, instruction {position} ({instruction.op} {instruction.ids})"
        if instruction.traits.in_forward not in (None, forward):
            raise ScheduleError(f"{where}: only {'backward' if forward else 'forward'} programs do that.")
        for number in instruction.ids:
            if number not in saved:
                raise ScheduleError(f"{where}: there is no saved tensor {number} that could be copied.")
            if instruction.traits.effect[0] == "wait":
                if number not in started or number in waited:
                    raise ScheduleError(f"{where}: tensor {number} is not being copied.")
                waited.add(number)
                first = region[saved[number].first]
                if not forward and first < position:
                    raise ScheduleError(f"{where}: tensor {number} is read before, by {saved[number].first}.")
                continue
            if number in started:
                raise ScheduleError(f"{where}: tensor {number} is copied twice.")
            if forward and region[saved[number].first] > position:
                raise ScheduleError(f"{where}: tensor {number} is computed later, by {saved[number].first}.")
            started[number] = position
    if missing := started.keys() - waited:
        raise ScheduleError(f"{schedule.name}: nothing waits for the copies of tensors {sorted(missing)}.")
