"""Exchanges values between processes: all ranks decide alike from them, and an error on one rank is raised on all.

`exchange` makes as many objects on every rank as there are ranks, and is for rare use. The cost of `maxima`, `alike`,
`on_any` and `from_first` does not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from lightning_deepcompile import compat

_log = logging.getLogger(__name__)

T = TypeVar("T")


def exchange(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the values that the ranks of `group` pass, by rank; a collective, at setup or an optimizer-step boundary.

    Args:
        mine: What this rank passes.
        group: The ranks; None: all ranks, or this one alone before the default group exists.
    """
    size = _size(group)
    if size == 1:
        return [mine]
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, mine, group=group)
    return everybody


def maxima(mine: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Returns the largest of the ranks' numbers, place by place; a collective.

    Args:
        mine: This rank's; as many on every rank. Negated ones give the least. Integers up to 2^53 are exact.
        group: As of `exchange`.
    """
    if _size(group) == 1 or not mine:
        return list(mine)
    numbers = torch.tensor(mine, dtype=torch.float64, device=compat.device_of_objects(group))
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return cast(list[float], numbers.tolist())


def on_any(mine: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Returns whether `mine` is true on any rank; a collective."""
    return maxima([float(mine)], group)[0] > 0


def alike(mine: str, group: dist.ProcessGroup | None = None) -> bool:
    """Returns whether all ranks pass the same text; a collective that sends a digest."""
    number = number_of(mine)
    most, least = maxima([float(number), -float(number)], group)
    return most == -least


def number_of(text: str) -> int:
    """A digest of 53 bits, which any number type of a collective holds."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") >> 3


def from_first(mine: T, group: dist.ProcessGroup | None = None) -> T:
    """Returns the value that the first rank of `group` passes; a collective."""
    if _size(group) == 1:
        return mine
    box: list[Any] = [mine if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return cast(T, box[0])


def _size(group: dist.ProcessGroup | None) -> int:
    return group.size() if group is not None else dist.get_world_size() if dist.is_initialized() else 1


def attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """Returns the result of `work`, or its error: if one rank raised alone, the others would wait for it."""
    try:
        return work(), ""
    except Exception as error:
        _log.debug("failed", exc_info=True)
        return None, f"{type(error).__name__}: {error}"


class Asked(Generic[T]):
    """A pending question to the ranks' hosts; calling it waits for the answers.

    Args:
        wait: Waits, and returns the answers; called until it has returned once.
        is_there: Whether they are there.
    """

    def __init__(self, wait: Callable[[], T], is_there: Callable[[], bool] = lambda: True) -> None:
        self._wait, self.is_there = functools.cache(wait), is_there

    def __call__(self) -> T:
        """Returns the answers."""
        return self._wait()


class AnyRank:
    """Asks whether things are so on any rank, or for the largest of the ranks' numbers; cheap enough for every batch.

    The hosts communicate, not the devices: a device's collective would queue behind its compute, and a host that waits
    for it is late with the next step by as much.

    Args:
        group: Of the ranks' CPUs.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def ask(self, *mine: int) -> Asked[list[int]]:
        """Sends this rank's answers to all questions. Call on all ranks.

        Args:
            *mine: To each question, this rank's answer.

        Returns:
            To each question the greatest answer, to wait for.

        Raises:
            RuntimeError: If another rank has failed; the returned object raises it, too.
        """
        if self._group.size() == 1:
            return Asked(lambda: list(mine))
        answers = torch.tensor(mine, dtype=torch.int64, device="cpu")
        with self._naming(), compat.unrecorded():
            asked = dist.all_reduce(answers, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> list[int]:
            with self._naming():
                asked.wait()
            return list(answers.tolist())

        return Asked(wait, asked.is_completed)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"The host of rank {self._group.rank()} of {self._group.size()} waited for those of the other ranks, "
                f"and communication failed: {error} If another rank failed, look at its error first."
            ) from error


@contextlib.contextmanager
def raise_together(action: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raises on all ranks if the body raises on one. The body must contain no collectives.

    Args:
        action: What is being done, for the message on the ranks where it succeeded.
        group: A process group of all ranks; None is the default one.

    Raises:
        RuntimeError: If only other ranks failed; names the first of them and its error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = on_any(error is not None, group)
    failures = exchange(None if error is None else f"{type(error).__name__}: {error}", group) if failed else []
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RuntimeError(f"{action} failed on rank {rank}: {failure}")
