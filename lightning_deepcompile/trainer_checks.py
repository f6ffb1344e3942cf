"""Parts of a Trainer that do not go with sharded parameters: refused, or warned of, before training starts."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

__all__ = ["check_trainer"]


def check_trainer(trainer: pl.Trainer) -> None:
    """Looks at a Trainer's callbacks and profiler.

    Args:
        trainer: The Trainer that is about to run.

    Raises:
        MisconfigurationException: For callbacks that would silently compute with parts of parameters.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise MisconfigurationException(
                f"The callback {type(callback).__name__} averages whole parameters, but under DeepCompileStrategy "
                "each rank holds a part of every one. Remove the callback."
            )
    if isinstance(trainer.profiler, PyTorchProfiler) and trainer.profiler._record_module_names:
        rank_zero_warn(
            "PyTorchProfiler's hooks on every module break the step's graph at every module. Use "
            "`PyTorchProfiler(record_module_names=False)` to profile what runs without it."
        )
