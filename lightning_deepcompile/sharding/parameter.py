"""A sharded parameter, its three forms, and the memory of its gradient's shard.

Every sharded parameter has three forms that share their memory:

* ``dtensor``: held by the module (sharded on dim 0, global shape): state dicts, summaries and users see it. It
  has a storage of its own, over the same memory.
* ``leaf``: read by graphs: a plain tensor with the padded shape, equal on all ranks, so that neither a rank nor
  a DTensor appears in any graph (a DTensor input costs guards and host time on every call).
* ``local``: seen by an optimizer's arithmetic: this rank's true rows as a plain tensor, without the padding.

That memory may be the host's, mapped into the device's address space (``csrc/memory/host_shards.h``): all three are
still tensors of the device; only code that reads or writes all of a model uses ``host``, the same memory as a CPU
tensor.

Gradient shards live in flat buffers, which the runtime fills, and which are empty between optimizer steps.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_deepcompile import compat
from lightning_deepcompile.program.program import ParamInfo
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.sharding.layout import ShardLayout
from lightning_deepcompile.sharding.sharded_tensor import ShardedTensor


@dataclass(frozen=True)
class Owner:
    """A place where a parameter is registered: a tied parameter has several."""

    path: str
    module: nn.Module
    name: str

    @property
    def fqn(self) -> str:
        """Fully qualified parameter name."""
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclass(eq=False, repr=False)
class ShardedParameter:
    """One parameter in its three forms, and the gradient shard that belongs to it (None if frozen).

    Attributes:
        hooks: Called with the parameter when its gradient is there (``register_post_accumulate_grad_hook``), in order.
        host: The memory of `local` as a CPU tensor, if it is host memory; it is on all ranks or on none.
    """

    ds_id: int
    layout: ShardLayout
    owners: tuple[Owner, ...]
    ranks: Ranks
    dtensor: nn.Parameter
    leaf: Tensor
    local: Tensor
    hooks: dict[int, Callable[[Tensor], None]] = field(default_factory=OrderedDict)
    host: Tensor | None = None
    grad_offset: int = 0
    grad_buffer: GradBuffer | None = None
    grad_padded: Tensor | None = None
    grad_local: Tensor | None = None
    grad_dtensor: Tensor | None = None

    @property
    def name(self) -> str:
        """Fully qualified name; of tied names the first."""
        return self.layout.spec.name

    @functools.cached_property
    def info(self) -> ParamInfo:
        """The properties that passes use: how it is gathered."""
        spec, gathered = self.layout.spec, self.layout.gathered_bytes * self.ranks.shards
        return ParamInfo(self.ds_id, spec.name, spec.block, gathered, spec.gather_dtype)

    @property
    def is_cast(self) -> bool:
        """True if steps compute with it in another dtype than it is stored in."""
        return self.info.dtype != self.leaf.dtype

    @property
    def in_place(self) -> bool:
        """True if the three forms still share their memory; ``module.to(...)`` gives the first one another."""
        mine = cast(DTensor, self.dtensor).to_local()
        here = mine.data_ptr() == self.local.data_ptr() and mine.device == self.local.device
        return mine.dtype == self.local.dtype and (here or mine.numel() == 0)

    def keep_in_place(self) -> None:
        """Copies a tensor assigned to ``local.data`` to the parameter's memory, and makes `local` that memory again."""
        if self.local.data_ptr() != self.leaf.data_ptr():
            rows = self.leaf.detach().narrow(0, 0, self.local.shape[0])
            if rows.numel():
                rows.copy_(self.local.detach())
                self.local.data = rows

    @property
    def is_whole(self) -> bool:
        """True if this rank holds all of it, on the device, as steps compute with it."""
        return self.ranks.shards == 1 and self.host is None and not self.is_cast

    def distribute(self, rows: Tensor) -> DTensor:
        """Returns this rank's `rows` of a tensor that is sharded like the parameter, as a DTensor; no communication."""
        return distribute_rows(rows, self.layout.spec.shape, self.ranks)

    def install(self, tensor: nn.Parameter) -> None:
        """Makes `tensor` the object that the modules hold under the parameter's names."""
        for owner in self.owners:
            owner.module._parameters[owner.name] = tensor

    def rows(self, tensor: Tensor) -> Tensor:
        """This rank's rows of `tensor`, of the parameter's shape: a DTensor of any placement, or a whole tensor."""
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                if tensor.placements != self.ranks.placements:
                    tensor = tensor.redistribute(self.ranks.mesh, self.ranks.placements)
                return tensor.to_local()
        low, high = self.layout.rows_of(self.ranks.shard_rank)
        return tensor.detach()[low:high]


@dataclass(eq=False, repr=False)
class GradBuffer:
    """One flat buffer and the parameters whose gradient shards lie in it.

    The runtime frees and allocates its memory as a whole (the storage is resized), and overwrites it when a new
    accumulation starts. A gradient that a user keeps must not change or vanish with it, so a buffer that somebody else
    still refers to is left to them and replaced by a new one.

    Args:
        flat: The buffer, in the parameters' dtype.
        parameters: Those that have a place in it.
    """

    flat: Tensor
    parameters: list[ShardedParameter] = field(default_factory=list)
    _own_uses: int = 0

    def add(self, parameter: ShardedParameter) -> None:
        """Assigns `parameter` its place: sets its ``grad_padded``, ``grad_local`` and ``grad_dtensor``."""
        layout = parameter.layout
        piece = self.flat[parameter.grad_offset : parameter.grad_offset + layout.shard_numel]
        parameter.grad_padded = piece.view(layout.shard_shape)
        parameter.grad_local = parameter.grad_padded.narrow(0, 0, parameter.local.shape[0])
        parameter.grad_dtensor = ShardedTensor.of(parameter.distribute(parameter.grad_local))
        parameter.grad_buffer = self
        if parameter not in self.parameters:
            self.parameters.append(parameter)

    def settle(self) -> None:
        """Call when all parameters are added and registered: later references belong to somebody else."""
        self._own_uses = compat.storage_uses(self.flat)

    def is_held(self) -> bool:
        """Returns whether others refer to the memory, except as the present ``.grad`` of a parameter.

        Call it within `compat.reading_attributes`.
        """
        if self.flat.untyped_storage().nbytes() == 0:
            return False  # freed; earlier holders keep the old memory
        # Views of the memory count as uses of the storage; the tensors that we hand out are counted as objects: the
        # counted references are the attribute and getrefcount's own argument.
        if compat.storage_uses(self.flat) > self._own_uses:
            return True
        return any(
            sys.getrefcount(p.grad_dtensor) > 2
            or sys.getrefcount(p.grad_local) > 2
            or sys.getrefcount(compat.local_of(p.grad_dtensor)) > 2  # type: ignore[arg-type] # a buffer's have one
            for p in self.parameters
            if p.dtensor.grad is None
        )

    def renew(self, runtime: Any) -> None:
        """Leaves the memory to its holders and takes a new buffer, without values."""
        self.flat = torch.empty_like(self.flat)
        for parameter in self.parameters:
            self.add(parameter)
            runtime.gradients.replace(parameter.ds_id, parameter.grad_padded)
        self.settle()


def distribute_rows(rows: Tensor, shape: tuple[int, ...], ranks: Ranks) -> DTensor:
    """Returns `rows` of this rank as a DTensor of the global, dense `shape`; no communication."""
    return ranks.distribute(rows, shape, _dense_strides(shape))


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
