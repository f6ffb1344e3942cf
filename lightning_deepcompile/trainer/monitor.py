"""Logs times, memory and use of the device to the Trainer's loggers while training runs."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.options import checked
from lightning_deepcompile.plan.report import Round
from lightning_deepcompile.trainer.strategy import DeepCompileStrategy

_GIB = 2**30


@dataclass
class _Interval:
    """The counts since the last figures.

    Args:
        since: When it began, by the host's clock.
        flops: What the compiled programs had computed by then.
        step: Optimizer steps done by then.
        paused: Seconds outside of training: validation, say.
        host: Seconds that the host took for batches.
        samples: Rows of batches on this rank.
        tokens: Tokens of batches on this rank; 0 where batches have none.
    """

    since: float
    flops: int
    step: int
    paused: float = 0.0
    host: float = 0.0
    samples: int = 0
    tokens: int = 0


@checked
class DeepCompileMonitor(pl.Callback):
    """Logs the cost of training steps, every ``log_every_n_steps`` optimizer steps of the Trainer.

    The figures are of this rank, except for samples and tokens a second, which are those of all ranks if all have
    batches of one size. They are means over the steps since the last ones. Steps in which something is compiled are
    left out, as are validation and what else interrupts training.

    ========================  ==========================================================================================
    ``step_ms``               Milliseconds of an optimizer step, the wait for data included.
    ``host_ms``               Of these, what the host took for its batches. Near ``step_ms``, the host is slow, or waits
                              for the device.
    ``exposed_ms``            Milliseconds of a step in which compute waits for communication: as measured with the
                              first programs, as predicted with a plan's. Missing until steps were measured.
    ``peak_gib``              The most device memory in use since the model was sharded (GPUs).
    ``reserved_gib``          Device memory that PyTorch's allocator holds (GPUs).
    ``host_gib``              The most memory that this process has had on the host.
    ``moved_gib``             Copied between device and host by the last step: optimizer states, activations, shards.
    ``recompilations``        Graphs of training steps that were captured after the first optimizer step, so far.
    ``samples_per_s``         Rows of batches a second.
    ``tokens_per_s``          Tokens a second; missing where batches have none.
    ``tflops``                10¹² floating-point operations a second: matrix products, convolutions and attention in
                              compiled graphs. What checkpointing computes again does not count.
    ``mfu``                   ``tflops`` as a part of what the device can do in this precision; missing where Lightning
                              does not know the device.
    ========================  ==========================================================================================

    Args:
        prefix: Stands before each name.
        tokens: Counts a batch's tokens. None: the elements of ``input_ids``, or of the largest tensor of integers with
            two dimensions or more.

    Attributes:
        latest: The last figures, by name without prefix; empty before there are any.

    Raises:
        MisconfigurationException: In `setup`, if the Trainer has another strategy.
    """

    def __init__(self, prefix: str = "deepcompile/", tokens: Callable[[Any], int] | None = None) -> None:
        super().__init__()
        self._prefix = prefix
        self._tokens = tokens or _count_tokens
        self.latest: dict[str, float] = {}
        self._available: int | None = None
        self._interval = _Interval(0.0, 0, 0)
        self._began = self._stopped = 0.0
        self._graphs = self._recompilations = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Checks that there is something to measure."""
        if not isinstance(trainer.strategy, DeepCompileStrategy):
            raise MisconfigurationException(
                f"DeepCompileMonitor measures DeepCompileStrategy, not {type(trainer.strategy).__name__}: use "
                'Trainer(strategy="deepcompile"), or Lightning\'s ThroughputMonitor.'
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts counting."""
        strategy = _strategy(trainer)
        if strategy.root_device.type == "cuda":
            dtype = strategy.mixed_precision_config.param_dtype or torch.float32
            self._available = get_available_flops(strategy.root_device, dtype)
        self._recompilations = 0
        self._restart(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Records the start of a batch."""
        self._graphs = _strategy(trainer).engine.capture.frames.captured
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts a batch, and logs if it is time."""
        now, interval, engine = time.perf_counter(), self._interval, _strategy(trainer).engine
        if new := engine.capture.frames.captured - self._graphs:
            if trainer.global_step > 1:
                self._recompilations += new
            self._restart(trainer)
            return
        interval.host += now - self._began
        interval.samples += next((len(leaf) for leaf in _tensors(batch) if leaf.ndim), 0)
        interval.tokens += self._tokens(batch)
        steps = trainer.global_step - interval.step
        if steps and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined] # undeclared
            self.latest = self._figures(trainer, engine, steps, now - interval.since - interval.paused)
            for logger in trainer.loggers:
                named = {f"{self._prefix}{name}": value for name, value in self.latest.items()}
                logger.log_metrics(named, step=trainer.global_step)
            self._restart(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pauses the count of training time."""
        self._stopped = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Resumes the count of training time."""
        self._interval.paused += time.perf_counter() - self._stopped

    def _restart(self, trainer: pl.Trainer) -> None:
        done = _strategy(trainer).engine.capture.frames.flops_done
        self._interval = _Interval(time.perf_counter(), done, trainer.global_step)

    def _figures(self, trainer: pl.Trainer, engine: Engine, steps: int, seconds: float) -> dict[str, float]:
        interval, summary, device = self._interval, engine.summary(), engine.device
        moved = summary.offload_moved_bytes + 2 * summary.offloaded_activation_bytes + summary.fetched_parameter_bytes
        figures: dict[str, float] = {
            "step_ms": seconds / steps * 1e3,
            "host_ms": interval.host / steps * 1e3,
            "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB,
            "moved_gib": moved / _GIB,
            "recompilations": self._recompilations,
            "samples_per_s": interval.samples * trainer.world_size / seconds,
        }
        if interval.tokens:
            figures["tokens_per_s"] = interval.tokens * trainer.world_size / seconds
        if (exposed := _exposed(engine.report())) is not None:
            figures["exposed_ms"] = exposed * 1e3
        if device.type == "cuda":
            figures["peak_gib"] = summary.peak_bytes / _GIB
            figures["reserved_gib"] = torch.cuda.memory_reserved(device) / _GIB
        if flops := engine.capture.frames.flops_done - interval.flops:
            figures["tflops"] = flops / seconds / 1e12
            if self._available:
                figures["mfu"] = flops / seconds / self._available
        return figures


def _strategy(trainer: pl.Trainer) -> DeepCompileStrategy:
    strategy = trainer.strategy
    assert isinstance(strategy, DeepCompileStrategy)
    return strategy


def _exposed(rounds: list[Round]) -> float | None:
    """Seconds of a step in which compute waits for communication; None before steps were measured."""
    if not rounds:
        return None
    last = rounds[-1]
    planned = last.outcome not in ("reverted", "unchanged") and last.passes
    return last.passes[-1].exposed_seconds if planned else last.before_exposed_seconds


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append)
    return found


def _count_tokens(batch: Any) -> int:
    if isinstance(batch, Mapping) and isinstance(named := batch.get("input_ids"), Tensor):
        return named.numel()
    integers = [t for t in _tensors(batch) if t.ndim > 1 and t.dtype in (torch.int32, torch.int64)]
    return max((tensor.numel() for tensor in integers), default=0)
