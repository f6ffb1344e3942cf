"""Optimizers, gradient scalers, and functions of many tensors.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

__all__ = ["clamp", "norms", "run_first_after_step", "scale", "unhooked_step", "unscale"]


def unscale(scaler: ShardedGradScaler, optimizer: Optimizer) -> None:
    """Unscales the gradients of `optimizer` and lets all ranks know whether one found any that is not finite.

    PyTorch's scaler for shards keeps that as a vector of one element, the number of such ranks. Fused optimizers want
    what its other scaler gives them: a scalar that is 0 or 1.
    """
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    for device, value in found.items():
        found[device] = value.reshape(()).clamp(max=1)


def run_first_after_step(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Registers a step post hook of `optimizer` that runs before those that it has already."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


@contextlib.contextmanager
def unhooked_step(optimizer: Optimizer) -> Iterator[Callable[..., Any]]:
    """Gives the function ``step(optimizer, ...)`` of the optimizer's class, without the hooks that it is wrapped in.

    Inside, a step of a base class that it calls runs none of the optimizer's hooks either.
    """
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies tensors by a 0-dim one, in place, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def clamp(tensors: list[Tensor], limit: float) -> None:
    """Keeps the elements of tensors within ``-limit`` and ``limit``, in place, in few kernels."""
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)


def norms(tensors: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """The 2-norm of each tensor, summed in `dtype`; None: in its own."""
    return list(torch._foreach_norm(tensors, 2, dtype))
