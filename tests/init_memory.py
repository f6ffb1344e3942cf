"""Measures the peak of memory while a model is built and sharded, from inside of a Trainer."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from multiprocess import devices
from torch import nn
from torch.distributed.tensor import DTensor

PAGE = 4096


@dataclass
class Peak:
    """Bytes that one rank took for a model at most, beyond what it had before.

    Args:
        host: Of resident host memory.
        device: That were asked of the CUDA allocator; 0 without one.
        shard: Of the parameters that it keeps.
    """

    host: int
    device: int
    shard: int


class _HostPeak(threading.Thread):
    """Reads the resident memory every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = resident_bytes()
        self.over = False

    def run(self) -> None:
        while not self.over:
            self.most = max(self.most, resident_bytes())
            time.sleep(0.002)


def resident_bytes() -> int:
    """This process's resident memory, less what files are mapped to (libraries that are loaded on first use)."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * PAGE


def _return_freed_memory() -> None:
    """Gives back to the system what malloc keeps: the model would take it without a sign in the resident memory."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc's
        libc.malloc_trim(0)


def peak_of_init(module: pl.LightningModule, strategy: Any, accelerator: str) -> Peak:
    """Lets a Trainer build and shard `module` with its optimizers, and stop there.

    Args:
        module: Builds its layers in `configure_model`.
        strategy: Lightning strategy.
        accelerator: ``"cpu"`` or ``"gpu"``.
    """
    _stop_after_setup(Tiny(), strategy(), accelerator)  # loads what is loaded on first use, and starts communicators
    _return_freed_memory()
    watch = _HostPeak()
    before = watch.most
    if accelerator == "gpu":
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
    watch.start()
    _stop_after_setup(module, strategy(), accelerator)
    watch.over = True
    watch.join()
    device = 0
    if accelerator == "gpu":
        device = torch.cuda.memory_stats()["requested_bytes.all.peak"] - allocated
    parameters = [p for p in module.parameters() if isinstance(p, DTensor)]
    return Peak(watch.most - before, device, sum(p.to_local().nbytes for p in parameters))


class Tiny(pl.LightningModule):
    """A model of one layer, without memory until it is sharded."""

    def configure_model(self) -> None:
        if not hasattr(self, "layer"):
            with self.trainer.init_module(empty_init=True):
                self.layer = nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _stop_after_setup(module: pl.LightningModule, strategy: Any, accelerator: str) -> None:
    trainer = pl.Trainer(
        strategy=strategy, accelerator=accelerator, **devices(int(os.environ["WORLD_SIZE"])), max_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(2, 8)))
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
