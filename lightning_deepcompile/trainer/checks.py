"""Checks a Trainer's parts: those that do not work with sharded parameters are refused, or a warning is issued."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_deepcompile.compat.lightning import callbacks_of, records_modules


def check_trainer(trainer: pl.Trainer) -> None:
    """Checks a Trainer's callbacks and profiler.

    Args:
        trainer: The Trainer that is about to run.

    Raises:
        MisconfigurationException: For callbacks that would silently compute with parts of parameters.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, StochasticWeightAveraging):
            raise MisconfigurationException(
                f"The callback {type(callback).__name__} averages whole parameters, but under DeepCompileStrategy "
                "each rank holds a part of every one. Use WeightAveraging or EMAWeightAveraging."
            )
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                f"The callback {type(callback).__name__} puts masks beside whole parameters, but under "
                "DeepCompileStrategy each rank holds a part of every one, and steps would not see the masks. Prune "
                "the model with `torch.nn.utils.prune` before or after the training."
            )
    profiler = trainer.profiler  # type: ignore[attr-defined] # its class does not declare it
    if isinstance(profiler, PyTorchProfiler) and records_modules(profiler):
        rank_zero_warn(
            "PyTorchProfiler's hooks on every module break the step's graph at every module. Use "
            "`PyTorchProfiler(record_module_names=False)` to profile what runs without it."
        )


def check_backward_inputs(module: pl.LightningModule, arguments: dict[str, Any]) -> None:
    """Removes ``inputs=`` from a backward pass's arguments, if it names only tensors that get gradients anyway.

    Args:
        module: The module that is trained.
        arguments: Keyword arguments for ``Tensor.backward``.

    Raises:
        MisconfigurationException: If it names anything else: compiled programs reduce all gradients that they compute.
    """
    if arguments.get("inputs") is None:
        return
    inputs = arguments.pop("inputs")
    named = {inputs} if isinstance(inputs, Tensor) else set(inputs)
    if named != {parameter for parameter in module.parameters() if parameter.requires_grad}:
        raise MisconfigurationException(
            f"backward(inputs=...) names {len(named)} tensors, and not all trainable parameters: under "
            "DeepCompileStrategy a compiled program computes and reduces the gradients of all of them. Switch off the "
            "others before the step (`toggle_optimizer`, `requires_grad_(False)`)."
        )


def may_drop_gradients(module: pl.LightningModule | None) -> bool:
    """Returns whether gradients may be freed before the forward pass instead of right after it: nobody can tell.

    Lightning calls ``zero_grad`` between forward and backward; the forward pass would have to hold the memory of the
    last step's gradients.
    """
    assert module is not None
    return (
        module.automatic_optimization
        and not is_overridden("on_before_zero_grad", module)
        and not is_overridden("optimizer_zero_grad", module)
        and not any(is_overridden("on_before_zero_grad", c, pl.Callback) for c in callbacks_of(module.trainer))
    )
