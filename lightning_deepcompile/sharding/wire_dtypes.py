"""The dtypes in which parameters and gradients travel, where a precision plugin sets them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class WireDtypes:
    """The dtypes of one sharded module.

    Args:
        gather: Dtype in which floating-point parameters are gathered and computed with; None keeps their own.
        reduce: Dtype in which gradients are reduced; None keeps the one that they are computed in.
    """

    gather: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def gathered(self, stored: torch.dtype, modules: Iterable[nn.Module]) -> torch.dtype:
        """Returns the dtype in which a parameter is gathered and computed with.

        Weights of batch norm stay in the dtype of its running statistics, as under autocast on one device: kernels take
        no others beside them.

        Args:
            stored: Dtype of its shards.
            modules: The modules that hold it.
        """
        if self.gather is None or not stored.is_floating_point:
            return stored
        statistics = (module._buffers.get("running_mean") for module in modules)
        return stored if any(s is not None and s.dtype == stored for s in statistics) else self.gather

    def reduced(self, stored: torch.dtype) -> torch.dtype | None:
        """Returns the dtype in which the gradient of a parameter is reduced; None: as it is computed.

        Args:
            stored: Dtype of its shards.
        """
        return self.reduce if stored.is_floating_point else None


AS_STORED = WireDtypes()
"""Parameters travel in their own dtypes, and gradients as they are computed."""
