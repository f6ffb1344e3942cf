"""Saves a sharded model as a pretrained folder: gathers whole tensors one after another, and writes file by file.

Rank 0 holds one file's tensors at a time, in host memory. The files are moved into place when all of them are written.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_deepcompile.checkpoint.load_pretrained import is_transformers_model
from lightning_deepcompile.checkpoint.location import local_path
from lightning_deepcompile.checkpoint.module_state import gather, plain_name
from lightning_deepcompile.checkpoint.refuse_saving import can_save_pretrained
from lightning_deepcompile.checkpoint.safetensors_folder import INDEX, listed, publish, write_index, write_tensors
from lightning_deepcompile.checkpoint.staging import clear_leftovers, discard, staging_path
from lightning_deepcompile.ranks.exchange import from_first, raise_together
from lightning_deepcompile.sharding.access import as_built


def find_pretrained(root: nn.Module) -> nn.Module:
    """The model that a LightningModule trains: the only outermost child that has a ``save_pretrained``.

    Raises:
        ValueError: If there is none, or several; names them.
    """
    found: dict[str, nn.Module] = {}
    for path, module in root.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not inside and module not in found.values() and can_save_pretrained(module):
            found[path] = module
    if len(found) != 1:
        raise ValueError(
            f"{type(root).__name__} has "
            + (f"several models with a `save_pretrained`: {listed(found)}." if found else "no model of Transformers.")
            + " Say which one to save: `trainer.strategy.save_pretrained(directory, module=...)`."
        )
    return next(iter(found.values()))


@torch.inference_mode(False)  # which records gradients
@torch.no_grad()
def save_pretrained(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    is_global_zero: bool,
    max_shard_size: int | str,
    dtype: torch.dtype | None,
) -> None:
    """Writes a folder that ``from_pretrained`` loads; a collective of all ranks.

    Args:
        module: A model of Transformers, one with PEFT's adapters (which alone are written), or any other module (of
            which only the tensors are).
        directory: The folder, on this machine's file system. An older model in it is replaced; other files stay.
        is_global_zero: Whether this is rank 0, which writes.
        max_shard_size: Bytes of a file at most, or a text such as ``"5GB"``; a larger tensor has a file of its own.
        dtype: Of floating-point tensors in the files; None: as the parameters are.

    Raises:
        ValueError: For a remote path, and for what PEFT computes instead of storing.
        NotADirectoryError: If there is a file in the folder's place.
        RuntimeError: If another rank failed; says which, and its error.
    """
    target = local_path(directory)
    if target is None:
        raise ValueError(
            f"directory={os.fspath(directory)!r} is not on this machine's file system. Save to a local directory, and "
            "copy it."
        )
    target = target.absolute()
    staged = staging_path(target)  # rank 0's
    try:
        with raise_together(f"Saving the model to {os.fspath(directory)!r}"):
            if target.exists() and not target.is_dir():
                raise NotADirectoryError(f"directory={os.fspath(directory)!r} is a file. Name a directory to save to.")
            if is_global_zero:
                clear_leftovers(target.parent)
                staged.mkdir(parents=True)
        writer = _Writer(module, staged, is_global_zero=is_global_zero, dtype=dtype)
        adapters = _adapters_of(module)
        if adapters:
            writer.save_adapters(adapters)
        else:
            writer.save_whole(max_shard_size)
        with raise_together(f"Saving the model to {os.fspath(directory)!r}"):
            if is_global_zero:
                if (target / "README.md").exists():  # PEFT writes one
                    (staged / "README.md").unlink(missing_ok=True)
                publish(staged, target, replaces=not adapters)
    except BaseException:
        discard(staged)  # on ranks other than 0 there is nothing
        raise


class _Writer:
    """Writes the files of one model.

    Args:
        module: The model.
        folder: Exists, and is empty.
        is_global_zero: Whether this is rank 0, which writes.
        dtype: Of floating-point tensors in the files; None: as the parameters are.
    """

    def __init__(self, module: nn.Module, folder: Path, *, is_global_zero: bool, dtype: torch.dtype | None) -> None:
        self._module, self._folder, self._writes, self._dtype = module, folder, is_global_zero, dtype
        found = module.state_dict(keep_vars=True).items()
        self._tensors = {plain_name(name): tensor for name, tensor in found if isinstance(tensor, Tensor)}

    def save_whole(self, max_shard_size: int | str) -> None:
        """Writes all tensors, and the configurations."""
        from huggingface_hub import split_torch_state_dict_into_shards

        tensors = self._without_twins()
        groups = _plan(self._module, {name: self._without_memory(tensor) for name, tensor in tensors.items()})
        planned = {key: tensor for group in groups for key, tensor in group.tensors.items()}
        split = split_torch_state_dict_into_shards(planned, max_shard_size=max_shard_size)
        ready: dict[str, Tensor | None] = {}  # gathered, and not written yet; None on ranks that do not write
        open_files = dict(split.filename_to_tensors)
        for group in groups:
            whole = {name: self._whole(tensors[name]) for name in group.names}
            ready |= dict.fromkeys(group.tensors)
            with raise_together("Converting the model's tensors"):
                if self._writes:
                    with as_built(self._module):
                        ready |= group.convert(cast(dict[str, Tensor], whole))
            del whole
            for file, names in list(open_files.items()):
                if all(name in ready for name in names):
                    del open_files[file]
                    self._write(file, {name: ready.pop(name) for name in names})
        assert not open_files and not ready
        with raise_together("Writing the model's configuration"):
            if self._writes:
                if split.is_sharded:
                    count = sum(tensor.numel() for tensor in planned.values())
                    metadata = {"total_parameters": count, **split.metadata}
                    write_index(self._folder / INDEX, split.tensor_to_filename, metadata)
                self._write_configurations()

    def save_adapters(self, adapters: Mapping[str, Any]) -> None:
        """Writes adapters and their configurations, as PEFT does it, and nothing of the base model."""
        computed = [name for name, config in adapters.items() if config.is_prompt_learning]
        if computed:
            raise ValueError(
                f"The adapters {listed(computed)} are prompts, which PEFT computes from its parameters to save them. "
                "Call the model's own `save_pretrained` inside of `with trainer.strategy.full_parameters():`."
            )
        names: list[str] = []
        with raise_together("Looking for the adapters' tensors"):
            if self._writes:  # on one rank: PEFT may query a hub about the model
                names = self._names_of(adapters)
        names = from_first(names)
        whole = {name: self._whole(self._tensors[name]) for name in names}
        with raise_together("Writing the adapters"):
            if self._writes:
                with as_built(self._module):
                    cast(Any, self._module).save_pretrained(self._folder, state_dict=whole)

    def _names_of(self, adapters: Mapping[str, Any]) -> list[str]:
        """Returns the names of the adapters' tensors: PEFT chooses among tensors without memory."""
        from peft import get_peft_model_state_dict

        meta = {name: self._without_memory(tensor) for name, tensor in self._tensors.items()}
        name_of = {id(tensor): name for name, tensor in meta.items()}
        chosen = [
            get_peft_model_state_dict(self._module, state_dict=dict(meta), adapter_name=adapter) for adapter in adapters
        ]
        return list(dict.fromkeys(name_of[id(tensor)] for tensors in chosen for tensor in tensors.values()))

    def _write(self, file: str, tensors: dict[str, Tensor | None]) -> None:
        with raise_together(f"Writing {file!r}"):
            if self._writes:
                made = cast(dict[str, Tensor], tensors)
                write_tensors(self._folder / file, {name: tensor.contiguous() for name, tensor in made.items()})

    def _whole(self, tensor: Tensor) -> Tensor | None:
        tensor = tensor.detach()
        whole = gather(tensor, keep=self._writes) if isinstance(tensor, DTensor) else tensor.to("cpu", copy=True)
        return None if whole is None else whole.to(self._dtype_of(whole))

    def _without_memory(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=self._dtype_of(tensor), device="meta")

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype

    def _without_twins(self) -> dict[str, Tensor]:
        """Returns each tensor under one name, if loading ties the others to it; a file's tensors share no memory."""
        left_out: frozenset[str] = frozenset()
        tied: frozenset[str] = frozenset()
        if is_transformers_model(self._module):
            from lightning_deepcompile.compat.transformers import never_saved, tied_away

            left_out, tied = never_saved(cast(Any, self._module)), tied_away(cast(Any, self._module))
        names_of: dict[Tensor, list[str]] = {}
        for name, tensor in self._tensors.items():
            if name not in left_out:
                names_of.setdefault(tensor, []).append(name)
        kept = {name for names in names_of.values() for name in ([n for n in names if n not in tied] or names[:1])}
        return {name: tensor for name, tensor in self._tensors.items() if name in kept}

    def _write_configurations(self) -> None:
        model = cast(Any, self._module)
        if not is_transformers_model(model):
            return
        config = copy.deepcopy(model.config)
        with as_built(model):
            config.architectures = [type(model).__name__]
        config.dtype = str(self._dtype or model.dtype).removeprefix("torch.")
        config.save_pretrained(self._folder)
        if model.can_generate():
            model.generation_config.save_pretrained(self._folder)


class _Unchanged:
    """A tensor that is written unchanged; see `SavingGroup`."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.names, self.tensors = (name,), {name: tensor}

    def convert(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return whole


def _plan(module: nn.Module, tensors: dict[str, Tensor]) -> list[Any]:
    if not is_transformers_model(module):
        return [_Unchanged(name, tensor) for name, tensor in tensors.items()]

    from lightning_deepcompile.compat.transformers import plan_saving

    with as_built(module):
        return plan_saving(cast(Any, module), tensors)


def _adapters_of(module: nn.Module) -> dict[str, Any]:
    """The configurations of a model's adapters, by name; empty if it has none."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(module, peft.PeftModel):
        return dict(module.peft_config)
    if is_transformers_model(module):
        from lightning_deepcompile.compat.transformers import has_adapters

        return dict(cast(Any, module).peft_config) if has_adapters(module) else {}
    return {}
