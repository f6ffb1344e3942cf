"""An optimizer's step as a CUDA graph: one launch in place of a call for every parameter.

The step of a small model's optimizer takes its host longer than its device: parameters, gradients and states are looked
up and put into lists before a few kernels are launched. What it reads from the host, numbers and tensors, is the same
in most steps. When it has stayed the same for a while, a step is recorded, as programs are (`Replays`), and replayed
for as long as it stays so. That changes no bit.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.program.replay import Replays
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.shards import ShardedModel

__all__ = ["OptimizerGraph"]

_log = logging.getLogger(__name__)

_STEADY = 3
"""A step is recorded when the host has said the same so often; the second time, twice as often, and so on."""

# They write to their states in place. Subclasses may do anything.
_KNOWN = frozenset({Adam, AdamW, SGD})


@dataclass(eq=False)
class _Read:
    """What a step reads from the host.

    Args:
        settings: Of each group, all but its parameters, and how many these are.
        parameters: Of all groups, one after the other.
        sharded: What each of them is; None for those that are not sharded.
        states: What the optimizer has for each, one after the other.
        places: Where shards and gradients are; 0 where there is none. A gradient itself is not kept: whether somebody
            holds it is seen by its references.
    """

    settings: list[dict[str, Any]]
    parameters: list[Tensor]
    sharded: list[ShardedParameter | None]
    states: list[Any]
    places: list[int]

    @property
    def shards(self) -> list[Tensor]:
        """Of the parameters."""
        return [p if s is None else s.local for p, s in zip(self.parameters, self.sharded, strict=True)]

    def is_like(self, other: _Read) -> bool:
        """Whether the steps that read one and the other do the same on the device."""
        return (
            self.places == other.places
            and _are(self.parameters, other.parameters)
            and _are(self.states, other.states)
            and len(self.settings) == len(other.settings)
            and all(map(_are_settings, self.settings, other.settings))
        )


class OptimizerGraph:
    """Records and replays steps of one optimizer.

    Args:
        optimizer: One that `of` takes; its groups hold the module's parameters.
        replays: Says whether programs are replayed; then gradients stay where they are.
        model: How the parameters are sharded.
        holding: In which the optimizer holds the shards.
    """

    def __init__(
        self, optimizer: Optimizer, replays: Replays, model: ShardedModel, holding: AbstractContextManager[None]
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._replays, self._model, self._holding = replays, model, holding
        self._name = f"{type(optimizer).__name__}.step"
        self._refused = False
        self._read: _Read | None = None  # by the step before
        self._steady = self._recorded = 0
        self._graph: torch.cuda.CUDAGraph | None = None  # of a step like the one before
        self._groups: list[dict[str, Any]] | None = None  # the optimizer's own, while it holds none
        replays.follow(self)

    @classmethod
    def of(
        cls, optimizer: Optimizer, replays: Replays, model: ShardedModel, holding: AbstractContextManager[None]
    ) -> OptimizerGraph | None:
        """What replays `optimizer`, which is given a closure for it; None for all but PyTorch's own Adam and SGD."""
        return cls(optimizer, replays, model, holding) if type(optimizer) in _KNOWN else None

    @property
    def begins(self) -> bool:
        """It goes along with programs."""
        return False

    def forget(self) -> None:
        """Drops the graph."""
        self._read = self._graph = None
        self._steady = 0

    def begin(self) -> bool:
        """Replays a step, and leaves the optimizer with groups without parameters.

        Returns:
            Whether it did; else the step is to be run.
        """
        read = self._look() if self._replays.enabled and self._replays.recorded and not self._refused else None
        if read is None or self._read is None or not read.is_like(self._read):
            self._read = read if read is not None and self._can_be_recorded(read) else None
            self._graph, self._steady = None, 0
            return False
        self._steady += 1
        if self._graph is None:
            if self._steady < _STEADY * (1 + self._recorded):
                return False
            try:
                self._graph = self._replays.record_alone(self._step)
            except Exception as error:
                self._refuse(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
                _log.warning("%s is not replayed as a CUDA graph, but runs as before.", self._name, exc_info=error)
                return False
            self._recorded += 1
        self._replays.launch_alone(self._graph, self._name)
        torch.autograd.graph.increment_version(read.shards)
        self._leave_nothing()
        return True

    @property
    def replayed(self) -> bool:
        """Whether the step under way was replayed."""
        return self._groups is not None

    def restore(self) -> None:
        """Gives the optimizer its own groups back."""
        if self._groups is not None:
            self._held().param_groups, self._groups = self._groups, None

    def _leave_nothing(self) -> None:
        optimizer = self._held()
        self._groups = optimizer.param_groups
        optimizer.param_groups = [{**group, "params": []} for group in self._groups]

    def _look(self) -> _Read | None:
        """What a step would read; None if it reads what is this step's alone."""
        optimizer, known = self._held(), self._read
        if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if known is not None and _are(parameters, known.parameters):
            sharded = known.sharded
        else:
            sharded = [self._model.by_parameter.get(p) for p in parameters]
        places: list[int] = []
        for parameter, one in zip(parameters, sharded, strict=True):
            gradient = parameter.grad
            if one is not None and gradient is not None:
                if gradient is not one.grad_dtensor:
                    return None  # somebody else's
                gradient = one.grad_local
            shard = parameter if one is None else one.local
            places += shard.data_ptr(), 0 if gradient is None else gradient.data_ptr()
        entries = optimizer.state.get  # it makes empty ones for whoever asks otherwise
        states = [value for p in parameters for value in entries(p, {}).values()]
        settings = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
        return _Read(settings, parameters, sharded, states, places)

    def _can_be_recorded(self, read: _Read) -> bool:
        kind, device = type(self._held()), self._replays.device
        tensors = [*read.shards, *read.states, *(v for s in read.settings for v in s.values() if isinstance(v, Tensor))]
        if any(settings["differentiable"] for settings in read.settings):
            self._refuse("it is differentiated")
        elif kind is not SGD and not all(settings["fused"] or settings["capturable"] for settings in read.settings):
            self._refuse("it counts on the host: fused=True counts on the device")
        elif not all(isinstance(t, Tensor) and t.device == device for t in tensors if t is not None):
            self._refuse("it reads what is not on the device")
        return not self._refused

    def _refuse(self, reason: str) -> None:
        self._refused = True
        self._replays.refuse(self._name, reason)

    def _step(self) -> None:
        """The class's own step."""
        optimizer = self._held()
        with self._holding, compat.unhooked_step(optimizer) as step:
            own = optimizer.param_groups
            # Fused kernels do the same whether it is set or not, but ask that it be while a graph records them.
            optimizer.param_groups = [{**g, "capturable": True} if g["fused"] else g for g in own]
            try:
                step(optimizer)
            finally:
                optimizer.param_groups = own

    def _held(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # it is stepping
        return optimizer


def _are(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _are_settings(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether they are equal; tensors are if they are the same, as their values are read on the device."""
    return left.keys() == right.keys() and all(
        v is right[k] or not (isinstance(v, Tensor) or isinstance(right[k], Tensor)) and v == right[k]
        for k, v in left.items()
    )
