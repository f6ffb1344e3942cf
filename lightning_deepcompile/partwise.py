"""An optimizer that steps part by part, so that gathers of what it has stepped on run while it steps on the rest."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.offload.chunks import Chunk, GroupChanges
from lightning_deepcompile.offload.probe import probe_states

__all__ = ["PartwiseStep", "can_step_partwise"]


def can_step_partwise(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether steps on parts of the parameters are one step on all: true of torch's own element-wise optimizers.

    Args:
        optimizer: Before its first step.
        device: Where its parameters are.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False  # a class of a user's own may count its steps, or look at all gradients
    try:
        probe_states(optimizer, device)
    except ValueError:
        return False
    return True


class PartwiseStep:
    """Divides the steps of one optimizer.

    Args:
        optimizer: While it steps it holds this rank's plain shards.
        parts: Called before a step; the shards that step together, in order. What is in none of them comes last; no
            parts: the step is not divided.
        after_part: Called with a part's number when the kernels that step it are queued.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parts: Callable[[], Sequence[set[Tensor]]],
        after_part: Callable[[int], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._parts = parts
        self._after_part = after_part
        self._chunks: list[Chunk] = []  # of the step under way
        self._current = 0
        self._last = 0  # parts
        self._changes: GroupChanges | None = None

    @property
    def stepping(self) -> bool:
        """Whether a step is under way, so that calls of `step` are parts of it."""
        return self._changes is not None

    @torch.no_grad()
    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Steps all parts but the last, and leaves the optimizer with the last one's parameters.

        Args:
            *args: Arguments of the optimizer's `step`, without a closure.
            **kwargs: Its keyword arguments.
        """
        parts = self._parts()
        if not parts:
            return
        optimizer = self._held()
        self._chunks = _chunks(optimizer, parts)
        self._last = len(parts)
        self._current = 0
        self._changes = GroupChanges(optimizer)
        with compat.unhooked_step(optimizer) as step:
            for _ in self._chunks[1:]:
                self._enter()
                step(optimizer, *args, **kwargs)
                self._leave()
        self._enter()

    @torch.no_grad()
    def finish(self) -> None:
        """Ends a step whose last part has been stepped."""
        if self._changes is None:
            return
        self._leave()
        self._changes.apply()
        self.restore()

    def restore(self) -> None:
        """Gives the optimizer its own groups back."""
        if self._changes is None:
            return
        self._held().param_groups = self._changes.groups
        self._changes = None
        self._chunks = []

    def _enter(self) -> None:
        assert self._changes is not None
        self._held().param_groups = self._chunks[self._current].narrow(self._changes.groups)

    def _leave(self) -> None:
        optimizer, number = self._held(), self._current
        assert self._changes is not None
        self._changes.add(self._chunks[number], optimizer.param_groups, type(optimizer).__name__)
        self._current += 1
        if number < self._last:
            self._after_part(number)

    def _held(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # it is stepping
        return optimizer


def _chunks(optimizer: Optimizer, parts: Sequence[set[Tensor]]) -> list[Chunk]:
    number = {parameter: index for index, part in enumerate(parts) for parameter in part}
    chunks = [Chunk([[] for _ in optimizer.param_groups], visits=False) for _ in range(len(parts) + 1)]
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            chunks[number.get(parameter, len(parts))].params[index].append(parameter)
    return chunks if any(chunks[-1].params) else chunks[:-1]
