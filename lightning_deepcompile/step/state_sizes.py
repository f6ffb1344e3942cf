"""Predicts the memory of optimizer states before the first step, also of states that are quantised."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_deepcompile.step.optimizers import bytes_of_states
from lightning_deepcompile.step.specimens import Copy, OperationRecord, watched

__all__ = ["predict_state_bytes"]

_log = logging.getLogger(__name__)


def predict_state_bytes(optimizer: Optimizer, shapes: Mapping[Tensor, tuple[int, ...]]) -> int | None:
    """Returns the bytes of the states that steps on tensors of such shapes make; None if that cannot be predicted.

    A copy of the optimizer steps once on tensors without memory.

    Args:
        optimizer: The optimizer, which does not change.
        shapes: Shapes of the tensors in place of its parameters. Others are left out.
    """
    tensors = {p: torch.empty(shape, dtype=p.dtype, device="meta", requires_grad=True) for p, shape in shapes.items()}

    def set_gradients() -> None:
        for tensor in tensors.values():
            tensor.grad = torch.empty_like(tensor)

    try:
        own = Copy(optimizer, tensors)
        for group in own.optimizer.param_groups:  # kernels of the same arithmetic take tensors without memory
            group.update({name: False for name in ("fused", "capturable") if group.get(name)})
        with watched(torch.device("cpu"), OperationRecord()):
            own.step(set_gradients, torch.tensor(1.0))
    except Exception as error:  # it does what cannot be done without values
        _log.debug("The states of %s are not predicted: %s", type(optimizer).__name__, error)
        return None
    return bytes_of_states(own.optimizer)
