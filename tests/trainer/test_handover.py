"""A module that one Trainer has sharded goes on with another, whatever happened to it between the two."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import Base, Mlp, Record, Recorder, Recurrent, Tokens, assert_close, assert_same_training, full
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from multiprocess import run_ranks
from test_checkpoint import ours, rank_and_world
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

ROWS, STEPS = 12, 2


def trainer_of(strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A Trainer of this test's ranks that trains for one epoch, and prints and writes nothing if it is not told to."""
    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    quiet |= {"accelerator": "cpu", "max_epochs": 1, "use_distributed_sampler": False} | options
    return pl.Trainer(strategy=strategy, devices=rank_and_world()[1], callbacks=list(callbacks), **quiet)


def fit(trainer: pl.Trainer, module: pl.LightningModule) -> Record:
    """Trains some steps more."""
    rank, world = rank_and_world()
    recorder = next((c for c in trainer.callbacks if isinstance(c, Recorder)), None) or Recorder()
    recorder.record = Record()
    if recorder not in trainer.callbacks:
        trainer.callbacks.append(recorder)
    trainer.fit_loop.max_epochs = trainer.current_epoch + 1
    trainer.fit(module, DataLoader(Tokens(STEPS, ROWS, rank, world), batch_size=ROWS // world))
    return recorder.record


class Small(Mlp):
    """One layer, or a few: for what does not depend on their number, as each takes its time to trace."""

    count = 1

    def __init__(self) -> None:
        super().__init__()
        del self.layers[self.count :]


class Called(Small):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(tokens)


class Around(Base):
    """A new model around a part of another."""

    def __init__(self, pretrained: Small) -> None:
        super().__init__()
        self.layers = pretrained.layers
        self.embed = nn.Embedding(61, 13)
        self.head = nn.Linear(13, 61)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def plain(**_: Any) -> str:
    return "auto"


def same_settings(strategy: Callable[..., Any]) -> list[Record]:
    """Trained, then trained and called by others, and once more by the first."""
    module = Called()
    first, second = trainer_of(strategy()), trainer_of(strategy())
    records = [fit(first, module), fit(second, module)]
    if strategy is ours:
        engine = first.strategy.engine
        assert second.strategy.engine is engine
        frames, requested = len(engine.capture.frames.all), engine.capture.regions.requested
    records.append(fit(first, module))
    if strategy is ours:
        assert len(engine.capture.frames.all) == frames, "nothing traced anew"
        assert engine.capture.regions.requested == requested
        assert first.strategy.engine is engine
        del first, second, engine
        gc.collect()
    records[-1].extra = module(torch.arange(12).view(1, 12)).detach()
    return records


def other_settings(strategy: Callable[..., Any]) -> list[Record]:
    """Stages, then the first Trainer again: every one shards anew, and what another has left ends."""
    module = Small()
    trainers = [
        trainer_of(strategy(stage=stage), accumulate_grad_batches=batches) for stage, batches in ((3, 1), (1, 2))
    ]
    records = [fit(trainer, module) for trainer in (*trainers, trainers[0])]
    if strategy is ours:
        with (
            pytest.raises(RuntimeError, match="This Trainer's communication has ended"),
            trainers[1].strategy.full_parameters(),
        ):
            pass
        assert trainers[0].strategy.engine.stage == 3
    return records


def checkpointing(strategy: Callable[..., Any]) -> list[Record]:
    """Fits with activation checkpointing, without, and with it again."""
    module, policy = Small(), {nn.Sequential}
    records, programs = [], []
    for chosen in (policy, None, policy):
        trainer = trainer_of(strategy(activation_checkpointing_policy=chosen))
        records.append(fit(trainer, module))
        programs.append(trainer.strategy.programs() if strategy is ours else {})
    assert programs[0] == programs[2] and (strategy is plain or programs[1] != programs[0])
    return records


def changed_between(strategy: Callable[..., Any]) -> list[Record]:
    """Changes a module between two fits with one Trainer: rounding, another head."""
    module = Small()
    trainer = trainer_of(strategy())
    records = [fit(trainer, module)]
    module.bfloat16().float()
    records.append(fit(trainer, module))
    torch.manual_seed(11)
    module.head = nn.Linear(13, 61)
    records.append(fit(trainer, module))
    assert strategy is plain or isinstance(module.head.weight, DTensor)
    return records


def parts(strategy: Callable[..., Any]) -> list[Record]:
    """Some of a trained module in another one; and then the whole again, with what the other has made of it."""
    module = Small()
    first, second = trainer_of(strategy()), trainer_of(strategy())
    records = [fit(first, module)]
    torch.manual_seed(5)
    around = Around(module)
    records += [fit(second, around), fit(first, module), fit(second, around)]
    return records


class Fails(pl.Callback):
    """Raises on all ranks, once."""

    failed = False

    def on_before_optimizer_step(self, *_: Any) -> None:
        if not self.failed:
            self.failed = True
            raise ValueError("made to fail")


def after_failure(strategy: Callable[..., Any]) -> list[Record]:
    """An exception that a user catches: communication had ended, the module had not."""
    module = Small()
    trainer = trainer_of(strategy(), Fails())
    with pytest.raises(ValueError, match="made to fail"):
        fit(trainer, module)
    module.zero_grad()
    return [fit(trainer, module)]


class Stops(pl.Callback):
    """Ends the first fit between two optimizer steps, as a time limit does."""

    stopped = False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop, self.stopped = not self.stopped, True


def stopped(strategy: Callable[..., Any]) -> list[Record]:
    """Gradients that one fit has added up, whole, without a step do not affect the next one."""
    module = Small()
    trainer = trainer_of(strategy(stage=1), Stops(), accumulate_grad_batches=STEPS)
    assert not fit(trainer, module).grads
    trainer.fit_loop.epoch_loop.batch_progress.reset()
    trainer.fit_loop._restarting = trainer.fit_loop.epoch_loop._restarting = False
    return [fit(trainer, module)]


def averaged(strategy: Callable[..., Any]) -> list[Record]:
    """Weight averaging copies the module at the start of every fit, and leaves the average in it at the end."""
    module = Small()
    trainer = trainer_of(strategy(), EMAWeightAveraging(decay=0.6))
    records = [fit(trainer, module), fit(trainer, module)]
    records[-1].params = {name: full(p) for name, p in module.named_parameters()}
    return records


CHAINS = {
    chain.__name__: chain
    for chain in (
        same_settings,
        other_settings,
        checkpointing,
        changed_between,
        parts,
        after_failure,
        stopped,
        averaged,
    )
}


def run(name: str, sharded: bool) -> list[Record]:
    torch.manual_seed(3)
    return CHAINS[name](ours if sharded else plain)


def run_all() -> dict[str, list[Record] | str]:
    results: dict[str, list[Record] | str] = {}
    for name in CHAINS:
        try:
            results[name] = run(name, sharded=True)
        except Exception:
            results[name] = traceback.format_exc()
    return results


@functools.cache
def sharded() -> list[dict[str, list[Record] | str]]:
    return run_ranks(run_all, 2, timeout=300)


@pytest.mark.timeout(400)
@pytest.mark.xdist_group("handover")
@pytest.mark.parametrize("name", CHAINS)
def test_a_module_goes_on_as_alone(name: str) -> None:
    check_chain(name, run(name, sharded=False), sharded())


def check_chain(name: str, alone: list[Record], by_rank: list[dict[str, list[Record] | str]]) -> None:
    """Fails unless all ranks have what one process has, and what it noted."""
    for rank, results in enumerate(by_rank):
        records = results[name]
        if isinstance(records, str):
            pytest.fail(f"rank {rank}:\n{records}")
        assert len(records) == len(alone) > 0
        for number, (record, expected) in enumerate(zip(records, alone, strict=True)):
            assert_same_training(record, expected, params=True)
            if expected.extra is not None:
                assert_close(record.extra, expected.extra, f"noted after {number}")


def test_a_module_that_is_refused_goes_on_once_it_is_mended() -> None:
    module = Small()
    fit(trainer_of(ours()), module)
    with pytest.raises(ValueError, match="has a hook"):
        module.head.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match="chooses no module"):
        fit(trainer_of(ours(activation_checkpointing_policy={nn.LSTM})), module)
    assert fit(trainer_of(ours(stage=2)), module).losses


def copies(_: Any = None) -> None:
    torch.manual_seed(3)
    for module in (Called(), Recurrent()):
        trainer = trainer_of(ours())
        fit(trainer, module)
        names = {name: type(child) for name, child in module.named_modules()}
        twin = copy.deepcopy(module)
        for name, child in twin.named_modules():
            assert type(child) in names[name].__mro__ and not type(child).__name__.startswith("Sharded"), name
            assert not any(key.startswith("_dc_") for key in vars(child)), name
        before = {name: full(p) for name, p in twin.named_parameters()}
        for name, parameter in module.named_parameters():
            assert torch.equal(full(parameter), before[name]), name
        fit(trainer, module)
        assert all(torch.equal(full(p), before[name]) for name, p in twin.named_parameters()), "a copy is its own"
        assert not torch.equal(full(module.embed.weight), before["embed.weight"])
        tokens = torch.arange(12).view(1, 12)
        with trainer.strategy.full_parameters():
            whole = copy.deepcopy(module)
        assert not any(isinstance(p, DTensor) for p in whole.parameters())
        output = module(tokens) if isinstance(module, Called) else module.logits(tokens.clone())
        torch.testing.assert_close(whole.logits(tokens), output)
        again = pickle.loads(pickle.dumps(whole.state_dict()))
        assert again.keys() == module.state_dict().keys()


def test_copies_of_a_sharded_module_are_plain() -> None:
    run_ranks(copies, 2)
