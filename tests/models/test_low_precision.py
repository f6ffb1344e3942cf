"""Weights that follow from parameters (pruned, parametrised, fake-quantised, frozen in FP8) train as in one process."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from cases import Base, Record, assert_same_training, train
from multiprocess import run_ranks
from test_fp8 import EAGER, Layer, alone, assert_same_as_accumulated, recipe
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from lightning_deepcompile import DeepCompileStrategy


class Layers(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 24), nn.Linear(24, 61)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
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
    "adapters over FP8": Adapters,
}


def _steps(name: str) -> int:
    # The mean over three ranks has other last bits than a sum: then activations may be rounded to other FP8 numbers.
    return 1 if "FP8" in name else 3


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
                steps=_steps(name),
                inspect=programs,
            )
        except Exception:
            results[name] = traceback.format_exc()
    return results


def test_weights_that_follow_from_parameters_train_as_in_one_process() -> None:
    (first, *_) = run_ranks(train_all, 3)
    for name, record in first.items():
        assert isinstance(record, Record), f"{name}: {record}"
        if "FP8" in name:
            assert_same_as_accumulated(record, alone(CASES[name], 3, steps=_steps(name)), 3)
        else:
            expected = train(CASES[name], "auto", world_size=1, rank=0, data_world=3, steps=_steps(name))
            assert_same_training(record, expected, params=True)
        # Only frozen FP8 weights are read in a narrower form alone.
        assert ("  derive" in record.extra) == ("FP8" in name), name
