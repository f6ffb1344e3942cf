"""What is printed where a training fails: the user's own lines, and who failed first.

An error passes through a hundred lines of loops and wrappers on its way out of a step, on every rank. And where one
rank fails, the others fail at what they would have communicated with it: those errors say nothing of the cause.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import TracebackType

import lightning
import torch
import torch.distributed as dist

__all__ = ["Failures", "failure_key", "shorten"]

_LIBRARIES = tuple(
    os.path.dirname(str(file)) + os.sep for file in (torch.__file__, lightning.__file__, Path(__file__).parent)
)
# As processes tell each other: of gloo's and NCCL's errors PyTorch passes some on as plain RuntimeErrors.
_COMMUNICATION = re.compile(r"gloo|nccl|process group|connection (closed|reset)|broken pipe|communicat", re.IGNORECASE)


class Failures:
    """Lets ranks know which of them failed first.

    Args:
        store: Key-value store shared by the ranks.
        rank: This rank.
        prefix: Makes the key unique to one engine.
    """

    def __init__(self, store: dist.Store, rank: int, prefix: str) -> None:
        self._store = store
        self._rank = rank
        self._key = failure_key(prefix)

    def explain(self, error: BaseException) -> None:
        """Call before communication is ended: tells others of `error`; where it follows from another's, it says so.

        Args:
            error: What this rank fails with. If it is one of communication, and another rank has failed before, its
                message becomes a line with that rank's error, and its traceback goes.
        """
        mine = f"rank {self._rank}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        try:
            first = self._store.compare_set(self._key, "", mine).decode()
        except (RuntimeError, dist.DistError):  # whoever kept the store has ended, and cannot be asked
            return
        if first != mine and _is_of_communication(error):
            error.args = (f"Rank {self._rank} was left alone. The error of the rank that failed first, {first}",)
            error.__cause__, error.__suppress_context__ = None, True
            error.__traceback__ = None


def failure_key(prefix: str) -> str:
    """Under which the first error of any rank is kept."""
    return f"{prefix}/failure"


def shorten(error: BaseException) -> None:
    """Takes the lines of Lightning, PyTorch and this package that led to the user's last own one out of a traceback.

    What that line called stays: if it fails in a library, that is where to look. An error without a line of the user's
    stays as it is.

    Args:
        error: Is being handled.
    """
    frames: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    own = [index for index, entry in enumerate(frames) if not _is_of_library(entry.tb_frame.f_code.co_filename)]
    if not own:
        return
    kept = [frames[index] for index in own] + frames[own[-1] + 1 :]
    for entry, following in zip(kept, [*kept[1:], None], strict=True):
        entry.tb_next = following
    error.__traceback__ = kept[0]


def _is_of_communication(error: BaseException) -> bool:
    if isinstance(error, dist.DistError | TimeoutError):
        return True
    return type(error) is RuntimeError and _COMMUNICATION.search(str(error)) is not None


def _is_of_library(file: str) -> bool:
    generated = file.startswith("<") and not file.startswith("<ipython")
    return generated or file.startswith(_LIBRARIES)
