"""Steps compute with what was written to parameters before them, by whichever means."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import Base, Mlp, Record, assert_same_training, gpt, train
from multiprocess import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

STEPS = 6


class _Writes(pl.Callback):
    """Shrinks every parameter with each batch from `first` on: after it, or in a hook of the optimizer's step.

    The way ``"permuted"`` turns the rows round instead, which no sum shows.
    Or, the way ``"first rank"``, the shards of that rank alone, with every other batch.
    """

    def __init__(self, way: str, first: int, inside: bool = False) -> None:
        self.way, self.first, self.inside = way, first, inside

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if self.inside:
            trainer.optimizers[0].register_step_post_hook(lambda *_: self._write(module, trainer.global_step))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.inside:
            self._write(module, batch_idx)

    def _write(self, module: Any, step: int) -> None:
        if step < self.first:
            return
        for parameter in module.parameters():
            if self.way == "first rank":
                if step % 2 and int(os.environ["RANK"]) == 0:
                    with torch.no_grad():
                        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).mul_(0.9)
            elif self.way == "data":
                parameter.data.mul_(0.9)
            elif self.way in ("permuted", "uncounted"):
                values = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).data
                if self.way == "uncounted":
                    values.mul_(0.9)
                elif values.dim() > 1:  # every sum is left as it is
                    values.copy_(values.flip(-1))
            else:
                with torch.no_grad():
                    parameter.mul_(0.9)


class Shallow(Mlp):
    """A single one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers[1:]


def _train(
    callbacks: list[pl.Callback],
    world_size: int = 2,
    strategy: Any = "auto",
    build: Callable[[], Base] = Shallow,
    **arguments: Any,
) -> Record:
    rank = int(os.environ.get("RANK", "0"))
    data = {} if world_size > 1 else {"data_world": 2}
    return train(
        build, strategy, world_size=world_size, rank=rank, steps=STEPS, callbacks=callbacks, **data, **arguments
    )


def _sharded(way: str, first: int, inside: bool = False, stage: int = 3, **options: Any) -> Record:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    config = CompileConfig(region_backend="eager", schedule=None)
    strategy = DeepCompileStrategy(stage=stage, compile=config)
    return _train([_Writes(way, first, inside)], strategy=strategy, **options)


WRITES = [
    ("no_grad", 3, False),
    ("data", 3, True),
    ("uncounted", 3, False),
    ("uncounted", 0, True),
    ("permuted", 0, False),
]
"""The way to write, the first step, whether inside of the optimizer's step."""
if "TEST_ALL" in os.environ:  # the first test trains all of them
    ways = ("no_grad", "data", "uncounted")
    every = [(way, first, inside) for way in ways for first in (0, 3) for inside in (False, True)]
    WRITES += [one for one in every if one not in WRITES]


def _all_writes() -> list[Record]:
    return [_sharded(*writes) for writes in WRITES]


@functools.cache
def _written() -> list[list[Record]]:
    return run_ranks(_all_writes, 2)


@pytest.mark.xdist_group("writes")
@pytest.mark.parametrize("number", range(len(WRITES)), ids=[f"{w}-{first}-{inside}" for w, first, inside in WRITES])
def test_what_is_written_between_steps_is_not_lost(number: int) -> None:
    expected = _train([_Writes(*WRITES[number])], world_size=1)
    for records in _written():
        assert_same_training(records[number], expected, params=True)


def _written_by_one(inside: bool) -> list[Record]:
    """A training that gathers in every micro-batch, and those of stages that keep parameters in between."""
    options = {"accumulate": 3, "build": gpt(tied=True, layers=1)}
    stages = [3, 1] + [2] * ("TEST_ALL" in os.environ)
    return [_sharded("first rank", 2, inside, stage=stage, **options) for stage in stages]


@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.extensive), True])
def test_one_rank_may_write_alone(inside: bool) -> None:
    """Gathers are then out of date on all ranks, also between the micro-batches of a step."""
    for expected, *records in run_ranks(_written_by_one, 2, inside):
        for record in records:
            assert_same_training(record, expected, params=True)


class _WritesInside(Shallow):
    """Shrinks its parameters in the course of a step, in code that is not compiled."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._shrink()
        return super().training_step(batch, batch_idx)

    @torch.compiler.disable
    def _shrink(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


def _train_inside() -> Record:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager", schedule=None))
    return train(_WritesInside, strategy, world_size=2, rank=int(os.environ["RANK"]), steps=STEPS)


def test_writes_inside_of_a_step_are_what_the_rest_of_it_computes_with() -> None:
    expected = train(_WritesInside, "auto", world_size=1, rank=0, data_world=2, steps=STEPS)
    for record in run_ranks(_train_inside, 2):
        assert_same_training(record, expected, params=True)
