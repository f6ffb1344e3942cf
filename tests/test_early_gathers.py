"""Gathers that open a step are launched when the optimizer has stepped; nobody's writes in between get lost."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import CASES, Record, assert_same_training, train
from multiprocess import RankError, run_ranks

STEPS = 6


class _Writes(pl.Callback):
    """Shrinks every parameter after each batch from `first` on, in one of the ways there are."""

    def __init__(self, way: str, first: int) -> None:
        self.way, self.first = way, first

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < self.first:
            return
        for parameter in module.parameters():
            if self.way == "data":
                parameter.data.mul_(0.9)
            else:
                with torch.no_grad():
                    parameter.mul_(0.9)


def _train(callbacks: list[pl.Callback], world_size: int = 2, strategy: Any = "auto", **arguments: Any) -> Record:
    rank = int(os.environ.get("RANK", "0"))
    data = {} if world_size > 1 else {"data_world": 2}
    return train(
        CASES["gpt_tied"],
        strategy,
        world_size=world_size,
        rank=rank,
        steps=STEPS,
        callbacks=callbacks,
        **data,
        **arguments,
    )


def _sharded(way: str, first: int, early: bool = True) -> Record:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    config = CompileConfig(region_backend="eager", early_gathers=early, schedule=None)
    strategy = DeepCompileStrategy(compile=config)
    return _train(
        [_Writes(way, first)],
        strategy=strategy,
        inspect=lambda trainer: trainer.strategy.engine._opening._early._safe,
    )


@pytest.mark.parametrize(
    ("way", "first", "safe"), [("no_grad", 0, True), ("no_grad", 3, True), ("data", 0, False), ("data", STEPS, True)]
)
def test_what_is_written_between_steps_is_not_lost(way: str, first: int, safe: bool) -> None:
    """`safe`: what the ranks make of it; a model that is never looked at with equal counts stays unknown."""
    expected = _train([_Writes(way, first)], world_size=1)
    for record in run_ranks(_sharded, 2, way, first):
        assert_same_training(record, expected, params=True)
        assert record.extra == (None if way == "no_grad" and first == 0 else safe)


def test_uncounted_writes_that_begin_late_end_training() -> None:
    with pytest.raises(RankError, match="early_gathers=False"):
        run_ranks(_sharded, 2, "data", 3, timeout=90)
    expected = _train([_Writes("data", 3)], world_size=1)
    for record in run_ranks(_sharded, 2, "data", 3, early=False):
        assert_same_training(record, expected, params=True)


def _counted(early: bool) -> tuple[Any, list[tuple[str, int]]]:
    """A summary, and how many groups had been gathered by the start of each step."""
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    starts: list[tuple[int, int]] = []

    class Starts(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            starts.append((batch_idx, trainer.strategy.engine.runtime.stats()["gather_groups"]))

    config = CompileConfig(region_backend="eager", early_gathers=early, schedule=None)
    strategy = DeepCompileStrategy(compile=config)
    record = _train([Starts()], strategy=strategy, inspect=lambda trainer: trainer.strategy.summary())
    return record.extra, starts


def test_they_are_under_way_before_the_step_and_counted_with_it() -> None:
    (late, late_starts), (early, early_starts) = (run_ranks(_counted, 2, early)[0] for early in (False, True))
    per_step = late.gather_groups_per_step
    assert early.gather_groups_per_step == per_step
    assert [count for _, count in late_starts] == [per_step * step for step in range(STEPS)]
    opening = 3  # the embedding, and two blocks ahead
    # Nothing is launched early before it is known that nobody writes, which is when the second step begins.
    assert [count - per_step * step for step, count in early_starts] == [0, 0, *[opening] * (STEPS - 2)]
