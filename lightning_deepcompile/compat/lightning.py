"""Lightning 2.6: launchers, process groups, loops, optimizers, averages and precision; imported by itself.

Seen to work with Lightning 2.6.6.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import lightning.pytorch as pl
from lightning.fabric.plugins.precision.utils import _DtypeContextManager as DefaultDtype
from lightning.fabric.utilities import imports
from lightning.fabric.utilities.distributed import _distributed_is_initialized as is_distributed
from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device as default_backend
from lightning.fabric.utilities.distributed import _init_dist_connection as init_process_group
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as divide_threads
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_over_ranks
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.core.optimizer import _MockOptimizer as NoOptimizer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher as DataFetcher
from lightning.pytorch.loops.prediction_loop import _PredictionLoop as PredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as SubprocessLauncher
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector as SignalConnector
from torch import nn
from torch.optim import Optimizer

__all__ = [
    "DataFetcher",
    "DefaultDtype",
    "EvaluationLoop",
    "NoOptimizer",
    "PredictionLoop",
    "SignalConnector",
    "SubprocessLauncher",
    "TrainingEpochLoop",
    "WrappingCheckpointIO",
    "average_device",
    "average_of",
    "callbacks_of",
    "default_backend",
    "divide_threads",
    "init_process_group",
    "is_distributed",
    "is_interactive",
    "optimizers_to_device",
    "records_modules",
    "reduce_over_ranks",
    "signal_connector",
    "wrap_optimizer",
]

OptimizerT = TypeVar("OptimizerT", bound=LightningOptimizer)


def is_interactive() -> bool:
    """Returns whether this is a notebook or an interactive session, as Lightning sees it."""
    return imports._IS_INTERACTIVE


def signal_connector(trainer: pl.Trainer) -> SignalConnector:
    """The object that listens to signals for `trainer`."""
    return trainer._signal_connector


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The callbacks of `trainer`, which its class does not declare."""
    return trainer.callbacks  # type: ignore[attr-defined]


def wrap_optimizer(kind: type[OptimizerT], optimizer: Optimizer, strategy: Any) -> OptimizerT:
    """Wraps `optimizer` as modules see it under manual optimization: in a `kind` of LightningOptimizer."""
    return cast(OptimizerT, kind._to_lightning_optimizer(optimizer, strategy))


def average_of(callback: WeightAveraging) -> nn.Module | None:
    """The model in which a callback keeps the averages; None before it has one."""
    return callback._average_model


def average_device(callback: WeightAveraging) -> Any:
    """The device that the user chose for the averages; None: that of the parameters."""
    return callback._device


def records_modules(profiler: PyTorchProfiler) -> bool:
    """Returns whether a profiler hooks every module's forward."""
    return profiler._record_module_names
