"""What fails on one rank fails on all: nobody waits for a rank that has given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

__all__ = ["gather_objects", "raise_together"]


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value`, by rank; a collective of `group` (None: of all ranks)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
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
    failures = gather_objects(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RuntimeError(f"{action} failed on rank {rank}: {failure}")
