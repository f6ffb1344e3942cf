"""Finds out which states the class of an optimizer makes: their bytes before the first step, and their form."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_deepcompile.sharding.composite import is_composite
from lightning_deepcompile.step.optimizers import bytes_of_states
from lightning_deepcompile.step.specimens import Copy, OperationRecord, watched
from lightning_deepcompile.step.ways import is_elementwise

__all__ = ["makes_composites", "pack_states", "predict_state_bytes"]

_log = logging.getLogger(__name__)


def predict_state_bytes(optimizer: Optimizer, shapes: Mapping[Tensor, tuple[int, ...]]) -> int | None:
    """Returns the bytes of the states that steps on tensors of such shapes make; None if that cannot be predicted.

    Args:
        optimizer: The optimizer, which does not change.
        shapes: Shapes of the tensors in place of its parameters. Others are left out.
    """
    stepped = _step_without_memory(optimizer, shapes)
    return None if stepped is None else bytes_of_states(stepped.optimizer)


def makes_composites(optimizer: Optimizer) -> bool:
    """Returns whether steps on tensors of its parameters' shapes make states that consist of several tensors.

    Args:
        optimizer: The optimizer, which does not change.
    """
    shapes = {p: tuple(p.shape) for group in optimizer.param_groups for p in group["params"]}
    stepped = None if is_elementwise(optimizer) else _step_without_memory(optimizer, shapes)
    return stepped is not None and any(
        is_composite(value) for parameter in shapes for value in _made(stepped, parameter).values()
    )


def pack_states(optimizer: Optimizer, shapes: Mapping[Tensor, tuple[int, ...]]) -> int:
    """Gives states that were loaded as plain numbers the form in which the class keeps them, such as quantised.

    Checkpoints hold plain numbers where other strategies saved states of ranks' rows, or a tool converted them.

    Args:
        optimizer: Its states are replaced.
        shapes: Shapes of the tensors that it steps on, by parameter.

    Returns:
        The number of states that were replaced.
    """
    shapes = {p: shape for p, shape in shapes.items() if optimizer.state.get(p)}
    loaded = [value for p in shapes for value in optimizer.state[p].values()]
    if is_elementwise(optimizer) or any(map(is_composite, loaded)):  # the latter are of this class
        return 0
    stepped, count = _step_without_memory(optimizer, shapes), 0
    for parameter, shape in shapes.items() if stepped is not None else ():
        assert stepped is not None
        entries = optimizer.state[parameter]
        names = [
            name
            for name, form in _made(stepped, parameter).items()
            if is_composite(form) and isinstance(value := entries.get(name), Tensor) and value.shape == form.shape
        ]
        if names:
            made = _made(_step(optimizer, {parameter: shape}, entries[names[0]].device), parameter)
            entries.update({name: made[name].copy_(entries[name]) for name in names})
            count += len(names)
    return count


def _made(stepped: Copy, parameter: Tensor) -> dict[str, Any]:
    return stepped.optimizer.state.get(stepped.tensors[parameter], {})


def _step_without_memory(optimizer: Optimizer, shapes: Mapping[Tensor, tuple[int, ...]]) -> Copy | None:
    try:
        return _step(optimizer, shapes, torch.device("meta"))
    except Exception as error:  # it does what cannot be done without values
        _log.debug("The states of %s are not predicted: %s", type(optimizer).__name__, error)
        return None


def _step(optimizer: Optimizer, shapes: Mapping[Tensor, tuple[int, ...]], device: torch.device) -> Copy:
    """Returns a copy of the optimizer that has stepped once on tensors of zeros, with gradients of zeros."""
    tensors = {p: torch.zeros(shape, dtype=p.dtype, device=device, requires_grad=True) for p, shape in shapes.items()}

    def set_gradients() -> None:
        for tensor in tensors.values():
            tensor.grad = torch.zeros_like(tensor)

    own = Copy(optimizer, tensors)
    for group in own.optimizer.param_groups:  # kernels of the same arithmetic take tensors without memory
        group.update({name: False for name in ("fused", "capturable") if group.get(name)})
    with watched(torch.device("cpu") if device.type == "meta" else device, OperationRecord()):
        own.step(set_gradients, torch.tensor(1.0))
    return own
