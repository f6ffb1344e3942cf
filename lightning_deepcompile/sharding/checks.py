"""Refuses models that cannot be sharded before anything is changed, and names the parameter or module."""

from __future__ import annotations

from collections.abc import Set

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_deepcompile import compat
from lightning_deepcompile.ranks.exchange import alike, exchange
from lightning_deepcompile.sharding.errors import hook_refused
from lightning_deepcompile.sharding.shards import collect_parameters, is_sharded


def check_module(module: nn.Module, ours: Set[Tensor] = frozenset(), *, world_size: int = 1) -> None:
    """Raises for models that this strategy cannot shard.

    Args:
        module: The model as the user built it.
        ours: Parameters that are DTensors because this strategy sharded them earlier.
        world_size: Ranks that train it.

    Raises:
        ValueError: For a model with uninitialised parameters, or such that have hooks, will have sparse gradients, or
            are renormalised by each rank as its own batch wants it.
        TypeError: For a model that FSDP, `fully_shard` or tensor parallelism already distributes.
    """
    for path, child in module.named_modules():
        kinds = {base.__name__ for base in type(child).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule", "DistributedDataParallel"}:
            raise TypeError(
                f"The module {path or 'itself'!r} ({type(child).__name__}) is already distributed by FSDP or DDP. "
                "DeepCompileStrategy shards the model itself: remove the wrapping (`FSDP(...)`, `fully_shard(...)`)."
            )
        if not isinstance(child, nn.Embedding | nn.EmbeddingBag):
            continue
        if child.max_norm is not None and world_size > 1:
            raise ValueError(
                f"{type(child).__name__} {path!r} was made with max_norm={child.max_norm}: each of {world_size} ranks "
                "would renormalise the rows that its own batch looks up, and ranks would no longer agree on the "
                "weight (nor would they under DDP). Leave max_norm out, and renormalise all rows in "
                "`on_train_batch_start`: `torch.renorm` of `embedding.weight` under `torch.no_grad()`."
            )
        if child.sparse and child.weight.requires_grad:
            raise ValueError(
                f"{type(child).__name__} {path!r} was made with sparse=True: its gradient would be sparse, which "
                "cannot be reduced to shards. Use sparse=False, with SGD or Adam in place of SparseAdam; only the rows "
                "that a batch looks up travel where they are exchanged, as those of large tables are."
            )
    parameters = collect_parameters(module)
    for parameter, owners in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedTensorMixin):  # type: ignore[attr-defined] # no stub
            raise ValueError(
                f"The parameter {owners[0].fqn!r} is lazy. Run one forward pass before handing the model to the "
                "Trainer."
            )
    for parameter, owners in parameters.items():
        name = owners[0].fqn
        if isinstance(parameter, DTensor) and parameter not in ours:
            raise TypeError(
                f"The parameter {name!r} is already a DTensor. DeepCompileStrategy needs an undistributed model."
            )
        check_no_hooks(parameter, name)
    _check_no_hidden_references(module, set(parameters))


def check_no_hooks(parameter: Tensor, name: str) -> None:
    """Raises for a hook on the gradient of a parameter that is sharded, or will be.

    Raises:
        ValueError: Says what to do instead.
    """
    if compat.has_hooks(parameter) and is_sharded(parameter):
        raise hook_refused(name)


def _check_no_hidden_references(module: nn.Module, parameters: set[nn.Parameter]) -> None:
    """Raises for a parameter that is kept outside ``_parameters``: it would stay unsharded there, and untrained."""
    for path, child in module.named_modules():
        if isinstance(child, nn.RNNBase):
            continue  # its list of weights is rebuilt from the sharded ones on every read
        for attribute, value in vars(child).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            items = (
                value
                if isinstance(value, list | tuple)
                else list(value.values())
                if isinstance(value, dict)
                else [value]
            )
            if any(isinstance(item, nn.Parameter) and item in parameters for item in items):
                raise ValueError(
                    f"{type(child).__name__} {path!r} keeps a parameter in its attribute {attribute!r}, beside the "
                    "registered ones; after sharding it would be used unsharded and never be trained. Read it through "
                    "the module that owns it, or keep it in a ParameterList."
                )


def check_same_model(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Raises on every rank if the ranks built different models.

    Args:
        module: The model, before sharding.
        group: Process group of the data-parallel ranks; None is the default one.

    Raises:
        RuntimeError: Names the first parameter or buffer that differs, and the ranks.
    """
    tensors: list[tuple[str, Tensor]] = [
        (owner.fqn, parameter) for parameter, owners in collect_parameters(module).items() for owner in owners
    ]
    tensors += module.named_buffers()
    lines = [f"{name}: {_described(tensor)}" for name, tensor in tensors]
    if alike("\n".join(lines), group):
        return
    every = exchange(lines, group)
    other = next(rank for rank, theirs in enumerate(every) if theirs != every[0])
    for mine, theirs in zip(every[0] + ["nothing"], every[other] + ["nothing"], strict=False):
        if mine != theirs:
            raise RuntimeError(
                f"The ranks built different models. First difference: rank 0 has {mine}; rank {other} has {theirs}. "
                "Build the same model on every rank (no rank-dependent configuration)."
            )


def _described(tensor: Tensor) -> str:
    sharded = ", sharded before" if isinstance(tensor, DTensor) else ""
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, requires_grad={tensor.requires_grad}{sharded}"
