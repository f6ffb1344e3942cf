"""Converts states of an optimizer between the form that users see and the form that its class steps on.

A state of a parameter's shape is a `ShardedTensor`, as a gradient is: indices, means and norms are those of one
process. While groups step on shards, it is this rank's rows, a plain tensor of the same memory; while they step on
DTensors, it has PyTorch's class.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_deepcompile import compat
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.sharded_tensor import ShardedTensor
from lightning_deepcompile.step.counters import counters
from lightning_deepcompile.step.dtensor_steps import replicated


class ShownStates:
    """Converts states to DTensors and back; one for each optimizer.

    Args:
        ranks: The ranks among which parameters are sharded. On one, states stay plain tensors: rows are those of the
        parameter.
        before_use: Called before states that may be in host memory are read; None: they are on the device.
    """

    def __init__(self, ranks: Ranks, before_use: Callable[[], None] | None = None) -> None:
        self._ranks, self._before_use = ranks, before_use
        # DTensors of states that a class updates in place, by parameter and name; for other states they would be stale.
        self._kept: dict[tuple[ShardedParameter, str], ShardedTensor] = {}
        self._last: dict[tuple[ShardedParameter, str], weakref.ref[Tensor]] = {}
        self._replaced: set[tuple[ShardedParameter, str]] = set()
        self._templates: dict[tuple[ShardedParameter, torch.dtype], DTensor] = {}
        self._counters: set[str] = set()

    def learn(self, states: Iterable[tuple[ShardedParameter, Mapping[str, Any]]]) -> None:
        """Looks which states are counters of one element; call before `show` where a parameter has one element.

        Args:
            states: The states of all parameters, as this rank's rows.
        """
        self._counters |= counters((parameter.local.shape, entries) for parameter, entries in states)

    def hide(self, parameter: ShardedParameter, entries: dict[str, Any]) -> None:
        """Replaces DTensors by this rank's rows.

        Args:
            parameter: The parameter.
            entries: By name; changed in place.
        """
        for name, value in entries.items():
            if isinstance(value, DTensor):
                of_parameter = value.shape == parameter.dtensor.shape and name not in self._counters
                same = of_parameter and value.placements == self._ranks.placements
                if same:
                    entries[name] = compat.local_of(value)
                else:
                    entries[name] = parameter.rows(value) if of_parameter else compat.full_tensor(value)
                if self._before_use is not None and isinstance(value, ShardedTensor) and same:
                    self._kept[parameter, name] = value  # for this step: host buffers are not kept longer
            elif isinstance(value, Tensor) and self._is_full(parameter, name, value):
                entries[name] = parameter.rows(value).clone()  # set by a user

    def show(self, parameter: ShardedParameter, entries: dict[str, Any]) -> None:
        """Replaces this rank's rows by tensors of the same memory for users; arguments as of `hide`."""
        if self._ranks.shards == 1:
            return
        shape = parameter.local.shape
        for name, value in entries.items():
            if type(value) is DTensor:
                ShardedTensor.of(value)
            elif isinstance(value, Tensor) and value.shape == shape and not isinstance(value, DTensor):
                if name in self._counters:
                    continue
                entries[name] = self._shown(parameter, name, value)

    def forget_hidden(self) -> None:
        """Frees host memory of states that a step dropped; call when its states are shown."""
        if self._before_use is not None:
            self._kept.clear()

    def show_all(self, parameter: ShardedParameter | None, entries: dict[str, Any]) -> None:
        """Makes all states DTensors of PyTorch's class: for groups that step on DTensors.

        Args:
            parameter: The parameter; None if it is not sharded.
            entries: By name; changed in place.
        """
        if parameter is not None:
            for name, value in entries.items():
                if isinstance(value, Tensor) and self._is_full(parameter, name, value):
                    entries[name] = parameter.distribute(parameter.rows(value).clone())
            self.show(parameter, entries)
        for name, value in entries.items():
            if isinstance(value, ShardedTensor):
                ShardedTensor.undone(value)
            replicates = isinstance(value, Tensor) and (value.dim() > 0 or parameter is None)
            if replicates and not isinstance(value, DTensor):
                entries[name] = replicated(value, self._ranks)

    def hide_replicated(self, entries: dict[str, Any]) -> None:
        """Replaces DTensors of a parameter that is not sharded by plain tensors; arguments as of `hide`."""
        for name, value in entries.items():
            if isinstance(value, DTensor):
                entries[name] = compat.full_tensor(value)

    def _is_full(self, parameter: ShardedParameter, name: str, value: Tensor) -> bool:
        full = value.dim() > 0 and value.shape == parameter.dtensor.shape and value.shape != parameter.local.shape
        return full and name not in self._counters and not isinstance(value, DTensor)

    def _shown(self, parameter: ShardedParameter, name: str, rows: Tensor) -> ShardedTensor:
        key = parameter, name
        kept = self._kept.get(key)
        if kept is not None and compat.local_of(kept) is rows:
            return kept
        shown = ShardedTensor.of(self._distributed(parameter, rows), self._before_use)
        if self._before_use is not None:
            return shown
        if kept is not None:
            del self._kept[key]
            self._replaced.add(key)
        elif key in self._last and self._last[key]() is rows and key not in self._replaced:
            self._kept[key] = shown
        self._last[key] = weakref.ref(rows)
        return shown

    def _distributed(self, parameter: ShardedParameter, rows: Tensor) -> DTensor:
        key = parameter, rows.dtype
        if key not in self._templates:
            # Without memory: states in host memory stay there.
            empty = torch.empty(rows.shape, dtype=rows.dtype, device="meta")
            self._templates[key] = parameter.distribute(empty)
        return compat.with_local(self._templates[key], rows)
