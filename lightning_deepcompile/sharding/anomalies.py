"""Names the module in whose backward pass PyTorch's anomaly detection found a NaN."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from lightning_deepcompile.sharding.layout import ParamSpec


class Anomalies:
    """Records how far a backward pass has come, during anomaly detection."""

    def __init__(self) -> None:
        self._differentiated = ""  # the module whose backward pass began last

    def mark(self, module: nn.Module, spec: ParamSpec, result: Any) -> None:
        """Registers hooks by which a backward pass records that it has reached the end of `module`.

        Args:
            module: The module.
            spec: Of one of its parameters.
            result: What its call returned.
        """
        label = f"{spec.name.rpartition('.')[0]!r} ({type(module).__name__}, in the block {spec.block!r})"
        held_weakly = weakref.ref(self)

        def differentiate(_: Any) -> None:
            if (anomalies := held_weakly()) is not None:
                anomalies._differentiated = label

        def mark(tensor: Any) -> Any:
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(differentiate)
            return tensor

        fx.node.map_aggregate(result, mark)

    def error(self, error: BaseException) -> BaseException | None:
        """Returns the error for an anomaly that PyTorch found in a backward pass; None for any other error."""
        label, self._differentiated = self._differentiated, ""
        if not (isinstance(error, RuntimeError) and torch.is_anomaly_enabled() and "returned nan values" in str(error)):
            return None
        rank, near = (dist.get_rank() if dist.is_initialized() else 0), ""
        if label:
            near = f" It belongs to the module {label}, or to what comes between that module and those before it."
        return RuntimeError(
            f"A gradient became NaN on rank {rank} (`detect_anomaly`): {error}{near} The warning above shows the "
            "line that called the operation in the forward pass."
        )
