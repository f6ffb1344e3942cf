"""Finds out which states the class of an optimizer makes: their bytes before the first step, and their form."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_deepcompile.sharding.composite import is_composite, unpacked
from lightning_deepcompile.step.optimizers import bytes_of_states
from lightning_deepcompile.step.specimens import Copy, OperationRecord, watched
from lightning_deepcompile.step.ways import is_elementwise

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
    """Returns whether steps on tensors of its parameters' shapes make states that consist of several tensors."""
    shapes = {p: tuple(p.shape) for group in optimizer.param_groups for p in group["params"]}
    stepped = None if is_elementwise(optimizer) else _step_without_memory(optimizer, shapes)
    return stepped is not None and any(
        is_composite(value) for parameter in shapes for value in _made(stepped, parameter).values()
    )


def convert_states(optimizer: Optimizer, shapes: Mapping[Tensor, tuple[int, ...]]) -> int:
    """Gives loaded states the form in which the class keeps them: plain numbers, or quantised in its way.

    Checkpoints hold plain numbers where other strategies saved states of ranks' rows, or a tool converted them; and
    what another class has quantised.

    Args:
        optimizer: Its states are replaced.
        shapes: Shapes of the tensors that it steps on, by parameter.

    Returns:
        The number of states that were replaced.
    """
    shapes, count = {p: shape for p, shape in shapes.items() if optimizer.state.get(p)}, 0
    plain_class = is_elementwise(optimizer)
    stepped = None if plain_class else _step_without_memory(optimizer, shapes)
    if stepped is None and not plain_class:
        return 0
    for parameter, shape in shapes.items():
        entries = optimizer.state[parameter]
        if stepped is not None:
            forms = dict(_made(stepped, parameter))
        else:  # PyTorch's own classes keep plain numbers
            forms = {name: unpacked(value) for name, value in entries.items()}
        names = [name for name, value in entries.items() if name in forms and _differ(value, forms[name])]
        if any(is_composite(forms[name]) for name in names):
            forms |= _made(_step(optimizer, {parameter: shape}, entries[names[0]].device), parameter)
        for name in names:
            plain = unpacked(entries[name])
            entries[name] = forms[name].copy_(plain) if is_composite(forms[name]) else plain
        count += len(names)
    return count


def _differ(value: Any, form: Any) -> bool:
    """Returns whether two tensors of one shape are quantised in different ways, or only one of them is."""
    if not isinstance(value, Tensor) or not isinstance(form, Tensor) or value.shape != form.shape:
        return False
    return (is_composite(value) or is_composite(form)) and type(value) is not type(form)


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
