"""Lightning's weight averaging callbacks (EMA, SWA over steps) on shards.

The callback copies the module before it is sharded, and later mixes and exchanges the copy's tensors with the module's.
Once the module is sharded, the copy gets shards as well: then all operations of the callback are elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_deepcompile import compat
from lightning_deepcompile.checkpoint.module_state import CURRENT_STATE, plain_name
from lightning_deepcompile.compat.lightning import average_device, average_of, callbacks_of
from lightning_deepcompile.sharding.access import uninstall_access
from lightning_deepcompile.sharding.shards import ShardedModel


class ShardedAverage(AveragedModel):
    """The average of a sharded module: `module` holds shards, and is there for its tensors, not to be called."""

    def update_parameters(self, model: nn.Module) -> None:
        """Adds the present values to the average; no communication."""
        # On plain tensors: averaging functions may put all tensors into one call, DTensors and plain ones do not mix.
        averaged = self.module
        self.module = _Local(averaged)
        try:
            super().update_parameters(_Local(model))
        finally:
            self.module = averaged

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of `module`."""
        return self.module.parameters(recurse)


class _Local(nn.Module):
    """A module's tensors; sharded ones are this rank's rows."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self._source = (source,)  # not a child

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return map(_local, self._source[0].parameters(recurse))

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return self._source[0].buffers(recurse)


def _local(tensor: Tensor) -> Tensor:
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor


def is_averaged(trainer: pl.Trainer) -> bool:
    """Returns whether a callback of `trainer` keeps an average of the weights."""
    return any(average_of(c) is not None for c in callbacks_of(trainer) if isinstance(c, WeightAveraging))


def shard_averages(
    trainer: pl.Trainer, model: ShardedModel, device: torch.device, host_shard: Callable[[int, torch.dtype], Tensor]
) -> None:
    """Gives the averages that callbacks keep the sharded module's values; no communication.

    Args:
        trainer: Its callbacks have been set up.
        model: The shards of the trainer's module.
        device: Where it is.
        host_shard: Makes tensors of the device that lie in host memory, by number of elements and dtype: the averages
            of parameters that live there do so, too.

    Raises:
        MisconfigurationException: If an average is to be kept on another device.
    """
    for callback in callbacks_of(trainer):
        if not isinstance(callback, WeightAveraging) or average_of(callback) is None:
            continue
        wanted = None if average_device(callback) is None else torch.device(average_device(callback))
        if wanted is not None and wanted.type != device.type:
            raise MisconfigurationException(
                f"{type(callback).__name__}(device={str(wanted)!r}): under DeepCompileStrategy the average is sharded "
                f"like the model, and is on the model's device ({device.type}). Remove the argument."
            )
        average: Any = average_of(callback)
        average.__class__ = ShardedAverage
        average.n_averaged = average.n_averaged.to(device)
        _copy_shards(model, trainer.lightning_module, average.module, host_shard)


@torch.no_grad()
def _copy_shards(
    model: ShardedModel, source: nn.Module, target: nn.Module, host_shard: Callable[[int, torch.dtype], Tensor]
) -> None:
    """Replaces all parameters and buffers of `target` by copies of those of `source`; tied ones stay tied."""
    targets = dict(target.named_modules(remove_duplicate=False))
    copies: dict[Tensor, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if tensor not in copies:
            sharded = model.by_parameter.get(tensor)
            if sharded is None or sharded.host is None:
                clone = tensor.detach().clone()
            else:
                rows = host_shard(sharded.local.numel(), sharded.local.dtype).view_as(sharded.local)
                clone = sharded.distribute(rows.copy_(sharded.local))
            copies[tensor] = nn.Parameter(clone, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else clone
        return copies[tensor]

    for path, module in source.named_modules(remove_duplicate=False):
        twin = targets.get(path)
        if twin is None:
            raise MisconfigurationException(
                f"The module {path!r} was added after a weight averaging callback had copied the model. Build it in "
                "`__init__` or `configure_model`."
            )
        uninstall_access(twin)  # if the module was sharded before it was copied
        for name, parameter in module._parameters.items():
            twin._parameters[name] = None if parameter is None else copy(parameter)
        for name, buffer in module._buffers.items():
            twin._buffers[name] = None if buffer is None else copy(buffer)


def distribute_states(checkpoint: dict[str, Any], model: ShardedModel, module: nn.Module) -> None:
    """Makes whole parameters in a loaded checkpoint DTensors, in place: the callback loads them into the average."""
    known = model.by_parameter
    every = module.named_parameters(remove_duplicate=False)
    parameters = {plain_name(name): known[parameter] for name, parameter in every if parameter in known}

    def distribute(name: str, value: Any) -> Any:
        parameter = parameters.get(plain_name(name))
        if parameter is None or not isinstance(value, Tensor) or value.shape != parameter.dtensor.shape:
            return value
        rows = parameter.rows(value)
        if parameter.host is not None:  # all of them may not fit on the device
            return compat.with_local(parameter.distribute(torch.empty_like(rows, device="meta")), rows)
        return parameter.distribute(rows.to(parameter.local.device))

    for key in ("state_dict", CURRENT_STATE):
        state = checkpoint.get(key)
        if state:
            state.update({name: distribute(name, value) for name, value in state.items()})
