"""The memory that gradient shards live in: flat buffers, filled by the runtime, empty between optimizer steps."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_deepcompile import compat

if TYPE_CHECKING:
    from lightning_deepcompile.capture.sharding import ShardedParameter

__all__ = ["GradBuffer"]


@dataclass(eq=False, repr=False)
class GradBuffer:
    """One flat buffer and the parameters whose gradient shards lie in it.

    The runtime frees and allocates its memory as a whole (the storage is resized), and overwrites it when a new
    accumulation starts. A gradient that a user keeps must not change or vanish by that, so a buffer that somebody else
    still refers to is left to them and replaced by a fresh one.

    Args:
        flat: The buffer, in the parameters' dtype.
        parameters: Those that have a place in it.
    """

    flat: Tensor
    parameters: list[ShardedParameter] = field(default_factory=list)
    _own_uses: int = 0

    def add(self, parameter: ShardedParameter) -> None:
        """Gives `parameter` its place: sets its ``grad_padded``, ``grad_local`` and ``grad_dtensor``."""
        layout = parameter.layout
        piece = self.flat[parameter.grad_offset : parameter.grad_offset + layout.shard_numel]
        parameter.grad_padded = piece.view(layout.shard_shape)
        parameter.grad_local = parameter.grad_padded.narrow(0, 0, parameter.local.shape[0])
        parameter.grad_dtensor = parameter.distribute(parameter.grad_local)
        parameter.grad_buffer = self
        if parameter not in self.parameters:
            self.parameters.append(parameter)

    def settle(self) -> None:
        """Call when all parameters are added and registered: from now on, further references are somebody else's."""
        self._own_uses = compat.storage_uses(self.flat)

    def is_held(self) -> bool:
        """Whether anybody but this package refers to the memory, except as the present ``.grad`` of a parameter."""
        if self.flat.untyped_storage().nbytes() == 0:
            return False  # given back; whoever held it then has the memory that was there
        # Views of the memory count as uses of the storage; the tensors that we hand out are counted as objects: the
        # counted references are the attribute and getrefcount's own argument.
        return compat.storage_uses(self.flat) > self._own_uses or any(
            sys.getrefcount(p.grad_dtensor) > 2
            or sys.getrefcount(p.grad_local) > 2
            or sys.getrefcount(p.grad_dtensor._local_tensor) > 2
            for p in self.parameters
            if p.dtensor.grad is None
        )

    def renew(self, runtime: Any) -> None:
        """Leaves the memory to whoever holds it and takes a fresh buffer, without values."""
        self.flat = torch.empty_like(self.flat)
        for parameter in self.parameters:
            self.add(parameter)
            runtime.update_param_grad_buffer(parameter.ds_id, parameter.grad_padded)
        self.settle()
