"""The hooks through which Lightning saves and loads checkpoints, for a strategy whose model is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import BaseFinetuning
from torch.optim import Optimizer

from lightning_deepcompile.averaging import distribute_states, is_averaged
from lightning_deepcompile.checkpoint import Checkpoints, with_default
from lightning_deepcompile.processes import ProcessStrategy

__all__ = ["CheckpointStrategy"]


class CheckpointStrategy(ProcessStrategy):
    """Base that hands checkpoints to a `Checkpoints` object, which a subclass sets as ``_checkpoints``."""

    _checkpoints: Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded into shards, which exist after setup."""
        return True

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Reads and writes full checkpoints."""
        self._checkpoint_io = with_default(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict: full on rank 0 and empty on others, or sharded; all ranks must call it."""
        return self._checkpoints.module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict: full on rank 0 and empty on others, or sharded; all ranks must call it."""
        return self._checkpoints.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Saves a full or sharded checkpoint; all ranks must call it."""
        self._checkpoints.save(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a full or sharded checkpoint, which this strategy, FSDP or a single device saved."""
        checkpoint = self._checkpoints.load(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        model = self._checkpoints.model
        if model is not None and is_averaged(self.lightning_module.trainer):
            distribute_states(checkpoint, model, self.lightning_module)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Copies a checkpoint's state dict into the shards."""
        self._checkpoints.load_module(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Copies a checkpoint's optimizer states into the optimizers."""
        module = self.lightning_module
        assert module is not None
        for callback in module.trainer.callbacks:
            if isinstance(callback, BaseFinetuning):
                # Adds the parameter groups of the layers that it has thawed before. Lightning has called it already,
                # but gives callbacks their state only now, as checkpoints are loaded after setup.
                BaseFinetuning.on_fit_start(callback, module.trainer, module)
        self._checkpoints.load_optimizers(checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a full or sharded checkpoint."""
        self._checkpoints.remove(filepath)
