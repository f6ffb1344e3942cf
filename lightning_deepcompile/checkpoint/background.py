"""Saves while training goes on: the state is copied to the host, and a thread writes the copy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_deepcompile.checkpoint.file import KEPT
from lightning_deepcompile.sharding.composite import copied

_log = logging.getLogger(__name__)


@torch.no_grad()
def copy_to_host(state: Any) -> Any:
    """Returns a nested state with copies on the CPU of all its tensors; DTensors stay DTensors."""

    def copy(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return copied(tensor, "cpu")
        host = cast(DTensor, torch.empty_like(tensor.detach(), device="cpu"))
        host.to_local().copy_(tensor.to_local())
        return host

    return apply_to_collection(state, Tensor, copy)


class BackgroundSaves:
    """Runs actions one after another in a thread; on every rank the same writes, so they may communicate.

    They have a process group of their own: collectives of two threads in one group would be taken for each other.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._group: dist.ProcessGroup | None = None
        self._failed = False  # a write failed since `finish`

    def __reduce__(self) -> tuple[Any, ...]:
        return BackgroundSaves, ()  # a copy has nothing to write

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the actions; the first use is a collective."""
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        return self._group

    def write(self, action: Callable[..., None], *args: Any) -> None:
        """Runs `action` after the actions before it."""

        def run() -> None:
            try:
                action(*args)
            except BaseException:
                self._failed = True
                raise

        self._submit(run)

    def remove(self, path: str | os.PathLike[str], action: Callable[[str | os.PathLike[str]], None]) -> None:
        """Runs ``action(path)`` once the writes before it have succeeded; if one fails, `path` is kept."""

        def run() -> None:
            if self._failed:
                _log.warning(KEPT, os.fspath(path))
            else:
                action(path)

        self._submit(run)

    def _submit(self, run: Callable[[], None]) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deepcompile-save")
        self._pending.append(self._executor.submit(run))

    def finish(self) -> None:
        """Waits for all actions.

        Raises:
            Exception: The first that an action raised. Actions must fail on all ranks alike.
        """
        pending, self._pending = self._pending, []
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
        self._failed = False
        for future in pending:
            future.result()
