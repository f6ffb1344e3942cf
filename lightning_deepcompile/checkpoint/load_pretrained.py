"""Loads a pretrained folder into a model: each rank reads its rows, once the model is sharded.

Names and shapes are compared before anything is read or changed. Parameters on the meta device are only recorded:
sharding reads them, row by row if the folder has the same tensor. Tensors that the folder stores in another form
(experts one by one, say) are read and converted as Transformers does it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_deepcompile.checkpoint.module_state import plain_name
from lightning_deepcompile.checkpoint.safetensors_folder import SafetensorsFolder, listed
from lightning_deepcompile.sharding.access import as_built
from lightning_deepcompile.sharding.shards import ReadRows, ShardedModel

_WHOLE = sys.maxsize


class _Source:
    """A tensor that a folder has for a model.

    Args:
        shape: Its shape.
        rows: Reads some rows of it.
    """

    def __init__(self, shape: tuple[int, ...], rows: ReadRows) -> None:
        self.shape, self.rows = shape, rows


@torch.inference_mode(False)  # which records gradients
@torch.no_grad()
def load_pretrained(
    module: nn.Module, directory: str | os.PathLike[str], sharded: ShardedModel | None, *, strict: bool
) -> dict[nn.Parameter, ReadRows]:
    """Gives `module` the values of a folder.

    Parameters that are sharded get this rank's rows, and those that have memory get everything, at once. Buffers, and
    parameters without rows, get memory if they have none. A generation configuration is loaded with them.

    Args:
        module: A model of Transformers, or any module whose names the folder has.
        directory: The folder.
        sharded: The sharded parameters; None if they are not sharded.
        strict: Whether missing and unexpected tensors raise; otherwise a warning names them, and missing ones keep, or
            will get, the values of their initialisation.

    Returns:
        Parameters on the meta device, and functions that read their rows.

    Raises:
        FileNotFoundError: If files are missing.
        ValueError: For damaged files; for tensors of other shapes and, if strict, for missing and unexpected ones.
    """
    folder = SafetensorsFolder(directory)
    sources, unexpected, may_lack = _find_sources(module, folder)
    tensors = {n: t for n, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    names_of: dict[Tensor, list[str]] = {}
    for name, tensor in tensors.items():
        names_of.setdefault(tensor, []).append(name)
    found: dict[Tensor, _Source] = {}
    missing: list[str] = []
    for tensor, names in names_of.items():
        known = [plain_name(name) for name in names if plain_name(name) in sources]
        if known:
            found[tensor] = sources[known[0]]
        elif not any(map(may_lack, names)):
            missing.append(names[0])
    wrong = [
        f"{names_of[tensor][0]!r} has the shape {source.shape}, and the model needs {tuple(tensor.shape)}"
        for tensor, source in found.items()
        if source.shape != tuple(tensor.shape)
    ]
    _check(directory, missing, unexpected, wrong, strict=strict)

    deferred: dict[nn.Parameter, ReadRows] = {}
    for tensor, source in found.items():
        if isinstance(tensor, DTensor):
            if sharded is None or tensor not in sharded.by_parameter:
                raise ValueError(f"{names_of[tensor][0]!r} is a DTensor, but not of this Trainer's LightningModule.")
            parameter = sharded.by_parameter[tensor]
            parameter.local.copy_(source.rows(*parameter.layout.rows_of(sharded.ranks.shard_rank)))
        elif not tensor.is_meta:
            tensor.copy_(source.rows(0, _WHOLE))
        elif isinstance(tensor, nn.Parameter) and tensor.dim() > 0 and tensor.numel() > 0:
            deferred[tensor] = source.rows
        else:
            _give_memory(module, names_of[tensor], tensor, source.rows(0, _WHOLE))
    _load_generation_config(module, directory)
    return deferred


def is_transformers_model(module: nn.Module) -> bool:
    """Returns whether `module` is a model of Transformers; does not import it."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _find_sources(
    module: nn.Module, folder: SafetensorsFolder
) -> tuple[dict[str, _Source], list[str], Callable[[str], bool]]:
    """Returns sources by the module's names, the folder's names without a place, and a test of what it may lack."""
    if not is_transformers_model(module):
        own = {plain_name(name) for name in module.state_dict(keep_vars=True)}
        unexpected = [name for name in folder.shapes if name not in own]
        return {name: _plain(folder, name) for name in folder.shapes if name in own}, unexpected, lambda name: False

    from lightning_deepcompile.compat.transformers import MergedTensors, plan_reading

    with as_built(module):
        plan = plan_reading(module, folder.shapes)  # type: ignore[arg-type] # it is a PreTrainedModel
    sources = {name: _plain(folder, key) for name, key in plan.renamed.items()}
    last: list[Any] = [None, {}]  # what was converted last, for the other tensors that it became

    def rows_of(merged: MergedTensors, name: str) -> ReadRows:
        def rows(low: int, high: int) -> Tensor:
            if low >= high:
                return torch.empty(0, *merged.shapes[name][1:])
            if merged.by_rows:
                return merged.convert({key: folder.read(key) for key in merged.keys(low, high)})[name]
            if last[0] is not merged:
                last[:] = merged, merged.convert({key: folder.read(key) for key in merged.keys()})
            return last[1][name][low:high] if merged.shapes[name] else last[1][name]

        return rows

    for merged in plan.merged:
        sources |= {name: _Source(shape, rows_of(merged, name)) for name, shape in merged.shapes.items()}
    return sources, plan.unexpected, plan.may_lack


def _plain(folder: SafetensorsFolder, name: str) -> _Source:
    return _Source(folder.shapes[name], lambda low, high: folder.read(name, low, None if high == _WHOLE else high))


def _check(
    directory: str | os.PathLike[str], missing: list[str], unexpected: list[str], wrong: list[str], *, strict: bool
) -> None:
    problems = []
    if missing:
        problems.append(f"it lacks {listed(missing)}")
    if unexpected:
        problems.append(f"the model has no place for {listed(unexpected)}")
    if wrong or (strict and problems):
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        problems += ["; ".join(wrong[:4]) + more] if wrong else []
        remedy = (
            "Build the model from the folder's own configuration (`AutoConfig.from_pretrained`)"
            if wrong
            else "With `strict=False` missing tensors are initialised as the model does it, and others are left out"
        )
        raise ValueError(
            f"The pretrained folder {os.fspath(directory)!r} does not fit the model: {'; '.join(problems)}. {remedy}."
        )
    if problems:
        rank_zero_warn(
            f"The pretrained folder {os.fspath(directory)!r} does not have all that the model has: "
            f"{'; '.join(problems)}. Missing tensors are initialised as the model does it."
        )


def _load_generation_config(module: nn.Module, directory: str | os.PathLike[str]) -> None:
    if os.path.isfile(os.path.join(directory, "generation_config.json")) and is_transformers_model(module):
        from transformers import GenerationConfig

        model: Any = module
        if model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(directory)


def _give_memory(module: nn.Module, names: Iterable[str], tensor: Tensor, value: Tensor) -> None:
    """Replaces a tensor without memory, under all its names, by one with memory that is not the file's."""
    new = torch.empty_like(tensor, device="cpu").copy_(value)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, tensor.requires_grad)
    for name in names:
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        if isinstance(new, nn.Parameter):
            owner._parameters[own] = new
        else:
            owner._buffers[own] = new
