"""Steps first on the parameters that the next step gathers first, which are gathered while the rest is stepped.

An optimizer's step is bound by memory and leaves the links idle: a forward pass that waits for its gathers can use that
time. The two parts are the class's own `step` on copies of the parameter groups, as chunks of offloaded states are.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.offload.chunks import Chunk, GroupChanges
from lightning_deepcompile.step.prefetch import StepPrefetch
from lightning_deepcompile.step.ways import is_elementwise


class HeadStart:
    """Divides the steps of one optimizer in two, if a training step follows.

    Args:
        optimizer: While it steps it holds this rank's plain shards.
        prefetch: Has the first gathers of the next step, and launches them.
    """

    needs_closure = False
    begins_without_closure = False

    def __init__(self, optimizer: Optimizer, prefetch: StepPrefetch) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._prefetch = prefetch
        self._rest: Chunk | None = None
        self._changes: GroupChanges | None = None

    @classmethod
    def of(cls, optimizer: Optimizer, prefetch: StepPrefetch) -> HeadStart | None:
        """Returns a head start for one of PyTorch's element-wise optimizers; None for others, subclasses included."""
        return cls(optimizer, prefetch) if is_elementwise(optimizer) else None

    @property
    def stepping(self) -> bool:
        """True during a step: calls of `step` are then parts of it."""
        return self._changes is not None

    @torch.no_grad()
    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Steps on the parameters that the next step gathers first, and leaves the optimizer with the rest.

        Args:
            *args: Arguments of the optimizer's `step`, without a closure.
            **kwargs: Its keyword arguments.
        """
        optimizer = self._held()
        head = self._prefetch.stepped_first()
        first, rest = (self._part(optimizer, head, inside) for inside in (True, False))
        if not any(first.params) or not any(rest.params):
            return
        self._changes, self._rest = GroupChanges(optimizer), rest
        with compat.unhooked_step(optimizer) as step:
            optimizer.param_groups = first.narrow(self._changes.groups)
            step(optimizer, *args, **kwargs)
            self._changes.add(first, optimizer.param_groups, type(optimizer).__name__)
        optimizer.param_groups = rest.narrow(self._changes.groups)
        self._prefetch.launch_in_optimizer()

    def finish(self) -> None:
        """Ends a step whose rest has been stepped."""
        if self._changes is None or self._rest is None:
            return
        optimizer = self._held()
        self._changes.add(self._rest, optimizer.param_groups, type(optimizer).__name__)
        self._changes.apply()
        self.restore()

    def restore(self) -> None:
        """Restores the optimizer's own groups."""
        if self._changes is not None:
            self._held().param_groups = self._changes.groups
            self._changes = self._rest = None

    @staticmethod
    def _part(optimizer: Optimizer, head: frozenset[Tensor], inside: bool) -> Chunk:
        return Chunk(
            [[p for p in g["params"] if (p in head) == inside] for g in optimizer.param_groups], offloaded=False
        )

    def _held(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # it is stepping
        return optimizer
