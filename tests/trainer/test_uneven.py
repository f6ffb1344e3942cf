"""Ranks with different numbers of batches, or that do alone what all must do."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import Tokens, train
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop as PredictionLoop
from lightning.pytorch.strategies import DDPStrategy
from multiprocess import run_ranks, said
from test_handover import Small, trainer_of
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset
from torchmetrics import MeanMetric

WORLD = 2


def _fit(
    rank: int, batches: int, stage: int, module: pl.LightningModule | None = None, callbacks: Sequence[pl.Callback] = ()
) -> tuple[str, float]:
    """Returns the error that `fit` ends with, and the seconds since rank 0 began its last batch."""
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    strategy = DeepCompileStrategy(stage=stage, compile=CompileConfig(region_backend="eager"))
    trainer = trainer_of(strategy, *callbacks)
    data = DataLoader(Subset(Tokens(8, 4, rank, WORLD), range(2 * batches)), batch_size=2)
    torch.manual_seed(3)
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(module or Small(), data)
    if rank == 0:  # it keeps the store
        time.sleep(1)
    return said(str(raised.value)), time.monotonic() - begun


def _fewer(stage: int) -> tuple[str, float]:
    rank = int(os.environ["RANK"])
    return _fit(rank, 8 - rank, stage)


def test_lightning_calls_what_our_loops_add_to() -> None:
    """Else ranks would evaluate without asking each other, and nobody would notice."""
    run, predict = (inspect.getsource(loop).partition("def setup_data")[0] for loop in (EvaluationLoop, PredictionLoop))
    assert run.index("self._evaluation_step(batch") < run.index(
        "        self._store_dataloader_outputs()\n        return"
    )
    assert "self._predict_step(batch" in predict
    assert predict.rstrip().endswith("return self.on_run_end()")


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.extensive), 3])
def test_a_rank_with_fewer_batches_is_named_at_once(stage: int) -> None:
    for message, _ in run_ranks(_fewer, WORLD, stage, timeout=60):
        assert "Rank 0 is in training batch 8 of the epoch and rank 1 has left the epoch after 7 batches" in message
        assert "limit_train_batches" in message


class _RunsAlone(pl.Callback):
    """The first rank generates a sample in a hook."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 5:
            module.layers[0](torch.zeros(1, 13))


class _SavesAlone(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 5:
            trainer.save_checkpoint("never.ckpt")


class _SkipsAlone(Small):
    """Steps unless it finds a value that only one rank sees."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if batch_idx == 4 and self.global_rank == 1:
            return
        optimizer.step()


def _alone(case: str, stage: int) -> tuple[str, float]:
    rank = int(os.environ["RANK"])
    callbacks = {"runs": [_RunsAlone()], "saves": [_SavesAlone()]}.get(case, [])
    return _fit(rank, 8, stage, _SkipsAlone() if case == "skips" else None, callbacks)


@pytest.mark.parametrize(
    ("case", "stage", "told"),
    [
        ("runs", 3, "Rank 1 is in training batch 6 of the epoch and rank 0 calls a module of the model outside"),
        pytest.param(
            *("runs", 1, "Rank 1 is in training batch 6 of the epoch and rank 0 calls a module of the model outside"),
            marks=pytest.mark.extensive,
        ),
        ("saves", 3, "Rank 1 is in training batch 6 of the epoch and rank 0 collects the model's state"),
        ("skips", 3, "Rank 1 has made 4 optimizer steps, rank 0 5"),
    ],
)
def test_what_one_rank_does_alone_is_named_at_once(case: str, stage: int, told: str) -> None:
    for message, _ in run_ranks(_alone, WORLD, case, stage, timeout=60):
        assert told in message, message


class _Evaluated(Small):
    """All steps; what they see and give is kept."""

    def __init__(self, reduces: bool) -> None:
        super().__init__()
        self.mean, self.reduces = MeanMetric(), reduces
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.seen: list[Any] = []

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = F.cross_entropy(self.logits(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.seen.append((dataloader_idx, batch_idx, loss.detach()))
        if not self.reduces:
            return loss
        self.mean.update(loss)
        self.log("val", loss, sync_dist=True, batch_size=len(batch))
        self.log("mean", self.mean)
        return loss

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.logits(batch)


class _Stream(IterableDataset[Tensor]):
    """Batches of unknown number."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class _Calls(pl.Callback):
    """Runs the model behind each batch, as do users who log samples."""

    def on_validation_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        module.seen.append(module.layers[0](torch.ones(1, 13)).sum().item())


def _loaders(batches: list[int], rank: int, iterable: bool) -> list[DataLoader[Tensor]]:
    loaders = []
    for place, count in enumerate(batches):
        rows = list(torch.utils.data.default_collate([t]) for t in Tokens(9, 4, rank, WORLD))[place : place + count]
        loaders.append(DataLoader(_Stream(rows) if iterable else rows, batch_size=None))
    return loaders


def _evaluated(strategy: Any, by_rank: list[list[int]], iterable: bool, fits: bool) -> list[Any]:
    """Results of all entries on one rank, around a training of one epoch."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(3)
    module = _Evaluated(reduces=[0] not in by_rank)  # which a rank without any batch does not, under DDP either
    trainer = trainer_of(strategy, _Calls(), max_epochs=2)
    train = DataLoader(Tokens(4, 4, rank, WORLD), batch_size=2)
    results: list[Any] = []
    if fits:
        trainer.fit(module, train, _loaders(by_rank[rank], rank, iterable))
        results.append({key: float(value) for key, value in trainer.callback_metrics.items()})
    results.append(trainer.validate(module, _loaders(by_rank[rank], rank, iterable), verbose=False))
    results.append(trainer.test(module, _loaders(by_rank[rank], rank, iterable), verbose=False))
    results += trainer.predict(module, _loaders(by_rank[rank], rank, iterable)) or []
    return [*results, *module.seen]


# Stage, numbers of batches of each rank, whether loaders are iterable alone, and whether a training comes first.
UNEVEN: dict[str, tuple[int, list[list[int]], bool, bool]] = {
    "streams": (2, [[4], [2]], True, True),
    "none": (3, [[0], [2]], False, False),
}
if "TEST_ALL" in os.environ:  # all are done in one launch
    UNEVEN |= {"lists": (3, [[3], [5]], False, True), "several": (3, [[3, 1, 2], [1, 3, 2]], True, True)}


def _both() -> dict[str, tuple[list[Any], list[Any]]]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    results = {}
    for name, (stage, *case) in UNEVEN.items():
        sharded = DeepCompileStrategy(stage=stage, compile=CompileConfig(region_backend="eager", schedule=None))
        ours = _evaluated(sharded, *case)
        results[name] = ours, _evaluated(DDPStrategy(find_unused_parameters=True), *case)
    return results


def test_evaluation_of_uneven_loaders_is_that_of_ddp() -> None:
    for results in run_ranks(_both, WORLD, timeout=200):
        for name, (actual, expected) in results.items():
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


class _IsLate(pl.Callback):
    """The host of the last rank is in a hook for a while; what is logged meanwhile is kept."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, batch: Any, output: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank == 1:
            time.sleep(6)

    def __call__(self, record: logging.LogRecord) -> bool:
        self.told.append(record.getMessage())
        return True


def _late() -> list[str]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    late = _IsLate()
    logging.getLogger("lightning_deepcompile.ranks.watch").addFilter(late)
    config = CompileConfig(region_backend="eager", schedule=None)
    strategy = DeepCompileStrategy(compile=config, wait_report=timedelta(seconds=2))
    train(Small, strategy, world_size=WORLD, rank=int(os.environ["RANK"]), steps=4, callbacks=[late])
    return late.told


def test_where_ranks_are_is_told_after_a_while() -> None:
    messages = [message for told in run_ranks(_late, WORLD, timeout=60) for message in told]
    assert messages  # by one rank, or by both if they ask at the same time
    for message in messages:
        assert "rank 0 is in training batch 4 of the epoch" in message, messages
        assert "rank 1 is in training batch 3 of the epoch, at " in message
        assert "test_uneven.py" in message and "in `on_train_batch_end`" in message
