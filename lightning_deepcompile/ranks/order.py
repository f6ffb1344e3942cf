"""Ranks take the same path through a step: other collectives, or in another order, would hang or mix up data.

A path is what communicates in a step, one after another: programs, parameters that uncompiled code reads, the step's
end. What all ranks have met at a place before, none compares again while it is the only way to go on. Where there are
several, as one follows from the data, hosts ask each other each time. What is new is compared over the rendezvous
store, without collectives; a rank that has gone on the usual way meanwhile says so from a thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from lightning_deepcompile import compat
from lightning_deepcompile.ranks.exchange import alike, exchange
from lightning_deepcompile.ranks.failures import STORE_GONE, failure_key
from lightning_deepcompile.ranks.lookout import Lookout

__all__ = ["Agreement", "ProgramMismatchError"]

_END = "the end of the step"
_ASK_SECONDS = 2.0
"""How often a rank that waits for the others looks where they are, and others look whether one waits."""
_PAUSE_SECONDS = 2e-4
"""Between two questions to the store, for each rank that asks it."""


class ProgramMismatchError(RuntimeError):
    """Ranks would run programs with different collectives."""


class _Place:
    """A place in a step, and what all ranks have gone on to from there."""

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next: dict[str, _Place] = {}


@compat.never_frames
class Agreement:
    """Compares the ranks' paths.

    A rank that meets a new shape recompiles alone; as long as its new program communicates like the one that was agreed
    on, it need not wait for anybody.

    Args:
        store: Key-value store shared by the ranks.
        rank: This rank.
        world_size: Number of ranks.
        timeout: How long to wait for another rank.
        prefix: Makes keys unique to one strategy.
        group: Of the ranks' CPUs, for what is asked in every step; without one, that goes over the store, too.
        names: Parameter names by their local ids, for errors.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        prefix: str,
        group: dist.ProcessGroup | None = None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._prefix = prefix
        self._group = group
        self._names = names or {}
        self._steps: dict[str, _Place] = {}
        self._place: _Place | None = None
        self._at = (0, 0)  # steps begun, and how far this one has come: one tuple, as a thread reads it
        self._rounds = 0
        self._waits = False
        self._lookout: Lookout | None = None

    def begin(self, name: str) -> None:
        """Call when a step begins, on all ranks.

        Args:
            name: The step's: all ranks are in the same one, as the trainer's loops see to that.

        Raises:
            ProgramMismatchError: If other ranks have not come to the end of the one before.
            TimeoutError: As `check`.
        """
        if self._world_size == 1:
            return
        if self._lookout is None:
            self._lookout = Lookout(self.tell, _ASK_SECONDS, "paths")
        self.end()
        self._at = (self._at[0] + 1, 0)
        self._place = self._steps.setdefault(name, _Place())

    def end(self) -> None:
        """Ends the step, if one has begun; call on all ranks. Raises as `begin`."""
        if self._place is not None:
            self._go_on(_END)
            self._place = None

    @property
    def compares_end(self) -> bool:
        """Returns whether the next `begin` compares the end of the last step with other ranks'; the same on all."""
        return self._place is not None and set(self._place.next) != {_END}

    def check(self, signature: str) -> None:
        """Raises unless all ranks are about to run a program with the same collectives.

        Args:
            signature: What the program about to run communicates, one collective a line; empty: nothing.

        Raises:
            ProgramMismatchError: Names a rank that goes on otherwise, and the first differing collective.
            TimeoutError: Names a rank that does not come to this place within the timeout.
        """
        if signature and self._world_size > 1:
            self._go_on(signature)

    def check_uncompiled(self, kind: str, ids: list[int]) -> None:
        """Does so for what code outside of programs is about to communicate.

        Args:
            kind: ``"gather"`` or ``"reduce"``.
            ids: Local ids of the parameters.
        """
        if self._world_size > 1:
            self._go_on(f"code that was not compiled\n{kind} {tuple(ids)}")

    def passed(self) -> None:
        """Call on all ranks where a step can be seen to have gone on: another rank may wait for this one behind it."""
        self._at = (self._at[0], self._at[1] + 1)

    def forget(self) -> None:
        """Compares everything again; call on all ranks between the same two steps, when programs are swapped."""
        self._steps.clear()
        self._place = None

    def rest(self) -> None:
        """Ends the thread; call when there are no more steps for now."""
        if self._lookout is None:
            return
        self._lookout.end()
        self._lookout = None
        with contextlib.suppress(RuntimeError, dist.DistError):  # the store has ended, and so has who would look
            self._say_where()  # to a rank that is not that far, and is going to ask

    def _go_on(self, text: str) -> None:
        place = self._place = self._place or _Place()
        if len(place.next) > 1 and self._group is not None:
            self._ask(text, self._group)
        elif text not in place.next or len(place.next) > 1:
            self._meet(text, place)
        self._place = place.next.setdefault(text, _Place())
        self.passed()

    def _ask(self, text: str, group: dist.ProcessGroup) -> None:
        if not alike(text, group):
            everybody = exchange(text, group)
            other = next(rank for rank, theirs in enumerate(everybody) if theirs != text)
            raise self._mismatch(text, everybody[other], other)

    def _meet(self, text: str, place: _Place) -> None:
        """Compares a digest with that of the rank that was first; texts are there of that rank and of one that differs.

        However many ranks there are, each asks the store the same few things while it is not kept waiting.
        """
        key = f"{self._prefix}/round{self._rounds}"
        self._waits = True
        try:
            self._store.set(f"{key}/asked", "")
            self._store.set(f"{key}/{self._rank}", "")
            mine = f"{self._rank} {text}"
            first = self._told(self._store.compare_set(f"{key}/first", "", mine))
            if first[1] != text:
                self._store.compare_set(f"{key}/differs", "", mine)
                raise self._mismatch(text, first[1], first[0])
            if self._store.add(f"{key}/alike", 1) == self._world_size:
                self._store.set(f"{key}/all", "")
            self._wait_for_all(key, text, place)
            # The first rank's process may serve the store, and end with this step: the others hear first.
            if self._store.add(f"{key}/heard", 1) == self._world_size:
                self._store.set(f"{key}/over", "")
            if self._rank == 0:
                self._appears(f"{key}/over", f"{key}/differs", _ASK_SECONDS)
        finally:
            self._rounds += 1
            self._waits = False

    def _wait_for_all(self, key: str, text: str, place: _Place) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            left, differs, other = deadline - time.monotonic(), b"", self._rank
            try:
                if self._appears(f"{key}/all", f"{key}/differs", min(left, _ASK_SECONDS)):
                    return
                if self._store.check([f"{key}/differs"]):
                    differs = self._store.get(f"{key}/differs")
                other = self._first_missing(key)
                failed, gone_on = self._store.check([failure_key(self._prefix)]), self._has_gone_on(key, other)
            except (RuntimeError, dist.DistError) as error:
                raise self._left(text, STORE_GONE) from error
            if differs:
                other, theirs = self._told(differs)
                raise self._mismatch(text, theirs, other)
            if gone_on:
                raise self._mismatch(text, next(iter(place.next), "something else"), other)
            if failed or left <= _ASK_SECONDS:
                what = "has failed" if failed else f"did not do so within {self._timeout}"
                raise self._left(text, f"rank {other} {what}.")

    def _appears(self, wanted: str, unwanted: str, seconds: float) -> bool:
        """Whether `wanted` comes in time; not if `unwanted` does.

        The store's own `wait` has the socket print a warning each time that it gives up.
        """
        deadline, pause = time.monotonic() + seconds, 0.001
        longest = max(_PAUSE_SECONDS * self._world_size, 0.02)  # all ranks ask one store
        while not self._store.check([wanted]):
            if time.monotonic() > deadline or self._store.check([unwanted]):
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def _first_missing(self, key: str) -> int:
        """The first rank that has not come, found by halves."""
        low, high = 0, self._world_size - 1
        while low < high:
            middle = (low + high) // 2
            if self._store.check([f"{key}/{rank}" for rank in range(low, middle + 1)]):
                low = middle + 1
            else:
                high = middle
        return low

    def _told(self, value: bytes) -> tuple[int, str]:
        """A rank, and what it goes on to."""
        rank, _, text = value.decode().partition(" ")
        return int(rank), text

    def _left(self, text: str, why: str) -> TimeoutError:
        return TimeoutError(
            f"Rank {self._rank} has come to `{_first(text, self._names)}`, which is new here; {why} Ranks must take "
            "the same path through the model: look for conditions on the rank or on its data, and at the other rank's "
            "error first, if there is one."
        )

    def _has_gone_on(self, key: str, other: int) -> bool:
        if not self._store.check([f"{key}/at{other}"]):
            return False
        steps, events = map(int, self._store.get(f"{key}/at{other}").split())
        return (steps, events) > self._at

    def tell(self) -> None:
        """Says where this rank is, if another one waits for it and this one does not."""
        if not self._waits and self._store.check([f"{self._prefix}/round{self._rounds}/asked"]):
            self._say_where()

    def _say_where(self) -> None:
        steps, events = self._at
        self._store.set(f"{self._prefix}/round{self._rounds}/at{self._rank}", f"{steps} {events}")

    def _mismatch(self, mine: str, theirs: str, other: int) -> ProgramMismatchError:
        pairs = zip([*mine.splitlines(), "nothing"], [*theirs.splitlines(), "nothing"], strict=False)
        here, there = (_named(line, self._names) for line in next(pair for pair in pairs if pair[0] != pair[1]))
        if mine.partition("\n")[0] != theirs.partition("\n")[0]:
            here, there = _first(mine, self._names), _first(theirs, self._names)
        return ProgramMismatchError(
            f"Rank {self._rank} and rank {other} would go on differently. First difference: `{here}` on rank "
            f"{self._rank}, `{there}` on rank {other}. Ranks must take the same path through the model, with the same "
            "plan: look for conditions on the rank or on its data, also for loops whose length follows from it. "
            "Compute such a part on all ranks, and mask what is not wanted (multiply by 0, `torch.where`)."
        )


def _first(text: str, names: Mapping[int, str]) -> str:
    kind, *collectives = text.splitlines()
    return ": ".join([kind, *(_named(line, names) for line in collectives[:1])])


def _named(line: str, names: Mapping[int, str]) -> str:
    kind, _, ids = line.partition(" (")
    numbers = [int(part) for part in ids.strip(")").split(",") if part.strip().isdigit()]
    shown = ", ".join(names.get(n, str(n)) for n in numbers[:4])
    return f"{kind} {shown}{', ...' if len(numbers) > 4 else ''}".strip()
