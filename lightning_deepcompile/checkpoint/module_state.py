"""The module's state dict: full or sharded, and loading it into the shards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_deepcompile import compat
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.shards import ShardedModel

#: Under this key weight averaging callbacks keep the weights that are trained; ``state_dict`` is then the average.
CURRENT_STATE = "current_model_state"


def plain_name(name: str) -> str:
    """Returns a state dict key without the marks that ``torch.compile`` leaves on compiled submodules."""
    return name.replace("_orig_mod.", "")


@torch.no_grad()
def gather(tensor: DTensor, *, keep: bool) -> Tensor | None:
    """Returns the whole of a tensor sharded on dim 0, on the CPU; a collective.

    Args:
        tensor: Sharded like a parameter. On its device there is room for one whole tensor, padded.
        keep: Whether this rank wants the result.

    Returns:
        The tensor, in storage of its own; None if not kept.
    """
    ranks = Ranks(tensor.device_mesh)
    if tuple(tensor.placements) != ranks.placements:
        whole = tensor.full_tensor()
        return whole.cpu().clone() if keep else None
    local, mesh, rows = tensor.to_local(), tensor.device_mesh, tensor.shape[0]
    index: Any = torch.cuda.current_device() if mesh.device_type == "cuda" else None
    device = torch.device(mesh.device_type, index)
    if ranks.shards == 1:
        return local.to("cpu", copy=True).contiguous() if keep else None
    whole = compat.gather_rows(local.to(device), rows, ranks.shard_group)
    # A view would write the padding to the file, too.
    return whole.to("cpu", copy=True) if keep else None


def full_state_dict(module: nn.Module, model: ShardedModel, *, keep: bool) -> dict[str, Any]:
    """Returns the module's state dict with whole tensors on the CPU; a collective.

    Args:
        module: The sharded module.
        model: Its shards.
        keep: Whether this rank keeps the tensors (rank 0) or only takes part.

    Returns:
        The state dict, empty where `keep` is false. Tied parameters share their memory, and so take space once.
    """
    return whole_state_dict(module.state_dict(), model, keep=keep)


def whole_state_dict(state: Mapping[str, Any], model: ShardedModel, *, keep: bool) -> dict[str, Any]:
    """Returns `state` with whole tensors on the CPU; a collective if there are DTensors in it.

    Args:
        state: A state dict of the module, or of a copy.
        model: How the module is sharded.
        keep: Whether this rank keeps the tensors.

    Returns:
        As `full_state_dict`.
    """
    first_name = {owner.fqn: parameter.name for parameter in model.parameters for owner in parameter.owners}
    result: dict[str, Any] = OrderedDict()
    if keep and hasattr(state, "_metadata"):
        result._metadata = state._metadata  # type: ignore[attr-defined] # the versions of the modules' formats
    for name, value in state.items():
        if isinstance(value, DTensor):
            value = gather(cast(DTensor, value.detach()), keep=keep)
        elif isinstance(value, Tensor):
            value = value.detach().cpu()
        if keep:
            twin = result.get(first_name.get(name, name))
            result[name] = twin if isinstance(twin, Tensor) and torch.equal(twin, value) else value
    return result


def sharded_state_dict(module: nn.Module) -> dict[str, Any]:
    """Returns the module's state dict with parameters as DTensors, on every rank."""
    return dict(module.state_dict())


class _Destination(Tensor):
    """Stands for a sharded parameter while a state dict is loaded: it looks whole, and keeps this rank's rows.

    This lets ``Module.load_state_dict`` work as usual, with the hooks and overrides that a model may have.
    """

    parameter: ShardedParameter
    filled: bool

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment] # PyTorch says what to assign

    @staticmethod
    def of(parameter: ShardedParameter) -> _Destination:
        local = parameter.local
        destination = compat.stand_in(_Destination, parameter.layout.spec.shape, local.dtype, local.device)
        destination.parameter, destination.filled = parameter, False
        return destination

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # of a Tensor it is a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            destination, source = args[0], args[1]
            if source.shape != destination.shape:
                raise RuntimeError(
                    f"A tensor of shape {tuple(source.shape)} was copied into {destination.parameter.name!r} of shape "
                    f"{tuple(destination.shape)} while the state dict was loaded."
                )
            destination.parameter.local.copy_(destination.parameter.rows(source))
            destination.filled = True
            return destination
        raise NotImplementedError(  # no stub: what PyTorch expects of a subclass that lacks an operator
            f"While a state dict is loaded into sharded parameters, {func} cannot be applied to them: load hooks may "
            "rename, drop and change the checkpoint's tensors, and `copy_` into the module's."
        )


def load_state_dict(module: nn.Module, state: Mapping[str, Any], model: ShardedModel, *, strict: bool) -> None:
    """Loads a state dict through ``module.load_state_dict``; each rank copies its rows.

    Args:
        module: The sharded module.
        state: By name, whole tensors or DTensors sharded like the parameters. Keys may lack or have the ``_orig_mod.``
            of compiled submodules.
        model: How the module is sharded.
        strict: Whether missing and unexpected keys raise.

    Raises:
        RuntimeError: For keys that do not match (if strict) or shapes that differ; names them. Also if a parameter was
            not loaded although its key was there (a `load_state_dict` that assigns instead of copying).
    """
    own = module.state_dict()
    keys = {plain_name(key): key for key in own}
    renamed = OrderedDict((keys.get(plain_name(key), key), value) for key, value in state.items())
    # Sharded checkpoints do not contain the versions of the modules' formats; modules would assume the oldest ones.
    renamed._metadata = getattr(state, "_metadata", getattr(own, "_metadata", None))  # type: ignore[attr-defined]
    destinations = {p: _Destination.of(p) for p in model.parameters}
    try:
        for parameter, destination in destinations.items():
            parameter.install(destination)  # type: ignore[arg-type]
        with torch.no_grad():
            module.load_state_dict(renamed, strict=strict)
    finally:
        for parameter in destinations:
            parameter.install(parameter.dtensor)
    lost = [p.name for p, d in destinations.items() if not d.filled and any(o.fqn in renamed for o in p.owners)]
    if lost:
        raise RuntimeError(
            f"The parameters {lost} were not loaded, though the checkpoint has them. Under DeepCompileStrategy "
            "`load_state_dict` must copy into parameters: remove `assign=True`."
        )
