"""Gathers that open a step are launched when the optimizer has stepped; nobody's writes in between get lost."""

from __future__ import annotations

import functools
import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import CASES, Mlp, Record, assert_same_training, same_bits_every_time, train
from multiprocess import RankError, run_ranks
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


class _Late(pl.Callback):
    """Has steps launch all their gathers themselves."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        trainer.strategy.engine.timeline.prefetch.may_be_early = False


def _when(early: bool) -> list[pl.Callback]:
    return [] if early else [_Late()]


def _train(
    callbacks: list[pl.Callback], world_size: int = 2, strategy: Any = "auto", case: str = "mlp", **arguments: Any
) -> Record:
    rank = int(os.environ.get("RANK", "0"))
    data = {} if world_size > 1 else {"data_world": 2}
    return train(
        CASES[case],
        strategy,
        world_size=world_size,
        rank=rank,
        steps=STEPS,
        callbacks=callbacks,
        **data,
        **arguments,
    )


def _sharded(way: str, first: int, inside: bool = False, early: bool = True, stage: int = 3, **options: Any) -> Record:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    config = CompileConfig(region_backend="eager", schedule=None)
    strategy = DeepCompileStrategy(stage=stage, compile=config)
    return _train(
        [_Writes(way, first, inside), *_when(early)],
        strategy=strategy,
        inspect=lambda trainer: (_early(trainer)._safe, _early(trainer)._may_in_optimizer),
        **options,
    )


def _early(trainer: pl.Trainer) -> Any:
    return trainer.strategy.engine.timeline.prefetch._early


WRITES: dict[tuple[str, int, bool], tuple[bool | None, bool]] = {
    ("no_grad", 0, False): (None, True),  # never looked at with equal counts
    ("no_grad", 3, False): (True, True),
    ("data", 0, False): (None, True),
    ("uncounted", 0, False): (False, True),
    ("data", STEPS, False): (True, True),
    ("permuted", 0, False): (False, True),
    ("no_grad", 0, True): (True, False),
    ("no_grad", 3, True): (True, True),
    ("data", 0, True): (True, False),
}
"""The way to write, the first step, whether inside of the optimizer's step: whether the ranks launch gathers when the
optimizer has stepped, and even while it steps."""


def _all_writes() -> list[Record]:
    return [_sharded(*writes) for writes in WRITES]


@functools.cache
def _written() -> list[list[Record]]:
    return run_ranks(_all_writes, 2)


@pytest.mark.xdist_group("writes")
@pytest.mark.parametrize("number", range(len(WRITES)), ids=[f"{w}-{first}-{inside}" for w, first, inside in WRITES])
def test_what_is_written_between_steps_is_not_lost(number: int) -> None:
    writes, verdict = [*WRITES.items()][number]
    expected = _train([_Writes(*writes)], world_size=1)
    for records in _written():
        assert_same_training(records[number], expected, params=True)
        assert records[number].extra == verdict


def _written_by_one(inside: bool) -> list[list[Record]]:
    """Trainings that launch no gather early, each with those that do."""
    results = []
    for accumulate, stages in ((1, [3]), (3, [1, 2])):
        options = {"accumulate": accumulate, "case": "gpt_tied"}
        kinds = [{"early": False}, *({"stage": stage} for stage in stages)]
        results.append([_sharded("first rank", 2, inside, **kind, **options) for kind in kinds])
    return results


@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.extensive), True])
def test_one_rank_may_write_alone(inside: bool) -> None:
    """Gathers are then out of date on all ranks, also between the micro-batches of a step."""
    for groups in run_ranks(_written_by_one, 2, inside):
        for expected, *records in groups:
            for record in records:
                assert_same_training(record, expected, params=True)


@pytest.mark.parametrize("inside", [False, True])
def test_uncounted_writes_that_begin_late_end_training(inside: bool) -> None:
    with pytest.raises(RankError, match="Write to the parameters themselves under"):
        run_ranks(_sharded, 2, "uncounted", 3, inside, timeout=90)
    if inside:
        return
    expected = _train([_Writes("uncounted", 3)], world_size=1)
    for record in run_ranks(_sharded, 2, "uncounted", 3, early=False):
        assert_same_training(record, expected, params=True)


class _WritesInside(Mlp):
    """Shrinks its parameters in the course of a step, in code that is not compiled."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._shrink()
        return super().training_step(batch, batch_idx)

    @torch.compiler.disable
    def _shrink(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


def _train_inside() -> list[Record]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    def once(early: bool) -> Record:
        strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager", schedule=None))
        rank = int(os.environ["RANK"])
        return train(_WritesInside, strategy, world_size=2, rank=rank, steps=STEPS, callbacks=_when(early))

    return [once(early) for early in (True, False)]


def test_writes_inside_of_a_step_are_what_the_rest_of_it_computes_with() -> None:
    expected = train(_WritesInside, "auto", world_size=1, rank=0, data_world=2, steps=STEPS)
    for records in run_ranks(_train_inside, 2):
        for record in records:
            assert_same_training(record, expected, params=True)


def _counted(early: bool) -> tuple[Any, list[tuple[int, int]]]:
    """A summary, and how many groups had been gathered by the start of each step."""
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    starts: list[tuple[int, int]] = []

    class Starts(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            starts.append((batch_idx, trainer.strategy.engine.runtime.stats()["gather_groups"]))

    config = CompileConfig(region_backend="eager", schedule=None)
    strategy = DeepCompileStrategy(compile=config)
    record = _train(
        [Starts(), *_when(early)],
        strategy=strategy,
        case="gpt_tied",
        inspect=lambda trainer: trainer.strategy.summary(),
    )
    return record.extra, starts


def _counted_both() -> list[tuple[Any, list[tuple[int, int]]]]:
    return [_counted(early) for early in (False, True)]


def test_they_are_under_way_before_the_step_and_counted_with_it() -> None:
    (late, late_starts), (early, early_starts) = run_ranks(_counted_both, 2)[0]
    per_step = late.gather_groups_per_step
    assert early.gather_groups_per_step == per_step
    assert [count for _, count in late_starts] == [per_step * step for step in range(STEPS)]
    first = 3  # the embedding, and two blocks ahead
    # Nothing is launched early before it is known that nobody writes, which is when the second step begins.
    assert [count - per_step * step for step, count in early_starts] == [0, 0, *[first] * (STEPS - 2)]


def _in_parts(accelerator: str) -> dict[tuple[str, bool], tuple[Record, list[int]]]:
    """Trains with and without a head start; counts the gathers done at the end of each of the optimizer's steps.

    SGD gets one although its states might leave, as they need not.
    """
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    same_bits_every_time()
    results = {}
    for optimizer in ("sgd", "adamw"):
        for head_start in (False, True):
            gathered: list[int] = []

            class Steps(pl.Callback):
                def on_train_start(
                    self,
                    trainer: pl.Trainer,
                    module: Any,
                    gathered: list[int] = gathered,
                    head_start: bool = head_start,
                ) -> None:
                    (stepping,) = trainer.optimizers
                    runtime = trainer.strategy.engine.runtime
                    trainer.strategy.engine.timeline.prefetch.may_be_in_optimizer = head_start
                    stepping.register_step_post_hook(lambda *_: gathered.append(runtime.stats()["gather_groups"]))

            offload = "auto" if optimizer == "sgd" and head_start else "none"
            config = CompileConfig(region_backend="eager", schedule=None, offload=offload)
            strategy = DeepCompileStrategy(compile=config)
            record = _train(
                [Steps()],
                strategy=strategy,
                case="gpt_tied",
                optimizer=optimizer,
                accumulate=2,
                gradient_clip_val=0.5,
                accelerator=accelerator,
            )
            results[optimizer, head_start] = record, gathered
    return results


def _check_parts(accelerator: str) -> None:
    results = run_ranks(_in_parts, 2, accelerator)[0]
    for optimizer in ("sgd", "adamw"):
        (whole, late), (parts, early) = (results[optimizer, head_start] for head_start in (False, True))
        assert whole.losses == parts.losses, "every bit is the same"
        assert all(torch.equal(whole.params[name], value) for name, value in parts.params.items())
        assert [b - a for a, b in zip(late, early, strict=True)] == [0, *[3] * (STEPS - 1)]


def test_an_optimizer_steps_first_on_what_opens_the_next_step() -> None:
    _check_parts("cpu")


@pytest.mark.gpu
def test_an_optimizer_steps_first_on_what_opens_the_next_step_on_gpus() -> None:
    _check_parts("gpu")
