"""Ranks compare their programs before the first run: a different order of collectives would hang or mix up data.

And they exchange what they measured, so that all decide the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_deepcompile.program.program import Program, collective_sequence

__all__ = ["Agreement", "AnyRank", "ProgramMismatchError", "attempt", "exchange"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


def exchange(mine: T, group: dist.ProcessGroup) -> list[T]:
    """What every rank of `group` passes, by rank; a collective, at setup or at an optimizer-step boundary."""
    if group.size() == 1:
        return [mine]
    everybody: list[Any] = [None] * group.size()
    dist.all_gather_object(everybody, mine, group=group)
    return everybody


def attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """What `work` returns, or its error: a rank that failed alone would leave the others waiting for it."""
    try:
        return work(), ""
    except Exception as error:
        _log.debug("failed", exc_info=True)
        return None, f"{type(error).__name__}: {error}"


class AnyRank:
    """Asks whether something is so on any rank, as often as every batch.

    Hosts ask each other, past the devices: a collective of devices would wait for a place among what they compute, and
    a host that waits for it is as late with the next step.

    Args:
        group: Of the ranks' CPUs.
        question: What is asked, for errors: "whether ...".
    """

    def __init__(self, group: dist.ProcessGroup, question: str) -> None:
        self._group, self._question = group, question

    def __call__(self, mine: bool) -> bool:
        """Asks, and waits for the other ranks' hosts. Call on all ranks.

        Args:
            mine: Whether it is so on this one.

        Raises:
            RuntimeError: If another rank has failed.
        """
        return self.ask(mine)()

    def ask(self, mine: bool) -> Callable[[], bool]:
        """As a call, but what is returned waits for the answer."""
        if self._group.size() == 1:
            return lambda: mine
        answer = torch.tensor(mine, dtype=torch.int32, device="cpu")
        with self._naming():
            asked = dist.all_reduce(answer, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> bool:
            with self._naming():
                asked.wait()
            return bool(answer)

        return wait

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"Asking the other ranks {self._question} failed on rank {self._group.rank()} of "
                f"{self._group.size()}: {error} If another rank failed, look at its error first."
            ) from error


class ProgramMismatchError(RuntimeError):
    """Ranks compiled programs with different collectives."""


class Agreement:
    """Compares programs over the rendezvous store, without collectives, when a new order of collectives appears.

    A rank that meets a new shape recompiles alone; as long as its new program communicates like one that was agreed on,
    it need not wait for anybody.

    Args:
        store: Key-value store shared by the ranks.
        rank: This rank.
        world_size: Number of ranks.
        timeout: How long to wait for another rank's program.
        prefix: Makes keys unique to one strategy.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta, prefix: str) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._prefix = prefix
        self._agreed: set[str] = set()
        self._rounds = 0

    def check(self, program: Program) -> None:
        """Raises unless all ranks are about to run a program with the same collectives.

        Args:
            program: The program about to run for the first time.

        Raises:
            ProgramMismatchError: Names a rank whose program differs, and the first differing collective.
            TimeoutError: Names a rank that runs no new program within the timeout.
        """
        sequence = collective_sequence(program)
        if not sequence or self._world_size == 1:
            return
        # Without the name: ranks that meet other shapes at a time have other numbers in their programs' names.
        text = "\n".join([f"{program.kind} program", *(f"{kind} {ids}" for kind, ids in sequence)])
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest in self._agreed:
            return
        key = f"{self._prefix}/program{self._rounds}"
        self._rounds += 1
        self._store.set(f"{key}/{self._rank}", text)
        for other in range(self._world_size):
            theirs = self._read(f"{key}/{other}", program, other)
            if theirs != text:
                raise ProgramMismatchError(self._explain(program, text, theirs, other))
        self._agreed.add(digest)

    def forget(self) -> None:
        """Compares every program again; call on all ranks between the same two steps, when programs are swapped."""
        self._agreed.clear()

    def _read(self, key: str, program: Program, other: int) -> str:
        try:
            self._store.wait([key], self._timeout)
        except (RuntimeError, dist.DistError) as error:
            raise TimeoutError(
                f"Rank {self._rank} compiled {program.name!r} with a new order of collectives; rank {other} did not do "
                f"so within {self._timeout}. Ranks must take the same path through the model: look for conditions on "
                "the rank or on its data."
            ) from error
        return self._store.get(key).decode()

    def _explain(self, program: Program, mine: str, theirs: str, other: int) -> str:
        pairs = zip([*mine.splitlines(), "nothing"], [*theirs.splitlines(), "nothing"], strict=False)
        here, there = next(pair for pair in pairs if pair[0] != pair[1])
        names = {info.ds_id & 0xFFFFFFFF: info.name for info in program.params.values()}
        return (
            f"Rank {self._rank} and rank {other} would run different programs for {program.name!r}. First difference: "
            f"`{_named(here, names)}` on rank {self._rank}, `{_named(there, names)}` on rank {other}. Ranks must take "
            "the same path through the model, with the same plan: look for conditions on the rank or on its data."
        )


def _named(line: str, names: dict[int, str]) -> str:
    kind, _, ids = line.partition(" (")
    numbers = [int(part) for part in ids.strip(")").split(",") if part.strip().isdigit()]
    shown = ", ".join(names.get(n, str(n)) for n in numbers[:4])
    return f"{kind} {shown}{', ...' if len(numbers) > 4 else ''}".strip()
