"""Ensures that ranks take the same path through a step: other collectives, or another order, would hang or mix up data.

A path is what communicates in a step, one after another: programs, parameters that uncompiled code reads, the end of a
backward pass and of the step. What all ranks have met at a place before, none compares again while it is the only way
to go on. Where there are several, hosts ask each other each time, as they do where all is new. They also do so up to
the end of a step in which a rank comes to a place where it has not been with such a batch and the graphs that it has
compiled by now: from there on it may go another way than those that were there before. They need not once all ranks run
graphs of whole steps that communicate alike, backward too: nothing else follows. What is new beside a usual way all the
same is compared over the rendezvous store, without collectives; a rank that has gone on the usual way meanwhile says so
from a thread.

If the hosts find that ranks go on differently, the ranks take turns: what one of them is about to run communicates with
all others, which gather and release the same parameters, and contribute zeros for its gradients. So a step in which one
rank's sizes give it another graph (a dimension of size one is treated specially) trains as it does under DDP.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_deepcompile.ranks.exchange import exchange, maxima, number_of, on_any
from lightning_deepcompile.ranks.failures import STORE_GONE, failure_key
from lightning_deepcompile.ranks.lookout import Lookout

_log = logging.getLogger(__name__)

EXCHANGES = "exchange: "
"""Begins the lines of what a region exchanges with the same region of all other ranks: there are no turns with that."""

_END = "the end of the step"
_END_OF_BACKWARD = "the end of the backward pass"
_MOST_PLACES = 4096
"""So many are told apart by all that came before them; if there are more, by the last thing alone."""
_ASK_SECONDS = 2.0
"""How often a rank that waits for the others looks where they are, and others look whether one waits."""
_PAUSE_SECONDS = 2e-4
"""Between two questions to the store, for each rank that asks it."""
_MOST_MET = 1 << 16
"""So many turnings are remembered with the batches with which they were taken; if there are more, all are new again."""


class ProgramMismatchError(RuntimeError):
    """Ranks would run programs with different collectives."""


class _Place:
    """A place in a step, and the ways that all ranks have taken from there.

    Attributes:
        ways: The ways that any rank has taken.
        next: The place that each way led to, by the ways that different ranks took at once.
        waited_for: Whether ranks that were further on ask there for those that come to it.
    """

    __slots__ = ("next", "waited_for", "ways")

    def __init__(self, waited_for: bool = False) -> None:
        self.waited_for = waited_for
        self.ways: dict[str, None] = {}
        self.next: dict[tuple[str, ...], _Place] = {}


class Agreement:
    """Compares the ranks' paths.

    A rank with a new shape recompiles alone; as long as its new program communicates like the one that was agreed
    on, it need not wait for anybody.

    Args:
        store: Key-value store shared by the ranks.
        rank: This rank.
        world_size: Number of ranks.
        timeout: How long to wait for another rank.
        prefix: Makes keys unique to one strategy.
        group: Of the ranks' CPUs, for what is asked in every step; without one, that goes over the store, too.
        names: Parameter names by their local ids, for errors.

    Attributes:
        together: Whether all ranks were to run the same when this one was to run a program the last time.
        turns: How often ranks have gone on differently, and taken turns.
        take_part: Communicates what another rank's program, or code that is not compiled, does, by its signature; None:
            ranks that go on differently are an error.
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
        self.take_part: Callable[[str], None] | None = None
        self.turns, self.together = 0, True
        self._steps: dict[str, _Place] = {}
        self._place: _Place | None = None
        self._places = 0
        self._last: dict[tuple[str, ...], _Place] | None = None  # places by the last thing, once there are too many
        self._batch: Hashable = None  # what a batch of this step makes a rank run, as far as that is known
        self._met: set[Hashable] = set()  # what batches, and where they went on from places at which hosts ask
        self._compares_all: Callable[[], bool] | None = None  # in this step
        self._determined = False  # whether it was compared what follows in this step
        self._said = False
        self._at = (0, 0)  # steps begun, and how far this one has come: one tuple, as a thread reads it
        self._rounds = 0
        self._waits = False
        self._lookout: Lookout | None = None

    def begin(self, name: str) -> None:
        """Begins a step; call on all ranks.

        Args:
            name: The step's: all ranks are in the same one, which the trainer's loops ensure.

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
        self._compares_all = self._batch = None
        self._determined = False

    def end(self) -> None:
        """Ends the step, if one has begun; call on all ranks. Raises like `begin`."""
        if self._place is not None:
            self._go_on(_END)
            self._place = None

    @property
    def compares_end(self) -> bool:
        """Returns whether the next `begin` compares the end of the last step with other ranks'; the same on all."""
        return self._place is not None and (self._asks(self._place) or _END not in self._place.ways)

    def is_new(self, batch: Hashable) -> bool:
        """Returns whether this rank begins a step with such a batch for the first time since programs were swapped.

        Args:
            batch: What the rank's path follows from: the step, the sizes of all tensors in the batch, and which graphs
                the rank has compiled.
        """
        self._batch, new = batch, batch not in self._met
        self._remember(batch)
        return new

    def _remember(self, what: Hashable) -> None:
        if len(self._met) >= _MOST_MET:
            self._met.clear()
        self._met.add(what)

    def compare_all(self, wanted: Callable[[], bool]) -> None:
        """Makes hosts ask each other wherever this step communicates; call on all ranks, when it has begun.

        Args:
            wanted: Returns whether they shall, the same on all ranks; called when the answer is needed.
        """
        self._compares_all = functools.cache(wanted)

    def check(self, signature: str, follows: Callable[[], str] | None = None) -> Callable[[], None] | None:
        """Compares the next program with other ranks'; call on all ranks before it runs.

        Args:
            signature: The collectives of the program, one a line; empty: none.
            follows: Returns the signature of the backward program, if nothing else of the step communicates after this
                program; else an empty text.

        Returns:
            A function to call when the program has run: it takes part in the programs that other ranks run in its
                place. None:
            nothing to call.

        Raises:
            ProgramMismatchError: Names a rank that goes on otherwise, and the first differing collective.
            TimeoutError: Names a rank that does not come to this place within the timeout.
        """
        behind = self._go_on(signature, follows) if signature and self._world_size > 1 else None
        # A rank may run programs that communicate nothing where another one runs none.
        self.together = self._world_size == 1 or (bool(signature) and behind is None)
        return behind

    def check_uncompiled(self, kind: str, parameters: Sequence[tuple[int, str]]) -> Callable[[], None] | None:
        """Compares, like `check`, what code outside of programs is about to communicate.

        Args:
            kind: ``"gather"`` or ``"reduce"``.
            parameters: Local ids of the parameters, and the dtypes that they, or their gradients, have.
        """
        if self._world_size == 1:
            return None
        lines = [f"{kind} {dtype} ({number},)" for number, dtype in parameters]
        return self._go_on("\n".join([f"{kind} of code that was not compiled", *lines]))

    def check_exchange(self, signature: str) -> None:
        """Compares, like `check`, an exchange that all ranks must join: no rank can take part for another's sake."""
        if self._world_size > 1:
            self._go_on(f"{signature}\n{EXCHANGES}all ranks")

    def end_backward(self) -> None:
        """Compares the end of a backward pass; call on all ranks when it has run, before gradients are read."""
        if self._world_size > 1 and self._place is not None:
            self._go_on(_END_OF_BACKWARD)

    def passed(self) -> None:
        """Counts progress within a step, which another rank may wait to see; call on all ranks."""
        self._at = (self._at[0], self._at[1] + 1)

    def forget(self) -> None:
        """Discards all comparisons so far; call on all ranks between the same two steps, when programs are swapped."""
        self._steps.clear()
        self._met.clear()
        self._place, self._places, self._last = None, 0, None

    def rest(self) -> None:
        """Ends the thread; call when there are no more steps for now."""
        if self._lookout is None:
            return
        self._lookout.end()
        self._lookout = None
        with contextlib.suppress(RuntimeError, dist.DistError):  # the store has ended, and with it whoever would look
            self._say_where()  # to a rank that is behind, and is going to ask

    def _go_on(self, text: str, follows: Callable[[], str] | None = None) -> Callable[[], None] | None:
        place = self._place = self._place or _Place()
        behind = None
        if self._asks(place) and self._group is not None:
            behind = self._ask(text, self._group, "" if follows is None else follows())
        else:
            if text not in place.ways or len(place.ways) > 1:
                self._meet(text, place)
            self._follow(text)
        self.passed()
        return behind

    def _asks(self, place: _Place) -> bool:
        """Returns whether hosts ask each other there; the same on all ranks."""
        if place.waited_for or len(place.ways) != 1:
            return True
        if self._determined and _moment(next(iter(place.ways))) != _IN_FORWARD:
            return False
        return self._compares_all is not None and self._compares_all()

    def _follow(self, *texts: str) -> None:
        """Moves on to the next place, the same one on all ranks."""
        assert self._place is not None
        place = self._place.next.get(texts)
        if place is None:
            if self._last is None and self._places >= _MOST_PLACES:
                # Paths that depend on data, like layers that are skipped at random, hardly ever repeat.
                self._steps.clear()
                self._last = {}
            place = _Place(len(set(map(_moment, texts))) > 1)
            place = place if self._last is None else self._last.setdefault(texts, place)
            self._places += 1
            self._place.next[texts] = place
            self._place.ways.update(dict.fromkeys(texts))
        self._place = place

    def _ask(self, text: str, group: dist.ProcessGroup, follows: str = "") -> Callable[[], None] | None:
        """Hosts ask each other; where they go on differently, those that are less far go first, in turns."""
        then = float(number_of(follows)) if follows else 0.0
        while True:
            number, new = float(number_of(text)), float(self._is_first_turning(text))
            most, least, any_new, most_then, least_then = maxima([number, -number, new, then, -then], group)
            self._determined = most == -least and most_then == -least_then > 0
            if most == -least:
                self._turn(any_new > 0, text)
                return None
            everybody = exchange(text, group)
            texts = sorted(set(everybody))
            earliest = min(map(_moment, texts))
            first = [one for one in texts if _moment(one) == earliest]
            other = next(rank for rank, theirs in enumerate(everybody) if theirs != text)
            too_late = earliest == _IN_BACKWARD and _END in texts  # the optimizer has stepped there
            if self.take_part is None or too_late or any(f"\n{EXCHANGES}" in one for one in first):
                raise self._mismatch(text, everybody[other], other)
            self.turns += 1
            self._say(everybody)
            self._turn(on_any(self._is_first_turning(*texts), group), *texts)
            turn = first.index(text) if text in first else len(first)
            self._take_part_in(first[:turn])
            if turn < len(first):
                return functools.partial(self._take_part_in, first[turn + 1 :])

    def _is_first_turning(self, *texts: str) -> bool:
        """Returns whether this rank has not gone on so from this place with such a batch."""
        return self._batch is not None and (self._batch, self._place, texts) not in self._met

    def _turn(self, is_first: bool, *texts: str) -> None:
        """Goes on from a place at which hosts ask.

        Args:
            is_first: Whether a rank has not gone on so with such a batch: what it does there, nobody knows.
            *texts: What ranks go on to.
        """
        if is_first:
            self._compares_all = _always  # up to the end of the step
        if self._batch is not None:
            self._remember((self._batch, self._place, texts))
        self._follow(*texts)

    def _take_part_in(self, texts: Sequence[str]) -> None:
        assert self.take_part is not None
        for text in texts:
            self.take_part(text)

    def _say(self, everybody: Sequence[str]) -> None:
        if self._said:
            return
        self._said = True
        other = next(rank for rank, theirs in enumerate(everybody) if theirs != everybody[0])
        _log.log(
            logging.WARNING if self._rank == 0 else logging.DEBUG,
            "Rank 0 and rank %d run different programs in this step, as follows from batches of other sizes, or from "
            "conditions on the data. Ranks take turns then, each with zeros for what the others differentiate: the "
            "result is right, and the step takes as long as all of them. First difference: %s.",
            other,
            self._difference(everybody[0], everybody[other], 0, other),
        )

    def _meet(self, text: str, place: _Place) -> None:
        """Compares a digest with that of the first rank; only the first rank and one that differs store their texts.

        Each rank makes the same few requests to the store, whatever the number of ranks, while it is not kept waiting.
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
            self._clean_up(self._rounds - 1)  # nobody reads it any more: all have come to this round
            # The first rank's process may serve the store, and end with this step: the others read first.
            if self._store.add(f"{key}/heard", 1) == self._world_size:
                self._store.set(f"{key}/over", "")
            if self._rank == 0:
                self._appears(f"{key}/over", f"{key}/differs", _ASK_SECONDS)
        finally:
            self._rounds += 1
            self._waits = False

    def _clean_up(self, number: int) -> None:
        """Deletes a round's keys from the store: each rank its own, the first one the shared ones."""
        key, names = f"{self._prefix}/round{number}", [str(self._rank), f"at{self._rank}"]
        if self._rank == 0:
            names += ["asked", "first", "alike", "all", "heard", "over"]
        for name in names if number >= 0 else ():
            self._store.delete_key(f"{key}/{name}")

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
                raise self._mismatch(text, next(iter(place.ways), "something else"), other)
            if failed or left <= _ASK_SECONDS:
                what = "has failed" if failed else f"did not do so within {self._timeout}"
                raise self._left(text, f"rank {other} {what}.")

    def _appears(self, wanted: str, unwanted: str, seconds: float) -> bool:
        """Returns whether `wanted` appears in time, and before `unwanted`.

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
        """Finds the first rank that has not come, by bisection."""
        low, high = 0, self._world_size - 1
        while low < high:
            middle = (low + high) // 2
            if self._store.check([f"{key}/{rank}" for rank in range(low, middle + 1)]):
                low = middle + 1
            else:
                high = middle
        return low

    def _told(self, value: bytes) -> tuple[int, str]:
        """Returns a rank, and what it goes on to."""
        rank, _, text = value.decode().partition(" ")
        return int(rank), text

    def _left(self, text: str, why: str) -> TimeoutError:
        return TimeoutError(
            f"Rank {self._rank} has come to `{_first(text, self._names)}`, which it has not run before; {why} Ranks "
            "must take the same path through the model: look for conditions on the rank or on its data, and at the "
            "other rank's error first, if there is one."
        )

    def _has_gone_on(self, key: str, other: int) -> bool:
        if not self._store.check([f"{key}/at{other}"]):
            return False
        steps, events = map(int, self._store.get(f"{key}/at{other}").split())
        return (steps, events) > self._at

    def tell(self) -> None:
        """Tells where this rank is, if another one waits for it and this one does not."""
        if not self._waits and self._store.check([f"{self._prefix}/round{self._rounds}/asked"]):
            self._say_where()

    def _say_where(self) -> None:
        steps, events = self._at
        self._store.set(f"{self._prefix}/round{self._rounds}/at{self._rank}", f"{steps} {events}")

    def _mismatch(self, mine: str, theirs: str, other: int) -> ProgramMismatchError:
        return ProgramMismatchError(
            f"Rank {self._rank} and rank {other} would run different collectives. First difference: "
            f"{self._difference(mine, theirs, self._rank, other)}. Ranks must take the same path through the model, "
            "with the same plan: look for conditions on the rank or on its data, also for loops whose length follows "
            "from it. Compute such a part on all ranks, and mask what is not wanted (multiply by 0, `torch.where`)."
        )

    def _difference(self, mine: str, theirs: str, rank: int, other: int) -> str:
        pairs = zip([*mine.splitlines(), "nothing"], [*theirs.splitlines(), "nothing"], strict=False)
        here, there = (_named(line, self._names) for line in next(pair for pair in pairs if pair[0] != pair[1]))
        if mine.partition("\n")[0] != theirs.partition("\n")[0]:
            here, there = _first(mine, self._names), _first(theirs, self._names)
        return f"`{here}` on rank {rank}, `{there}` on rank {other}"


def _always() -> bool:
    return True


_IN_FORWARD, _IN_BACKWARD, _LATER, _LAST = range(4)


def _moment(text: str) -> int:
    """Returns when in a step a text's communication comes: gradients must be reduced in the pass of all ranks."""
    if text.startswith(("backward", "reduce")):
        return _IN_BACKWARD
    return {_END_OF_BACKWARD: _LATER, _END: _LAST}.get(text, _IN_FORWARD)


def _first(text: str, names: Mapping[int, str]) -> str:
    kind, *collectives = text.splitlines()
    return ": ".join([kind, *(_named(line, names) for line in collectives[:1])])


def _named(line: str, names: Mapping[int, str]) -> str:
    kind, _, ids = line.partition(" (")
    numbers = [int(part) for part in ids.strip(")").split(",") if part.strip().isdigit()]
    shown = ", ".join(names.get(n, str(n)) for n in numbers[:4])
    return f"{kind} {shown}{', ...' if len(numbers) > 4 else ''}".strip()
