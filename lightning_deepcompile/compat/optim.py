"""Optimizers, gradient scalers, and functions of many tensors.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd
from torch.utils.hooks import RemovableHandle

__all__ = [
    "clamp",
    "counted_step",
    "functional_step",
    "has_functional_step",
    "names_of_states",
    "norms",
    "run_first_after_step",
    "scale",
    "unhooked_step",
    "unscale",
]

StepT = TypeVar("StepT", bound=Callable[..., Any])

# Optimizers with known steps, and the modules that define the steps.
_KNOWN: dict[type[Optimizer], str] = {Adam: "torch.optim.adam", AdamW: "torch.optim.adam", SGD: "torch.optim.sgd"}


def unscale(scaler: ShardedGradScaler, optimizer: Optimizer) -> None:
    """Unscales the gradients of `optimizer`, and tells all ranks whether one found a gradient that is not finite.

    PyTorch's scaler for shards keeps the answer as a vector of one element, the number of such ranks. Fused optimizers
    expect the form of PyTorch's other scaler: a scalar that is 0 or 1.
    """
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    for device, value in found.items():
        found[device] = value.reshape(()).clamp(max=1)


def run_first_after_step(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Registers a step post hook of `optimizer` that runs before the hooks that it has already."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def counted_step(step: StepT) -> StepT:
    """Marks a function that takes the place of ``optimizer.step``: schedulers neither replace it nor warn about it."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


@contextlib.contextmanager
def unhooked_step(optimizer: Optimizer) -> Iterator[Callable[..., Any]]:
    """Yields the function ``step(optimizer, ...)`` of the optimizer's class, without the hooks that it is wrapped in.

    Inside, a step of a base class that it calls runs none of the optimizer's hooks either.
    """
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def has_functional_step(optimizer: Optimizer) -> bool:
    """Returns whether `functional_step` equals the optimizer's own step; False for subclasses, which may differ."""
    kind = type(optimizer)
    return kind in _KNOWN and inspect.unwrap(kind.step).__module__ == _KNOWN[kind]


def names_of_states(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Names of the states, one for each parameter, that a step on a group uses.

    Args:
        optimizer: One that `has_functional_step`.
        group: Of its groups.

    Returns:
        The names; all of the states must exist. None if the class's own step is needed, which may refuse the group.
    """
    if group["differentiable"] or optimizer.defaults["differentiable"]:
        return None
    if type(optimizer) is SGD:
        if group["fused"] and getattr(optimizer, "_need_device_dtype_check_for_fused", True):
            return None
        return ("momentum_buffer",) if group["momentum"] != 0 else ()
    if group["foreach"] and isinstance(group["lr"], Tensor) and not group["capturable"]:
        return None
    most = ("max_exp_avg_sq",) if group["amsgrad"] else ()
    return ("exp_avg", "exp_avg_sq", "step", *most)


@torch.no_grad()
def functional_step(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: Mapping[str, list[Tensor]],
) -> None:
    """Does what the optimizer's own step does for a group.

    Args:
        optimizer: One that `has_functional_step`, without a gradient scaler's attributes.
        group: Settings.
        parameters: That have gradients.
        gradients: One for each, none of them sparse.
        states: One for each, by the `names_of_states`.
    """
    same = {name: group[name] for name in ("lr", "weight_decay", "maximize", "foreach", "fused")}
    if type(optimizer) is SGD:
        own = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
        sgd(parameters, gradients, [*states.get("momentum_buffer", ())], **same, **own)
        return
    own = {name: group[name] for name in ("amsgrad", "eps", "capturable", "differentiable", "decoupled_weight_decay")}
    beta1, beta2 = group["betas"]
    adam(
        parameters,
        gradients,
        states["exp_avg"],
        states["exp_avg_sq"],
        states.get("max_exp_avg_sq", []),
        states["step"],
        has_complex=any(map(torch.is_complex, parameters)),
        beta1=beta1,
        beta2=beta2,
        **same,
        **own,
    )


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
