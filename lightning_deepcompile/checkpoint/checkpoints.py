"""Saves and loads checkpoints for the strategy when Lightning asks for it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_deepcompile.checkpoint.background import BackgroundSaves
from lightning_deepcompile.checkpoint.file import FileCheckpointIO, can_resume, explain_weights_only
from lightning_deepcompile.checkpoint.location import META, find_kind, fingerprint, local_path
from lightning_deepcompile.checkpoint.module_state import (
    full_state_dict,
    load_state_dict,
    plain_name,
    sharded_state_dict,
    whole_state_dict,
)
from lightning_deepcompile.checkpoint.optimizer_state import (
    full_optimizer_state,
    load_optimizer_state,
    sharded_optimizer_state,
    whole_for_owners,
)
from lightning_deepcompile.checkpoint.sharded import ShardedCheckpoint, save_sharded
from lightning_deepcompile.checkpoint.staging import remove, resolve, set_aside, stand_in
from lightning_deepcompile.compat.lightning import NoOptimizer, WrappingCheckpointIO
from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.ranks.exchange import alike, on_any, raise_together
from lightning_deepcompile.sharding.shards import ShardedModel

StateDictType = Literal["full", "sharded"]

_log = logging.getLogger(__name__)

_LOADS = 3
"""How often a checkpoint is read that is replaced meanwhile."""

# Other strategies keep the state of their gradient scaler under these keys.
_PRECISION_KEYS = ("MixedPrecision", "FSDPPrecision")


class _ShardedStrategy(Protocol):
    """The members of a strategy that checkpoints need."""

    checkpoint_io: CheckpointIO
    optimizers: list[Optimizer]
    precision_plugin: Precision

    @property
    def lightning_module(self) -> pl.LightningModule | None: ...
    @property
    def is_global_zero(self) -> bool: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def engine_of_module(self) -> Engine | None: ...
    def broadcast(self, obj: Any, src: int = 0) -> Any: ...


class Checkpoints:
    """Saves and loads for a strategy.

    Lightning calls `load` before the hooks ``on_load_checkpoint``, and `load_module` and `load_optimizers` after them,
    so the hooks see the state dict and may change it.

    Args:
        strategy: The strategy; its engine is used once it is set up.
        state_dict_type: ``"full"``: one file. ``"sharded"``: a directory to which every rank writes its shards.
        save_distributed_checkpoint: ModelParallelStrategy's name for the same; True means ``"sharded"``.
        async_save: Whether a thread writes sharded checkpoints while training goes on.

    Raises:
        ValueError: If arguments contradict each other.
    """

    def __init__(
        self,
        strategy: _ShardedStrategy,
        state_dict_type: StateDictType = "full",
        save_distributed_checkpoint: bool | None = None,
        async_save: bool = False,
    ) -> None:
        if save_distributed_checkpoint is False and state_dict_type == "sharded":
            raise ValueError(
                "`state_dict_type='sharded'` and `save_distributed_checkpoint=False` contradict each other. Give only "
                "`state_dict_type`."
            )
        self.sharded = state_dict_type == "sharded" or bool(save_distributed_checkpoint)
        if async_save and not self.sharded:
            raise ValueError(
                "`async_save=True` needs `state_dict_type='sharded'`. For full checkpoints use Lightning's plugin: "
                "`Trainer(plugins=[AsyncCheckpointIO()])`."
            )
        self._background = BackgroundSaves() if async_save else None
        self._strategy = strategy
        self._saves = 0  # the number handed to the checkpoint IO
        self._last_saved: str | os.PathLike[str] | None = None  # to resume from; by the thread, so perhaps not yet
        self._last_whole: str | os.PathLike[str] | None = None

    @property
    def model(self) -> ShardedModel | None:
        """The sharded model; None as long as the module is as the user built it."""
        engine = self._engine()
        return None if engine is None else engine.model

    def _engine(self) -> Engine | None:
        return self._strategy.engine_of_module

    def finish(self) -> None:
        """Waits for pending writes.

        Raises:
            Exception: If one failed.
        """
        if self._background is not None:
            self._background.finish()

    def _finish_together(self) -> None:
        if self._background is not None:
            with raise_together("Saving an earlier checkpoint"):
                try:
                    self._background.finish()
                except BaseException:
                    self._last_saved = None
                    raise

    def _stand_in(self, checkpoint: dict[str, Any], path: Any, previous: Any) -> None:
        """Calls `stand_in` if Lightning is going to link to a checkpoint that a thread writes."""
        module = self._strategy.lightning_module
        callbacks = [] if module is None else module.trainer.checkpoint_callbacks
        links = any(isinstance(one, ModelCheckpoint) and one.save_last == "link" for one in callbacks)
        if links and can_resume(checkpoint):
            stand_in(path, previous)

    @torch.no_grad()
    @torch.inference_mode(False)  # in which PyTorch cannot detach DTensors
    def module_state(self) -> dict[str, Any]:
        """The module's state dict: DTensors if sharded; else whole tensors on rank 0 and nothing elsewhere."""
        engine = self._engine()
        if engine is None:
            module = self._strategy.lightning_module
            assert module is not None
            return module.state_dict() if self.sharded or self._strategy.is_global_zero else {}
        if self.sharded:
            return sharded_state_dict(engine.module)
        return full_state_dict(engine.module, engine.model, keep=self._strategy.is_global_zero)

    @torch.no_grad()
    @torch.inference_mode(False)
    def optimizer_state(self, optimizer: Optimizer | LightningOptimizer) -> dict[str, Any]:
        """Returns an optimizer's state, in the form of `module_state`."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if isinstance(plain, NoOptimizer):
            return plain.state_dict()
        engine = self._strategy.engine
        owner_of = functools.partial(engine.owner_of, plain)
        if self.sharded:
            return sharded_optimizer_state(plain, engine.module, engine.model, owner_of)
        keep = self._strategy.is_global_zero
        return full_optimizer_state(plain, engine.module, engine.model, owner_of, keep=keep)

    def save(self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None) -> None:
        """Writes a checkpoint that Lightning assembled on all ranks; a collective.

        Raises:
            TypeError: If `storage_options` are given.
            IsADirectoryError: If a full checkpoint would replace a directory that is not a checkpoint.
        """
        strategy = self._strategy
        if storage_options is not None:
            name = type(strategy).__name__
            raise TypeError(
                f"`{name}.save_checkpoint(..., storage_options=...)` is not supported because `{name}` does not hand "
                "them to a `CheckpointIO` on every rank. Configure a `CheckpointIO` plugin instead."
            )
        if not dist.is_initialized() and not strategy.is_global_zero:
            return  # without a process group yet, all ranks would write the same
        path = strategy.broadcast(filepath)
        checkpoint = self._with_known_precision_keys(checkpoint)
        if self.sharded:
            self._finish_together()  # one copy at a time in host memory
            is_global_zero, background = strategy.is_global_zero, self._background
            if background is not None:
                self._last_whole, self._last_saved = self._last_saved or self._last_whole, None
                with raise_together(f"Saving the checkpoint {os.fspath(path)!r}"):
                    if is_global_zero:
                        self._stand_in(checkpoint, path, self._last_whole)
                self._last_saved = path if can_resume(checkpoint) else None
            save_sharded(checkpoint, path, is_global_zero=is_global_zero, background=background)
            module = strategy.lightning_module
            if self._engine() is None or (module and module.trainer.state.status != TrainerStatus.RUNNING):
                self._finish_together()  # the write must not overlap with training
            return
        checkpoint = self._whole(checkpoint)
        with raise_together(f"Saving the checkpoint {os.fspath(path)!r}"):
            kind = find_kind(path)
            if kind == "directory":
                raise IsADirectoryError(f"The checkpoint path exists and is a directory: {path}")
        with raise_together(f"Saving the checkpoint {os.fspath(path)!r}"):  # apart: all check before one writes
            if strategy.is_global_zero:
                inner = _innermost(strategy.checkpoint_io)
                # Ours replaces anything on this machine.
                replaces = isinstance(inner, FileCheckpointIO) and local_path(path) is not None
                if isinstance(inner, FileCheckpointIO) and inner is not strategy.checkpoint_io:
                    self._stand_in(checkpoint, path, inner.last_whole)
                self._saves += 1
                with set_aside(path) if kind == "sharded" and not replaces else contextlib.nullcontext():
                    strategy.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=None)

    def load(self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint of either kind, by this or another strategy; a collective.

        Args:
            checkpoint_path: Must be reachable from all ranks.
            weights_only: As for ``torch.load``: only False admits pickled objects of any class.

        Returns:
            Lightning's checkpoint. Its tensors are in host memory, or in a memory-mapped file.

        Raises:
            FileNotFoundError: If nothing is there.
            ValueError: If something else is there, or a broken checkpoint.
            RuntimeError: If it holds another number of optimizers, or is replaced again and again while it is read.
        """
        self._finish_together()
        strategy = self._strategy
        path = strategy.broadcast(checkpoint_path)
        checkpoint: dict[str, Any] | None = None
        error: Exception | None = None
        for _ in range(_LOADS):
            found = resolve(path)
            if found != path and strategy.is_global_zero:
                _log.warning("A save to %s was interrupted. Loading %s, which it has put aside.", path, found)
            # Another job may save to the same path: the data read could belong to two checkpoints.
            seen = fingerprint(found)
            if not alike(seen):
                continue
            checkpoint, error = None, None
            try:
                checkpoint = self._load_once(found, weights_only)
            except Exception as raised:  # on all ranks
                error = raised
            if not on_any(fingerprint(resolve(path)) != seen):
                break
        else:
            raise RuntimeError(
                f"Loading the checkpoint {os.fspath(path)!r} failed: it was replaced while it was read, {_LOADS} "
                "times, or ranks find different checkpoints there. Is another job saving to it?"
            )
        if error is not None:
            raise error
        assert checkpoint is not None
        if can_resume(checkpoint):
            self._last_whole = found
        own = type(strategy.precision_plugin).__qualname__
        theirs = next((key for key in _PRECISION_KEYS if key in checkpoint), None)
        if theirs is not None:
            checkpoint.setdefault(own, checkpoint[theirs])
        return checkpoint

    def _load_once(self, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
        module = self._strategy.lightning_module
        assert module is not None
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        with raise_together(f"Loading the checkpoint {os.fspath(path)!r}"):
            opened = self._open(path, weights_only)
            if fitting:
                self._check_number_of_optimizers(opened)
        if isinstance(opened, ShardedCheckpoint):
            ranks = None if self.model is None else self.model.ranks
            owners = self._owners() if fitting else []
            return opened.load(ranks, self._is_sharded_here(), owners, with_optimizers=fitting)
        return opened

    def load_module(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Copies the state dict of a loaded checkpoint into the shards; see `load_state_dict`."""
        engine, module = self._engine(), self._strategy.lightning_module
        with raise_together("Loading the model's state"):
            if engine is None:
                assert module is not None
                module.load_state_dict(checkpoint["state_dict"], strict=strict)
            else:
                load_state_dict(engine.module, checkpoint["state_dict"], engine.model, strict=strict)
        if engine is not None:
            engine.parameters_changed()

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Copies the optimizer states of a loaded checkpoint into the optimizers; see `load_optimizer_state`."""
        self._check_number_of_optimizers(checkpoint)
        if not checkpoint["optimizer_states"]:  # saved before a training
            return
        engine = self._strategy.engine
        module, model = engine.module, engine.model
        pairs = []
        for optimizer, state in zip(self._optimizers(), filter(None, checkpoint["optimizer_states"]), strict=True):
            owner_of = functools.partial(engine.owner_of, optimizer)
            pairs.append((optimizer, whole_for_owners(optimizer, state, module, model, owner_of), owner_of))
        with raise_together("Loading the optimizers' states"):
            for optimizer, state, owner_of in pairs:
                offload = engine.offload_of(optimizer)
                load_optimizer_state(optimizer, state, module, model, owner_of, offload)
                engine.states_loaded(optimizer)

    def remove(self, filepath: str | os.PathLike[str]) -> None:
        """Removes a checkpoint of either kind, once earlier saves are complete; only rank 0 acts."""
        if not self._strategy.is_global_zero:
            return
        io = self._strategy.checkpoint_io
        if self._background is not None:
            self._background.remove(filepath, remove)
        elif isinstance(inner := _innermost(io), FileCheckpointIO) and inner is not io:
            inner.remove_after(self._saves, filepath)  # the outer plugin may save in a thread
        elif _is_plain(io) or find_kind(filepath) == "sharded":
            remove(filepath)
        else:
            io.remove_checkpoint(filepath)  # type: ignore[arg-type] # any path

    def _open(self, path: str | os.PathLike[str], weights_only: bool | None) -> ShardedCheckpoint | dict[str, Any]:
        kind = find_kind(path)
        try:
            if kind == "sharded":
                return ShardedCheckpoint.open(path, weights_only)
            if kind != "file" and _is_plain(self._strategy.checkpoint_io):
                missing = kind is None
                found = "there is nothing" if missing else f"the directory has no '{META}' (an interrupted save?)"
                raise (FileNotFoundError if missing else ValueError)(
                    f"The path {os.fspath(path)!r} does not point to a valid checkpoint: {found}. Make sure that it "
                    "points to a directory with a sharded checkpoint or to a file with a full one."
                )
            io = self._strategy.checkpoint_io
            checkpoint = io.load_checkpoint(path, weights_only=weights_only)  # type: ignore[arg-type] # any path
        except pickle.UnpicklingError as error:
            raise explain_weights_only(error, path) from error
        except (EOFError, RuntimeError) as error:
            raise ValueError(
                f"The path {os.fspath(path)!r} does not point to a valid checkpoint: it cannot be read (truncated?): "
                f"{error}"
            ) from error
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise ValueError(
                f"The path {os.fspath(path)!r} does not point to a valid checkpoint: the file has no 'state_dict'. It "
                "was not saved by a Trainer."
            )
        return checkpoint

    def _is_sharded_here(self) -> Callable[[str, torch.Size], bool]:
        """Returns a function that tells whether a tensor of a checkpoint is sharded like a parameter of this model."""
        engine = self._engine()
        if engine is None:
            return lambda name, shape: False
        shapes = {plain_name(o.fqn): p.layout.spec.shape for p in engine.model.parameters for o in p.owners}
        whole = {plain_name(name) for name in engine.module.state_dict()} - shapes.keys()

        def is_sharded(name: str, shape: torch.Size) -> bool:
            # What this model does not know may be a parameter that `on_load_checkpoint` is going to rename.
            name = plain_name(name)
            return name not in whole and shapes.get(name, shape) == shape

        return is_sharded

    def _owners(self) -> list[dict[str, int]]:
        """Maps, for each optimizer, parameter names to the shard rank that has all states of the parameter."""
        engine = self._engine()
        if engine is None:
            return []
        found = []
        for optimizer in self._optimizers():
            held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            owners = {p: engine.owner_of(optimizer, p.dtensor) for p in engine.model.parameters if p.dtensor in held}
            found.append(
                {plain_name(o.fqn): owner for p, owner in owners.items() if owner is not None for o in p.owners}
            )
        return found

    def _check_number_of_optimizers(self, checkpoint: ShardedCheckpoint | Mapping[str, Any]) -> None:
        if isinstance(checkpoint, ShardedCheckpoint):
            found = checkpoint.optimizers or None
        else:
            states = checkpoint.get("optimizer_states")
            found = len([state for state in states if state]) if states else None
        configured = len(self._optimizers())
        if found is not None and found != configured:
            raise RuntimeError(
                f"You have configured {configured} optimizers but the checkpoint contains {found} optimizers to load. "
                "Resume with the optimizers that it was saved with."
            )

    def _optimizers(self) -> list[Optimizer]:
        """The optimizers with a state: without any, Lightning has a stand-in, which saves nothing."""
        return [optimizer for optimizer in self._strategy.optimizers if not isinstance(optimizer, NoOptimizer)]

    def _whole(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Gathers weights that a callback put in place of the module's: their average is sharded, too."""
        state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
        if not state or not any(isinstance(value, DTensor) for value in state.values()):
            return checkpoint
        assert self.model is not None
        return checkpoint | {"state_dict": whole_state_dict(state, self.model, keep=self._strategy.is_global_zero)}

    def _with_known_precision_keys(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Adds the names under which other strategies look for the gradient scaler's state."""
        own = type(self._strategy.precision_plugin).__qualname__
        if not isinstance(checkpoint, dict) or own not in checkpoint:
            return checkpoint
        return checkpoint | dict.fromkeys(_PRECISION_KEYS, checkpoint[own])


def with_default(checkpoint_io: CheckpointIO | None) -> CheckpointIO:
    """Returns `checkpoint_io`, or the default if none is configured; also inside a wrapper like AsyncCheckpointIO."""
    if checkpoint_io is None:
        return FileCheckpointIO()
    if isinstance(checkpoint_io, WrappingCheckpointIO):
        checkpoint_io.checkpoint_io = FileCheckpointIO()  # ignored if there is one
    return checkpoint_io


def _is_plain(checkpoint_io: CheckpointIO) -> bool:
    """Returns whether checkpoints are plain files, and not in a format of a user's plugin."""
    return type(_innermost(checkpoint_io)) in (FileCheckpointIO, TorchCheckpointIO)


def _innermost(checkpoint_io: CheckpointIO) -> CheckpointIO:
    while isinstance(checkpoint_io, WrappingCheckpointIO) and checkpoint_io.checkpoint_io is not None:
        checkpoint_io = checkpoint_io.checkpoint_io
    return checkpoint_io
