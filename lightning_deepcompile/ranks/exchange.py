"""What processes ask each other: all decide alike as they know the same, and what fails on one rank fails on all."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["AnyRank", "attempt", "exchange", "raise_together"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


def exchange(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank of `group` passes, by rank; a collective, at setup or at an optimizer-step boundary.

    Args:
        mine: What this rank passes.
        group: The ranks; None: all that there are, or this one alone before they know of each other.
    """
    size = group.size() if group is not None else dist.get_world_size() if dist.is_initialized() else 1
    if size == 1:
        return [mine]
    everybody: list[Any] = [None] * size
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
    """Asks whether things are so on any rank, as often as every batch.

    Hosts ask each other, past the devices: a collective of devices would wait for a place among what they compute, and
    a host that waits for it is as late with the next step.

    Args:
        group: Of the ranks' CPUs.
        *questions: What is asked, for errors: "whether ...".
    """

    def __init__(self, group: dist.ProcessGroup, *questions: str) -> None:
        self._group, self._questions = group, questions

    def ask(self, *mine: bool) -> Callable[[], list[bool]]:
        """Asks all questions at once. Call on all ranks.

        Args:
            *mine: To each question, this rank's answer.

        Returns:
            A function that waits for the other ranks' hosts, and returns to each question whether it is so on any.

        Raises:
            RuntimeError: If another rank has failed; so does what is returned.
        """
        if self._group.size() == 1:
            return lambda: list(mine)
        answers = torch.tensor(mine, dtype=torch.int32, device="cpu")
        with self._naming():
            asked = dist.all_reduce(answers, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> list[bool]:
            with self._naming():
                asked.wait()
            return [bool(answer) for answer in answers.tolist()]

        return wait

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"Asking the other ranks {' and '.join(self._questions)} failed on rank {self._group.rank()} of "
                f"{self._group.size()}: {error} If another rank failed, look at its error first."
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
    failures = exchange(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RuntimeError(f"{action} failed on rank {rank}: {failure}")
