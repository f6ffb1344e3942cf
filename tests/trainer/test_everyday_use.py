"""Common uses of modules, and of code around them, train as in one process."""

from __future__ import annotations

import functools
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import VOCAB, Base, Record, Recorder, Tokens, assert_same_training, full, llama
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.tuner import Tuner
from multiprocess import run_ranks
from test_checkpoint import ours, rank_and_world
from test_handover import ROWS, Called, Small, check_chain, plain, trainer_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

WORLD, WIDTH = 2, 13


def recorded(strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    return trainer_of(strategy, Recorder(), *callbacks, **options)


def loader(batches: int = 2) -> DataLoader[Tensor]:
    rank, world = rank_and_world()
    return DataLoader(Tokens(batches, ROWS, rank, world), batch_size=ROWS // world)


def record_of(trainer: pl.Trainer) -> Record:
    """Returns a trainer's record, which the next fit does not extend."""
    recorder = next(callback for callback in trainer.callbacks if isinstance(callback, Recorder))
    done, recorder.record = recorder.record, Record()
    return done


def fitted(strategy: Callable[..., Any], module: pl.LightningModule, *callbacks: pl.Callback, **options: Any) -> Record:
    trainer = recorded(strategy(), *callbacks, **options)
    trainer.fit(module, loader())
    return record_of(trainer)


# Between two fits -----------------------------------------------------------------------------------------------------


def loaded(strategy: Callable[..., Any]) -> list[Record]:
    """A state dict of whole tensors is loaded when a fit has sharded the module."""
    module = Called()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    first, tokens = fitted(strategy, module), torch.arange(12).view(1, 12)
    module.load_state_dict(before)
    module.embed.weight.data.copy_(before["embed.weight"])
    output = module(tokens).detach()
    second = fitted(strategy, module)
    assert_same_training(second, first, params=True, rtol=0.0)
    second.extra = output
    return [first, second]


def whole(module: pl.LightningModule) -> Any:
    strategy = module.trainer.strategy
    return strategy.full_parameters() if hasattr(strategy, "full_parameters") else torch.no_grad()


def resized(strategy: Callable[..., Any]) -> list[Record]:
    """Tied embeddings grow in `setup`."""
    module = llama(tied=True, layers=1)()

    class Grows(type(module)):
        fits = 0

        def setup(self, stage: str) -> None:
            self.fits += 1
            torch.manual_seed(11)
            if self.fits > 1:
                with whole(self):
                    self.net.resize_token_embeddings(VOCAB + 5, mean_resizing=False)

    module.__class__ = Grows
    records = [fitted(strategy, module), fitted(strategy, module)]
    assert module.net.lm_head.weight is module.net.get_input_embeddings().weight
    assert records[1].params["net.model.embed_tokens.weight"].shape[0] == VOCAB + 5
    return records


# Around a fit ---------------------------------------------------------------------------------------------------------


class Swaps(pl.Callback):
    """Validates with averages that are kept as a state dict."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.average = {name: value.detach().clone() for name, value in module.state_dict().items()}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        for name, value in module.state_dict().items():
            self.average[name].lerp_(value, 0.3)

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.trained = {name: value.detach().clone() for name, value in module.state_dict().items()}
            module.load_state_dict(self.average)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            module.load_state_dict(self.trained)


def swaps(strategy: Callable[..., Any]) -> list[Record]:
    """Exponential averages by swaps of state dicts, in the middle of epochs and at their ends."""
    trainer, module = recorded(strategy(), Swaps(), max_epochs=2, val_check_interval=1), Small()
    trainer.fit(module, loader(), loader())
    record = record_of(trainer)
    record.extra = trainer.callback_metrics["val"]
    return [record]


class Rated(Small):
    lr = 0.01

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def lr_find(strategy: Callable[..., Any]) -> list[Record]:
    """`lr_find`, and then a fit as if it had not been."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, module = recorded(strategy(), default_root_dir=folder, max_epochs=2), Rated()
        found = Tuner(trainer).lr_find(module, loader(8), num_training=6, update_attr=False)
        assert found is not None and len(found.results["loss"]) == 6
        record_of(trainer)
        trainer.fit(module, loader(3))
        trainer.strategy.barrier()
    record = record_of(trainer)
    record.extra = torch.tensor(found.results["lr"])
    return [record]


def accumulation_schedule(strategy: Callable[..., Any]) -> list[Record]:
    """Windows of one, two and three batches; the last one of an epoch of five is not full."""
    trainer = recorded(strategy(), GradientAccumulationScheduler({0: 2, 1: 3, 2: 1}), max_epochs=3)
    trainer.fit(Small(), loader(5))
    record = record_of(trainer)
    assert len(record.losses) == 15 and len(record.grads) == 3 + 2 + 5
    return [record]


# In a module ----------------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) + self.shift


class Layers(Base):
    """Tokens through `layers`."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCAB)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def scripted(strategy: Callable[..., Any]) -> list[Record]:
    """TorchScript, scripted, traced and frozen."""
    frozen = torch.jit.script(Inner())
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    module = Layers(torch.jit.script(Inner()), torch.jit.trace(Inner(), torch.randn(2, WIDTH)), frozen)
    record = fitted(strategy, module)
    assert record.grads[0]["layers.0.up.weight"] is not None and record.grads[0]["layers.2.up.weight"] is None
    return [record]


class Twice(nn.Module):
    """Layers under activation checkpointing, some of them under two."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = Inner(), Inner(), Inner()
        self.reentrant = reentrant

    def inner(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def checkpoints(strategy: Callable[..., Any]) -> list[Record]:
    """Activation checkpoints inside of others."""
    return [fitted(strategy, Layers(Twice(reentrant=False)))]


def reentrant_checkpoints(strategy: Callable[..., Any]) -> list[Record]:
    """The older kind, which runs a backward pass inside of another."""
    return [fitted(strategy, Layers(Twice(reentrant=True)))]


class Pictures(Base):
    """Convolutions in channels_last, with a batch norm that is frozen as in detection models."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(3, 8, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 2, padding=1))
        self.convs[1].running_mean.normal_()
        for parameter in self.convs[1].parameters():
            parameter.requires_grad_(False)
        self.convs[1].eval()
        self.head = nn.LazyLinear(VOCAB)
        self.logits(torch.zeros(2, 12, dtype=torch.long))
        self.to(memory_format=torch.channels_last)

    def logits(self, tokens: Tensor) -> Tensor:
        x = (tokens / VOCAB).view(-1, 3, 2, 2).to(memory_format=torch.channels_last)
        x = self.convs(x)
        return self.head(x.flatten(1)).unsqueeze(1).expand(-1, 12, -1)


def channels_last(strategy: Callable[..., Any]) -> list[Record]:
    """Convolutions, a frozen batch norm, and a lazy layer that has run once."""
    return [fitted(strategy, Pictures())]


class Quantized(nn.Module):
    """A linear layer of packed 4-bit numbers, with a trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        packed = torch.randint(0, 256, (WIDTH * 7, 1), dtype=torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(WIDTH, 1) / 16, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(3, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.cat([self.packed >> 4, self.packed & 15], dim=1).view(WIDTH, 14)[:, :WIDTH]
        weight = (codes.to(x.dtype) - 8) * self.scale
        return x + F.linear(x, weight) + F.linear(F.linear(x, self.down), self.up)


class Tiny(nn.Module):
    """Parameters of one element, and of none."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"scalar": (), "one": (1,), "ones": (1, 1, 1), "none": (0,), "no_rows": (0, 4), "no_columns": (4, 0)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 0.7)))

    def forward(self, x: Tensor) -> Tensor:
        empty = self.none.sum() + self.no_rows.sum() + self.no_columns.sum()
        return x * self.scalar + self.one + self.ones[0] * x + empty


class Transposed(nn.Module):
    """Parameters whose first values are views: transposed, with gaps, and of other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.across = nn.Parameter(torch.randn(17, WIDTH).t() / 4)
        self.gaps = nn.Parameter(torch.randn(34, 2 * WIDTH)[::2, ::2] / 4)
        self.kernel = nn.Parameter((torch.randn(1, 1, 3, 3) / 4).to(memory_format=torch.channels_last))
        self.same = nn.Parameter(torch.randn(1).expand(WIDTH).clone())
        nn.init.orthogonal_(self.across)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x @ self.across @ self.gaps + self.same
        return x + F.conv2d(x.unsqueeze(1), self.kernel, padding=1).squeeze(1)


def parameters(strategy: Callable[..., Any]) -> list[Record]:
    """Bases of uint8 under adapters, tiny parameters, and others whose values stay where they were."""
    module = Layers(Quantized(), Tiny(), Transposed())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = recorded(strategy(), max_steps=0, max_epochs=-1)
    trainer.fit(module, loader())
    for name, value in module.state_dict().items():
        assert torch.equal(full(value), before[name]), name
    return [fitted(strategy, module)]


class Lazy(Base):
    """Lazy layers that run once in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.head = nn.Embedding(VOCAB, WIDTH), nn.LazyLinear(17), nn.LazyLinear(VOCAB)

    def configure_model(self) -> None:
        if isinstance(self.head.weight, nn.UninitializedParameter):
            torch.manual_seed(2)
            self.logits(torch.zeros(1, 3, dtype=torch.long))

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(self.embed(tokens))))


def lazy(strategy: Callable[..., Any]) -> list[Record]:
    """Lazy parameters are ordinary ones once they have run."""
    module = Lazy()
    return [fitted(strategy, module), fitted(strategy, module)]


CHAINS = {
    chain.__name__: chain
    for chain in (
        loaded,
        resized,
        swaps,
        lr_find,
        accumulation_schedule,
        scripted,
        checkpoints,
        reentrant_checkpoints,
        channels_last,
        parameters,
        lazy,
    )
}


def run(name: str, sharded: bool) -> list[Record]:
    torch.manual_seed(3)
    return CHAINS[name](ours if sharded else plain)


def run_all() -> dict[str, list[Record] | str]:
    results: dict[str, list[Record] | str] = {"mix": mix()}
    for name in CHAINS:
        try:
            results[name] = run(name, sharded=True)
        except Exception:
            results[name] = traceback.format_exc()
    return results


@functools.cache
def sharded() -> list[dict[str, list[Record] | str]]:
    return run_ranks(run_all, WORLD, timeout=300)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.xdist_group("everyday use")
def test_it_trains_as_alone(name: str) -> None:
    check_chain(name, run(name, sharded=False), sharded())


class Mixes(Small):
    """Adds a plain tensor to a shard, in a hook."""

    def on_train_start(self) -> None:
        self.embed.weight + torch.ones(VOCAB, WIDTH)


def mix() -> str:
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as raised:
        fitted(ours, Mixes())
    return "\n".join(raised.value.__notes__)


@pytest.mark.xdist_group("everyday use")
def test_a_shard_among_plain_tensors_ends_in_a_line_that_says_what_to_do() -> None:
    for results in sharded():
        assert "`with trainer.strategy.full_parameters():`" in results["mix"]
