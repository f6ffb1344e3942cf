"""Shortens the errors of a failed training to the user's own lines, and names the rank that failed first.

An error passes through a hundred lines of loops and wrappers on its way out of a step, on every rank. And if one rank
fails, the others fail in their communication with it: those errors say nothing of the cause.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from types import TracebackType

import lightning
import torch
import torch.distributed as dist

from lightning_deepcompile import compat

STORE_GONE = (
    "the process that keeps the ranks' store has gone (rank 0, or torchrun's agent on the first node): look at its "
    "error first, or whether it was killed."
)

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (*(os.path.dirname(str(file)) + os.sep for file in (torch.__file__, lightning.__file__)), _PACKAGE)
_DEFECTS = (AssertionError, AttributeError, LookupError, NameError, TypeError)  # their tracebacks are of interest
_LONGEST = 4000  # characters of an error that other ranks are told
_MOMENT = 1.0  # seconds within which ranks fail with the same error
_SILENCE = 3.0  # seconds after which a silent rank that others cannot reach is taken to hang
# PyTorch passes on some errors of gloo and NCCL as plain RuntimeErrors.
_CLOSED = re.compile(r"closed by peer|reset by peer|broken pipe", re.IGNORECASE)
_COMMUNICATION = re.compile(r"gloo|nccl|process group|connection (closed|reset)|broken pipe|communicat", re.IGNORECASE)


class Failures:
    """Tells all ranks which of them failed first.

    Args:
        store: Key-value store shared by the ranks.
        rank: This rank.
        world_size: Number of ranks.
        prefix: Makes the key unique to one engine, or to one attempt to make one.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, prefix: str) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._key = failure_key(prefix)

    @classmethod
    def of_setup(cls) -> Failures | None:
        """Returns one for errors before there is an engine; None before the process group exists. Call on all ranks."""
        if not dist.is_initialized():
            return None
        store, rank = compat.store(), dist.get_rank()
        # All ranks set up as often as this one.
        number = store.add(f"lightning_deepcompile/setups/{rank}", 1)
        return cls(store, rank, dist.get_world_size(), f"lightning_deepcompile/setup{number}")

    def note_cause(self, error: BaseException, why_alone: str = "") -> None:
        """Tells other ranks of `error`, and names its cause on another rank; call before communication ends.

        Args:
            error: This rank's error. If it is one of communication, and another rank has failed before, its message
                becomes a line with that rank's error, and its traceback is dropped. If the first rank fails with the
                same error, only the first rank prints it in full. If no rank failed with another error, the silent
                ranks are named: they are late.
            why_alone: This rank's explanation of why communication failed; the traceback, which says where, stays.
        """
        if why_alone and _is_of_communication(error):
            _replace(error, why_alone, stays=True)
        text = f"{type(error).__name__}: {str(error).strip()}"[:_LONGEST]
        mine = f"rank {self._rank}: {text}"
        try:
            self._store.set(f"{self._key}/{self._rank}", text)
            first = self._store.compare_set(self._key, "", mine).decode()
            if first == mine and _is_of_communication(error):
                silent = self._silent_ranks(gone=_CLOSED.search(text) is not None)
                self._store.set(f"{self._key}/silent", silent)
                if silent:
                    error.args = (f"{silent} This rank fails with: {str(error).strip()}",)
            elif _is_of_communication(error):
                silent = self._said("silent") if _COMMUNICATION.search(first) else ""
                text = f"Rank {self._rank} was left alone. The error of the rank that failed first, {first}"
                # If no rank failed with another error, something that this rank did alone may be the cause.
                _replace(error, f"{silent} {text}".strip(), stays=_COMMUNICATION.search(first) is not None)
            elif self._rank != 0 and self._said("0", _MOMENT) == text:
                _replace(error, f"As on rank 0, which prints it in full: {str(error).strip().partition(chr(10))[0]}")
        except (RuntimeError, dist.DistError):
            if _is_of_communication(error) and STORE_GONE not in str(error):
                error.args = (f"Rank {self._rank} was left alone: {STORE_GONE} {str(error).strip()}",)

    def _silent_ranks(self, gone: bool) -> str:
        """Returns a sentence on ranks that do not fail but that this one cannot reach; "" if there are none.

        Only the first rank that fails asks, so that not every rank looks for all others.

        Args:
            gone: Whether another process has closed a connection.
        """
        silent, deadline = [rank for rank in range(self._world_size) if rank != self._rank], time.monotonic() + _SILENCE
        while silent and time.monotonic() < deadline:
            silent = [rank for rank in silent if not self._store.check([f"{self._key}/{rank}"])]
            time.sleep(0.05)
        if not silent:
            return ""
        shown = ", ".join(map(str, silent[:8])) + (f" and {len(silent) - 8} more" if len(silent) > 8 else "")
        many = len(silent) > 1
        if gone:
            return f"{'One of the ranks' if many else 'Rank'} {shown} has gone (killed, or out of host memory?)."
        return (
            f"{'Ranks' if many else 'Rank'} {shown} {'have' if many else 'has'} not failed and said nothing since: "
            "late, hanging or dead. Look there first (`py-spy dump --pid` shows where a process is)."
        )

    def _said(self, key: str, within: float = _SILENCE + _MOMENT) -> str:
        """Returns the text that a rank stored under `key`; "" if there is none within so many seconds."""
        key, deadline = f"{self._key}/{key}", time.monotonic() + within
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.02)
        return self._store.get(key).decode()


def _replace(error: BaseException, text: str, *, stays: bool = False) -> None:
    error.args = (text,)
    error.__cause__, error.__suppress_context__ = None, True
    if not stays:
        error.__traceback__ = None


def failure_key(prefix: str) -> str:
    """The store's key for the first error of any rank."""
    return f"{prefix}/failure"


def shorten(error: BaseException) -> None:
    """Removes the lines of Lightning, PyTorch and this package before the user's last own line from a traceback.

    The calls below that line stay: if it fails in a library, that is where to look. Of an error that this package
    raises only the last line stays, as the message says what to do. An error without a line of the user's stays as it
    is.
    """
    frames: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    own = [index for index, entry in enumerate(frames) if not is_of_library(entry.tb_frame.f_code.co_filename)]
    called = frames[own[-1] + 1 :] if own else frames
    ours = bool(called) and called[-1].tb_frame.f_code.co_filename.startswith(_PACKAGE)
    if ours and not isinstance(error, _DEFECTS):
        called = called[-1:]  # raised by this package: its message says why
    elif not own:
        return
    kept = [frames[index] for index in own] + called
    for entry, following in zip(kept, [*kept[1:], None], strict=True):
        entry.tb_next = following
    error.__traceback__ = kept[0]


def _is_of_communication(error: BaseException) -> bool:
    if isinstance(error, dist.DistError | TimeoutError):
        return True
    return type(error) is RuntimeError and _COMMUNICATION.search(str(error)) is not None


def is_of_library(file: str) -> bool:
    """Returns whether `file` belongs to PyTorch, Lightning or this package, or is generated code."""
    generated = file.startswith("<") and not file.startswith("<ipython")
    return generated or file.startswith(_LIBRARIES)
