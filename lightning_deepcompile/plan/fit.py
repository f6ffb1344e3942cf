"""Decides with which moves a step fits into memory: the cheapest that suffice, and none where it fits as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_deepcompile.plan.budget import MemoryBudgetError
from lightning_deepcompile.plan.settings import Rounding
from lightning_deepcompile.program.printer import exact_bytes, format_bytes

Kind = Literal["gathers", "activations", "copies", "states", "parameters", "losses", "checkpoints", "operators", "mlps"]

PRICES: Mapping[Kind, float] = {
    "gathers": 0,  # they may hide all the same
    "losses": 0,  # 8192 tokens, 32 768 classes: no more time in 8 chunks
    "activations": 1,  # out and in, beside compute
    "copies": 1.5,  # compute waits for them
    "operators": 2,
    "checkpoints": 3,
    "states": 4,  # out and in, while the optimizer steps
    "mlps": 5,  # a third of their time
    "parameters": 6,  # in for every gather, and with the states
}
"""The order of moves by the time that a byte takes; of a measured step seconds are known (`plan.fit_measured`)."""

_WORDS: Mapping[Kind, str] = {
    "gathers": "parameters gathered right before their use",
    "activations": "saved tensors in host memory",
    "copies": "saved tensors in host memory, copied at once",
    "states": "optimizer states in host memory",
    "parameters": "parameters in host memory",
    "losses": "losses in chunks",
    "checkpoints": "all checkpointed blocks recomputed",
    "operators": "cheap operators recomputed",
    "mlps": "feed-forward layers in chunks",
}


_ADVICE = " Raise the budget to at least that, or use a smaller batch, more ranks, or activation checkpointing."


@dataclass(frozen=True)
class Move:
    """One way to need less memory of the device.

    Args:
        kind: Which way.
        units: Bytes that it frees, in the order in which they go; each goes altogether or stays. Empty: only another
            trace of the step tells.
        rounds: Whether last bits of results change.
        moments: The moments of a step at which it frees them; None: all.
        slots: How many units at a time need memory of the device when any has gone, each as large as the largest.
        least: Fewest bytes of a slot.
        most: Most bytes of all slots; None: as many as there are.
        at: The moment at which slots are needed; "": all.
    """

    kind: Kind
    units: tuple[int, ...] = ()
    rounds: bool = False
    moments: frozenset[str] | None = None
    slots: int = 0
    least: int = 0
    most: int | None = None
    at: str = ""

    def frees(self, moment: str, size: int, largest: int) -> int:
        """Returns the bytes that are free at a moment when so much has gone, and the largest unit of it is so large."""
        freed = size if self.moments is None or moment in self.moments else 0
        if size and self.at in ("", moment):
            slots = self.slots * max(self.least, largest)
            freed -= slots if self.most is None else min(slots, self.most)
        return freed


@dataclass(frozen=True)
class Need:
    """Bytes that a step needs.

    Args:
        moments: At the moments of a step that may need the most, by name.
        moves: All that is allowed to need less, but for permission to change last bits.
    """

    moments: Mapping[str, int]
    moves: tuple[Move, ...] = ()

    def peak(self, moved: Sequence[Moved] = ()) -> int:
        """Returns the most bytes at a time when so much has been moved."""
        return max((size - _freed(moved, moment) for moment, size in self.moments.items()), default=0)


@dataclass(frozen=True)
class Moved:
    """A move, as far as it is made.

    Args:
        move: The move.
        gone: Indices of its units that go.
    """

    move: Move
    gone: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of these units."""
        return sum(self.move.units[index] for index in self.gone)

    def frees(self, moment: str) -> int:
        """Returns the bytes that are free at a moment for it."""
        return self.move.frees(moment, self.bytes, max((self.move.units[index] for index in self.gone), default=0))


@dataclass(frozen=True)
class MemoryPlan:
    """The moves with which a step fits, or all there are where it does not.

    Args:
        room: Bytes that may be allocated.
        needed: Bytes of the step as it is.
        peak: Bytes with the moves.
        moved: The moves that are made.
        retrace: A move of which only another trace tells what it frees: it is made first, and the decision again.
        least: Bytes with all moves whose units are known.
        reason: Why these moves are made, where it is not for `numbers`.
    """

    room: int
    needed: int
    peak: int
    moved: tuple[Moved, ...] = ()
    retrace: Kind | None = None
    least: int = 0
    reason: str = ""

    @property
    def fits(self) -> bool:
        """True if the step fits with these moves, as far as is known."""
        return self.peak <= self.room

    def bytes(self, kind: Kind) -> int:
        """Returns the bytes that a kind of move takes off the device."""
        return sum(one.bytes for one in self.moved if one.move.kind == kind)

    def gone(self, kind: Kind) -> tuple[int, ...]:
        """Returns the indices of the units that a kind of move takes off the device."""
        return next((one.gone for one in self.moved if one.move.kind == kind), ())

    @property
    def words(self) -> str:
        """The moves that are made, in words."""
        return ", ".join(f"{_WORDS[one.move.kind]} ({format_bytes(one.bytes)})" for one in self.moved)

    @property
    def numbers(self) -> str:
        """The needed and the available bytes, as a clause."""
        return f"{format_bytes(self.needed)} are needed, and {format_bytes(self.room)} may be allocated"

    @property
    def why(self) -> str:
        """The reason, as a clause."""
        return self.reason or self.numbers

    def describe(self, kind: Kind) -> str:
        """Returns how much a kind of move takes off the device and why; "" if nothing."""
        every = sum(sum(one.move.units) for one in self.moved if one.move.kind == kind)
        size = self.bytes(kind)
        return f"{format_bytes(size)} of {format_bytes(every)} of {_WORDS[kind]}: {self.why}" if size else ""

    def __str__(self) -> str:
        """The decision in one sentence."""
        if self.retrace is not None:
            return f"{self.numbers}: {_WORDS[self.retrace]}."
        if not self.moved:
            return f"{self.numbers}: nothing is moved."
        return f"{self.numbers}: {self.words}."

    def check(self, chosen: object, note: str = _ADVICE) -> None:
        """Raises where nothing fits and the user has chosen the budget; of a default one nobody is sure.

        Args:
            chosen: ``CompileConfig.memory_budget``; None if it is the default.
            note: What to do.

        Raises:
            MemoryBudgetError: States the least budget that would do.
        """
        if not self.fits and self.retrace is None and chosen is not None:
            done = f"With {self.words} a" if self.moved else "A"
            raise MemoryBudgetError(
                f"CompileConfig(memory_budget={chosen!r}) allows {exact_bytes(self.room)}. {done} step still "
                f"needs {exact_bytes(self.least)}.{note}"
            )


def fit(need: Need, room: int, rounding: Rounding) -> MemoryPlan:
    """Chooses the cheapest moves with which a step fits; none where it fits as it is, and all where nothing does.

    Moves that change last bits come after all others have failed (``"needed"``), or by their price (``"any"``). Of
    those whose sizes are not known, one is made at a time: the step is traced with it, and the decision is made again.

    Args:
        need: The same on all ranks, as is the answer.
        room: Bytes that may be allocated.
        rounding: Permission to change last bits.
    """
    needed = need.peak()
    allowed = sorted((m for m in need.moves if rounding != "same" or not m.rounds), key=lambda m: PRICES[m.kind])
    unknown = [m for m in allowed if not m.units and m.rounds]
    known = [m for m in allowed if m.units]
    moved: list[Moved] = []
    for move in known:
        if need.peak(moved) <= room:
            break
        if rounding == "any" and unknown and PRICES[unknown[0].kind] < PRICES[move.kind]:
            return MemoryPlan(room, needed, need.peak(moved), tuple(moved), unknown[0].kind, need.peak(_all(known)))
        _make(need, moved, move, room)
    plan = MemoryPlan(room, needed, need.peak(moved), tuple(moved), least=need.peak(_all(known)))
    return plan if plan.fits or not unknown else replace(plan, retrace=unknown[0].kind)


def move_all(need: Need, room: int, reason: str) -> MemoryPlan:
    """Returns the decision to make all moves, because settings say so.

    Args:
        need: All of whose moves have units.
        room: Bytes that may be allocated.
        reason: Why.
    """
    moved = tuple(_all(need.moves))
    peak = need.peak(moved)
    return MemoryPlan(room, need.peak(), peak, moved, least=peak, reason=reason)


def _all(moves: Iterable[Move]) -> list[Moved]:
    return [Moved(move, tuple(range(len(move.units)))) for move in moves]


def _make(need: Need, moved: list[Moved], move: Move, room: int) -> None:
    """Makes a move as far as it takes: units in their order, but the last one as small as would do."""
    rest = list(range(len(move.units)))
    taken = _Taken(move, {moment: size - _freed(moved, moment) for moment, size in need.moments.items()})
    gone: list[int] = []
    best, lowest = 0, taken.peak(0)  # more may be worse: larger units need larger slots
    while rest and (excess := taken.peak(0) - room) > 0:
        sizes = move.units
        enough = [k for k in rest if excess <= sizes[k] <= sizes[rest[0]] and taken.peak(sizes[k]) <= room]
        chosen = min(enough, key=sizes.__getitem__) if enough else rest[0]
        rest.remove(chosen)
        gone.append(chosen)
        taken.take(sizes[chosen])
        if taken.peak(0) < lowest:
            best, lowest = len(gone), taken.peak(0)
    if best:
        moved.append(Moved(move, tuple(gone[:best])))


def _freed(moved: Iterable[Moved], moment: str) -> int:
    return sum(one.frees(moment) for one in moved)


@dataclass
class _Taken:
    """The units of a move that have gone so far.

    Args:
        move: The move.
        before: Bytes at every moment without it.
        bytes: Of these units.
        largest: Bytes of the largest.
    """

    move: Move
    before: Mapping[str, int]
    bytes: int = 0
    largest: int = 0

    def peak(self, more: int) -> int:
        """Returns the peak with another unit of so many bytes; 0: without."""
        freed, largest = self.bytes + more, max(self.largest, more)
        return max(size - self.move.frees(moment, freed, largest) for moment, size in self.before.items())

    def take(self, size: int) -> None:
        """Takes a unit."""
        self.bytes, self.largest = self.bytes + size, max(self.largest, size)
