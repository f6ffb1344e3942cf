"""Runs an optimizer's step by PyTorch's function for it, on this rank's shards, without the optimizer's class.

The class looks up parameters, gradients and states one by one and collects them in lists, and for that it must hold
plain shards (`LocalShards`): with a small model that takes the host longer than the step takes the device. Here the
lists are made from known properties of the parameters, and passed to the function that the class would call with the
same arguments: no bit changes, whatever the numbers (a learning rate that changes in every step, say). The class's own
step then runs with empty groups, so that hooks run as usual.

If programs are replayed as CUDA graphs, so is a step with the same inputs as the steps before (`Steady`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.program.replay import Replays
from lightning_deepcompile.sharding.shards import ShardedModel
from lightning_deepcompile.step.local_gradients import Found, LocalGradients
from lightning_deepcompile.step.steady import Reads, Steady


@dataclass(eq=False)
class _Group:
    """The inputs of a step on one group.

    Args:
        settings: The optimizer's group.
        shards: Of its parameters that have gradients.
        gradients: Their gradients.
        states: By name, one for each of `shards`.
    """

    settings: dict[str, Any]
    shards: list[Tensor]
    gradients: list[Tensor]
    states: dict[str, list[Tensor]]


class DirectStep:
    """Steps in place of one optimizer's class.

    Args:
        optimizer: One that `of` accepts; its groups hold the module's parameters.
        model: The sharded model.
        replays: Records and replays steps; None: no replay.
    """

    def __init__(self, optimizer: Optimizer, model: ShardedModel, replays: Replays | None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._gradients = LocalGradients(model)
        self._steady = Steady(f"{type(optimizer).__name__}.step", replays, self._step)
        self._groups: list[dict[str, Any]] | None = None  # the optimizer's own groups, while it holds empty ones

    @classmethod
    def of(cls, optimizer: Optimizer, model: ShardedModel, replays: Replays | None) -> DirectStep | None:
        """Returns a direct step for `optimizer`, which then gets a closure; None unless it is PyTorch's Adam or SGD."""
        return cls(optimizer, model, replays) if compat.has_functional_step(optimizer) else None

    def begin(self) -> bool:
        """Steps, and leaves the optimizer with groups without parameters.

        Returns:
            Whether it stepped; if not, run the class's own step, which creates states and handles every case.
        """
        optimizer, steady = self._held(), self._steady
        found = self._gradients.of(p for group in optimizer.param_groups for p in group["params"])
        groups = self._look(found)
        if groups is None:
            steady.forget()
            return False
        if steady.may_record and not self._counts_on_device():
            steady.refuse("it counts on the host: fused=True counts on the device")
        numbers, tensors = self._settings()
        steady.run(groups, numbers if found.are_own else None, lambda: _reads(groups, found, tensors))
        if steady.replayed:
            torch.autograd.graph.increment_version([shard for group in groups for shard in group.shards])
        self._groups = optimizer.param_groups
        optimizer.param_groups = [{**group, "params": []} for group in self._groups]
        return True

    @property
    def stepped(self) -> bool:
        """True if this object has done the step under way."""
        return self._groups is not None

    def restore(self) -> None:
        """Restores the optimizer's own groups."""
        if self._groups is not None:
            self._held().param_groups, self._groups = self._groups, None

    def _look(self, found: Found) -> list[_Group] | None:
        """Returns the inputs of a step; None if the class must step itself."""
        optimizer = self._held()
        if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            return None
        each = zip(found.parameters, found.sharded, found.gradients, strict=True)
        groups: list[_Group] = []
        for settings in optimizer.param_groups:
            names = compat.names_of_states(optimizer, settings)
            if names is None:
                return None
            shards: list[Tensor] = []
            gradients: list[Tensor] = []
            entries: list[dict[str, Any]] = []
            for _ in settings["params"]:
                parameter, one, gradient = next(each)
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    return None
                shards.append(parameter if one is None else one.local)
                gradients.append(gradient)
                if names:
                    entries.append(optimizer.state.get(parameter, {}))  # which makes one for whoever asks otherwise
            states: dict[str, list[Any]] = {}
            for name in names:
                column = [entry.get(name) for entry in entries]
                if set(map(type, column)) - {Tensor}:
                    column = [compat.local_of(value) if isinstance(value, DTensor) else value for value in column]
                    if set(map(type, column)) - {Tensor}:
                        return None  # the class creates missing states, and only it can handle others
                states[name] = column
            groups.append(_Group(settings, shards, gradients, states))
        return groups

    def _settings(self) -> tuple[list[Any], list[Tensor]]:
        """The options of the groups: numbers, and tensors, whose values are read on the device."""
        optimizer = self._held()
        numbers: list[Any] = []
        tensors: list[Tensor] = []
        for group in optimizer.param_groups:
            for name in optimizer.defaults:
                value = group[name]
                for one in value if isinstance(value, tuple | list) else (value,):
                    (tensors if isinstance(one, Tensor) else numbers).append(one)
        return numbers, tensors

    def _counts_on_device(self) -> bool:
        optimizer = self._held()
        return type(optimizer) is SGD or all(g["fused"] or g["capturable"] for g in optimizer.param_groups)

    def _step(self, groups: list[_Group]) -> None:
        for group in groups:
            if group.shards:
                compat.functional_step(self._held(), group.settings, group.shards, group.gradients, group.states)

    def _held(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # it is stepping
        return optimizer


def _reads(groups: list[_Group], found: Found, tensors: list[Tensor]) -> Reads:
    tensors = list(tensors)
    for group in groups:
        tensors += group.shards
        for column in group.states.values():
            tensors += column
    # The places of gradients, with missing ones, and of tensors, which `.data = ...` changes.
    places = [*found.places, *(tensor.data_ptr() for tensor in tensors), *(len(group.shards) for group in groups)]
    return Reads(tensors, places)
