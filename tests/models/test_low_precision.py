"""Weights that follow from parameters (pruned, parametrised, fake-quantised, frozen in FP8) train as in one process."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from cases import Base, Record, assert_same_training, train
from multiprocess import run_ranks
from test_fp8 import EAGER, Layer, alone, assert_same_as_accumulated, recipe
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from lightning_deepcompile import CompileConfig, DeepCompileStrategy


class Layers(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 24), nn.Linear(24, 61)
        self.layers = nn.ModuleList([Layer()])
        self.change()

    def change(self) -> None:
        """Changes the layers."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Pruned(Layers):
    def change(self) -> None:
        for layer in self.layers:
            prune.l1_unstructured(layer.up, "weight", amount=0.5)


class Bounded(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight) / 2


class Parametrised(Layers):
    def change(self) -> None:
        for layer in self.layers:
            parametrize.register_parametrization(layer.up, "weight", Bounded())


class WeightNorm(Layers):
    def change(self) -> None:
        for layer in self.layers:
            parametrizations.weight_norm(layer.up)


class SpectralNorm(Layers):
    def change(self) -> None:
        for layer in self.layers:
            parametrizations.spectral_norm(layer.up)


class FakeQuantised(nn.Linear):
    """Computes with eight bits of its weight; the gradient passes as if nothing had been rounded."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().max() / 127
        rounded = (self.weight.detach() / scale).round().clamp(-127, 127).to(torch.int8).float() * scale
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


class QuantisationAware(Layers):
    def change(self) -> None:
        for layer in self.layers:
            layer.up.__class__ = FakeQuantised


class _Quantised(torch.autograd.Function):
    """Eight bits of a weight; the gradient passes as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor) -> Tensor:
        return (weight / scale).round().clamp(-127, 127).to(torch.int8).float() * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Delayed(nn.Linear):
    """Its scale is that of the step before, in a buffer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("scale", torch.tensor(0.01))

    def forward(self, x: Tensor) -> Tensor:
        quantised = _Quantised.apply(self.weight, self.scale.clone())
        self.scale.copy_(self.weight.detach().abs().max() / 127)
        return F.linear(x, quantised, self.bias)


class DelayedScales(Layers):
    def change(self) -> None:
        for layer in self.layers:
            layer.up = Delayed(24, 40)


class SharedScale(Layers):
    """One scale for two weights."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            scale = torch.maximum(*(w.detach().abs().max() for w in (layer.up.weight, layer.down.weight))) / 127
            hidden = torch.relu(F.linear(x, _Quantised.apply(layer.up.weight, scale), layer.up.bias))
            x = x + F.linear(hidden, _Quantised.apply(layer.down.weight, scale), layer.down.bias)
        return self.head(x)


class Adapted(nn.Module):
    """A frozen layer, and a product of two small matrices that are trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapters(Layers):
    """Low-rank adapters over frozen FP8 layers."""

    def change(self) -> None:
        for layer in self.layers:
            layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)

    def configure_model(self) -> None:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(
            self.layers, config=recipe(), module_filter_fn=lambda module, name: name.endswith("base")
        )


CASES: dict[str, Callable[[], Base]] = {
    "pruned": Pruned,
    "parametrised": Parametrised,
    "weight norm": WeightNorm,
    "spectral norm": SpectralNorm,
    "quantisation-aware": QuantisationAware,
    "scale of a buffer": DelayedScales,
    "scale of two weights": SharedScale,
    "adapters over FP8": Adapters,
}


class Missing(Layers):
    """Quantises with a package that is not installed."""

    def configure_model(self) -> None:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(self.layers)


@torch.library.custom_op("test_low_precision::product", mutates_args=())
def product(x: Tensor) -> Tensor:
    """Fails where it runs, as FP8 products do on GPUs that are older than FP8; tracing does not know."""
    raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")


@product.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class OldCard(Layers):
    """Its FP8 weights are gathered before the product fails."""

    def configure_model(self) -> None:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(self.layers, config=recipe())

    def logits(self, tokens: Tensor) -> Tensor:
        x = super().logits(tokens)
        return x + product(x.detach())


def programs(trainer: Any) -> str:
    return "\n".join(trainer.strategy.programs().values())


def train_all() -> dict[str, Record | str]:
    results: dict[str, Record | str] = {}
    for name, build in CASES.items():
        try:
            results[name] = train(
                build,
                DeepCompileStrategy(compile=EAGER),
                world_size=int(os.environ["WORLD_SIZE"]),
                rank=int(os.environ["RANK"]),
                steps=3,
                inspect=programs,
            )
        except Exception:
            results[name] = traceback.format_exc()
    return results


def test_weights_that_follow_from_parameters_train_as_in_one_process() -> None:
    (first, *_) = run_ranks(train_all, 2)
    for name, record in first.items():
        assert isinstance(record, Record), f"{name}: {record}"
        if "FP8" in name:
            assert_same_as_accumulated(record, alone(CASES[name], 2, steps=3), 2)
        else:
            expected = train(CASES[name], "auto", world_size=1, rank=0, data_world=2, steps=3)
            assert_same_training(record, expected, params=True)
        # Only frozen FP8 weights are read in a narrower form alone.
        assert ("  derive" in record.extra) == ("FP8" in name), name


def fail(build: Callable[[], Base]) -> tuple[str, int]:
    """Returns the error of a training, and how many batches it trained."""
    trained = []
    try:
        train(
            build,
            DeepCompileStrategy(compile=CompileConfig(region_backend="eager")),
            world_size=int(os.environ["WORLD_SIZE"]),
            rank=int(os.environ["RANK"]),
            callbacks=[pl.callbacks.LambdaCallback(on_train_batch_end=lambda *args: trained.append(args[-1]))],
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}", len(trained)
    return "", len(trained)


def fail_all() -> list[tuple[str, int]]:
    old = fail(OldCard)
    sys.modules["torchao.float8"] = None  # type: ignore[assignment] # Python's way to say that there is none
    return [fail(Missing), old]


def test_errors_of_torchao_and_of_old_cards_come_in_the_first_step_on_all_ranks() -> None:
    for missing, old in run_ranks(fail_all, 2):
        assert missing[0].startswith("ModuleNotFoundError") and "torchao" in missing[0]
        assert "torch._scaled_mm is only supported on CUDA devices with compute capability" in old[0]
        assert missing[1] == old[1] == 0
