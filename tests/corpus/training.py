"""Trains modules of the corpus, one after another in the same ranks; one that fails is named, and the others go on."""

from __future__ import annotations

import functools
import os
import pickle
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from cases import Record, assert_close, full
from lightning.pytorch.strategies import DDPStrategy
from multiprocess import RankError, run_ranks
from torch.utils.data import DataLoader

from corpus.case import CASES, Case

__all__ = ["How", "assert_trains_alike", "reference", "train_on_ranks"]

How = Literal["single", "ddp", "eager", "inductor", "uncompiled"]
"""One process; whole parameters on two ranks; or sharded, with these regions, or with nothing compiled."""

_WAIT = timedelta(seconds=60)


class _Recorder(pl.Callback):
    """Losses, and parameters and buffers at the end. Random numbers begin anew with each batch, on each rank."""

    def __init__(self, rank: int) -> None:
        self.record, self.rank = Record(), rank

    def on_train_batch_start(self, *args: Any) -> None:
        step = len(self.record.losses)
        random.seed(step)
        np.random.seed(step)
        torch.manual_seed(100 * step + self.rank)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        loss = outputs["loss"].detach().clone() if outputs else torch.zeros(())
        self.record.losses.append(float(trainer.strategy.reduce(loss)))

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.record.params = {name: full(p) for name, p in module.named_parameters()}
        self.record.buffers = {name: full(b) for name, b in module.named_buffers()}


def _strategy(how: How) -> Any:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    if how == "single":
        return "auto"
    if how == "ddp":
        return DDPStrategy(
            find_unused_parameters=True, broadcast_buffers=False, process_group_backend="gloo", timeout=_WAIT
        )
    backend: Any = "inductor" if how == "inductor" else "eager"
    return DeepCompileStrategy(compile=CompileConfig(region_backend=backend), timeout=_WAIT)


def train(case: Case, how: How) -> Record:
    """Trains a module anew, as this rank, or by itself on all ranks' batches."""
    rank, world = (0, 1) if how == "single" else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(3)
    module, recorder = case.build(), _Recorder(rank)
    if how == "uncompiled":
        module.training_step = torch.compiler.disable(module.training_step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            strategy=_strategy(how), accelerator="cpu", devices=world, max_epochs=case.epochs, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, callbacks=[recorder], **case.trainer,
        )  # fmt: skip
        trainer.fit(module, DataLoader(case.batches(rank, world), batch_size=None))
    return recorder.record


def _train_all(names: list[str], how: How, folder: str) -> None:
    for number, name in enumerate(names):
        path = Path(folder, f"{number}.{os.environ['RANK']}")
        try:
            record = train(CASES[name], how)
        except Exception:
            path.write_bytes(pickle.dumps(traceback.format_exc()))
            raise  # what it has left behind on this rank or another is none of the next module's business
        path.write_bytes(pickle.dumps(record))
        torch._dynamo.reset()


def train_on_ranks(names: list[str], how: How) -> dict[str, list[Record] | str]:
    """Returns the records of modules on both ranks, or errors. A failed module ends its ranks; the rest get new ones.

    Args:
        names: Of modules.
        how: How they are trained.
    """
    results: dict[str, list[Record] | str] = {}
    while left := [name for name in names if name not in results]:
        failed = ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks(_train_all, 2, left, how, folder, timeout=60 + (60 if how == "inductor" else 10) * len(left))
            except RankError as error:
                failed = str(error)
            for number, name in enumerate(left):
                paths = [Path(folder, f"{number}.{rank}") for rank in range(2)]
                found = [pickle.loads(path.read_bytes()) for path in paths if path.exists()]
                if len(found) < 2 or any(isinstance(value, str) for value in found):
                    results[name] = failed
                    break
                results[name] = found
    return results


@functools.cache
def reference(name: str) -> Record:
    """Returns the record of the module in one process."""
    return train(CASES[name], "single")


def assert_trains_alike(actual: Record, expected: Record, *, buffers: bool) -> None:
    """Losses of all steps, and what is trained, within a relative 1e-5."""
    assert len(actual.losses) == len(expected.losses) > 0
    assert_close(torch.tensor(actual.losses), torch.tensor(expected.losses), "losses")
    compared: list[Callable[[Record], dict[str, Any]]] = [lambda record: record.params]
    if buffers:
        compared.append(lambda record: record.buffers)
    for part in compared:
        assert part(actual).keys() == part(expected).keys()
        for name, value in part(expected).items():
            assert_close(part(actual)[name], value, name)
