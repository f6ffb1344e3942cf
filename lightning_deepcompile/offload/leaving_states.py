"""Finds out which states an optimizer keeps, by letting it step on a small parameter of its own.

The same mechanism lets it step chunk by chunk: its class's `step` runs on copies of its groups that hold fewer
parameters. Optimizers for which that is not the same as one step over all are recognised here, before training starts.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_deepcompile import compat

_LARGE = 1 << 20  # bytes from which a state leaves that has not as many elements as its parameter
_SHAPE = (6, 5)  # of the small parameter; no counter or table of an optimizer has as many elements by chance

Settings = dict[str, tuple[Any, int | None]]
"""Of a parameter group: every value but the parameters, and of a tensor the number of changes in place."""


@dataclass(frozen=True)
class StateSizes:
    """Bytes that leave with each element of a parameter, by index of its group and its dtype."""

    by_group: Mapping[tuple[int, torch.dtype], int]

    def of(self, group: int, dtype: torch.dtype, elements: int) -> int:
        """Bytes for a parameter; of a group that was added later, as much as for the hungriest one known."""
        known = self.by_group.get((group, dtype), max(self.by_group.values(), default=0))
        return known * elements


def can_leave(value: Any, parameter: Tensor) -> bool:
    """Returns whether a state can wait in host memory: a plain, large tensor on the device that owns its memory.

    Args:
        value: Something in ``optimizer.state[parameter]``.
        parameter: This rank's shard.
    """
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.device == parameter.device
        and value.dim() > 0
        and value.numel() > 0
        and (value.numel() == parameter.numel() or value.nbytes >= _LARGE)
        and value.is_contiguous()
        and value.untyped_storage().nbytes() == value.nbytes
        and not value.requires_grad
    )


def settings_of(group: Mapping[str, Any]) -> Settings:
    """The settings of a group that a step may read; each chunk's step must change them alike."""
    return {
        key: (value, compat.version_of(value) if isinstance(value, Tensor) else None)
        for key, value in group.items()
        if key != "params"
    }


def changed_settings(before: Settings, group: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `group` that differ from `before`."""
    after = settings_of(group)
    return {key: value for key, (value, _) in after.items() if key not in before or _differ(before[key], after[key])}


def _differ(before: tuple[Any, int | None], after: tuple[Any, int | None]) -> bool:
    (old, old_version), (new, new_version) = before, after
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return old is not new or old_version != new_version
    return old is not new and (type(old) is not type(new) or bool(old != new))


@torch.no_grad()
def probe_states(optimizer: Optimizer, device: torch.device) -> StateSizes:
    """Lets `optimizer` step twice on a small parameter for each of its groups, and measures the states it keeps.

    Its groups, state and random numbers are what they were afterwards.

    Args:
        optimizer: Before its first step.
        device: Where its parameters are.

    Returns:
        How much of its state can leave.

    Raises:
        ValueError: For optimizers that cannot step chunk by chunk; says why.
    """
    kind = type(optimizer).__name__
    sizes: dict[tuple[int, torch.dtype], int] = {}
    own = settings_of(_attributes(optimizer))
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []), put_back(optimizer) as groups:
        for index, group in enumerate(groups):
            for dtype in {parameter.dtype for parameter in group["params"]}:
                small = torch.zeros(_SHAPE, dtype=dtype, device=device)
                small.grad = torch.zeros_like(small)
                optimizer.param_groups = [{**group, "params": [small]}]
                try:
                    with compat.unhooked_step(optimizer) as step:
                        for _ in range(2):
                            step(optimizer)
                except Exception as error:
                    raise _refusal(kind, f"it failed on a parameter of its own: {error}") from error
                sizes[index, dtype] = _leaving_bytes(optimizer, small, kind) // small.numel()
                optimizer.state.clear()
        optimizer.param_groups = [{**group, "params": []} for group in groups]
        try:
            with compat.unhooked_step(optimizer) as step:
                step(optimizer)
        except Exception as error:
            raise _refusal(kind, f"it failed on groups without parameters: {error}") from error
        changed = changed_settings(own, _attributes(optimizer))
    if changed:
        raise _refusal(kind, f"its attributes {sorted(changed)} change with every step")
    return StateSizes(sizes)


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Numbers, strings and tensors among the optimizer's attributes: a step could count in them. Flags may change."""
    kinds = int | float | str | Tensor
    return {k: v for k, v in vars(optimizer).items() if isinstance(v, kinds) and not isinstance(v, bool)}


def _leaving_bytes(optimizer: Optimizer, small: Tensor, kind: str) -> int:
    others = [key for key in optimizer.state if key is not small]
    if others:
        raise _refusal(kind, f"it keeps state that belongs to no parameter ({others[0]!r})")
    total = 0
    entries = optimizer.state[small]
    for name in list(entries):
        value = entries[name]
        if can_leave(value, small):
            total += value.nbytes
            # The entry, the local variable and the argument of getrefcount.
            if sys.getrefcount(value) > 3:
                raise _refusal(kind, f"it refers to its state {name!r} from elsewhere, too")
    return total


@contextmanager
def put_back(optimizer: Optimizer) -> Iterator[list[dict[str, Any]]]:
    """Returns a context in which an optimizer has no state, and may change: it has its own attributes afterwards."""
    before = dict(vars(optimizer))
    optimizer.state = defaultdict(dict)
    try:
        yield before["param_groups"]
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(before)


def _refusal(kind: str, reason: str) -> ValueError:
    return ValueError(
        f"CompileConfig(offload=...): {kind} cannot step on a part of its parameters at a time: {reason}. Use "
        "offload='none', or an element-wise optimizer (SGD, Adam, AdamW, ...)."
    )
