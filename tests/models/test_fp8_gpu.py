"""FP8 layers of torchao on GPUs, with FP8 products: weights that travel as FP8 give the bits of weights that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Base, same_bits_every_time
from multiprocess import GPU_RANKS, run_ranks
from test_fp8 import Case, assert_same_bits, both_ways
from torch import Tensor, nn

from lightning_deepcompile import CompileConfig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

CONFIG = CompileConfig(fallback="error")


class Layer(nn.Module):
    """Its sizes are multiples of 16, as FP8 products need."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 160, bias=False), nn.Linear(160, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Fp8(Base):
    recipe_name = "tensorwise"

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 64), nn.Linear(64, 61)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def configure_model(self) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # A gradient's product has the tokens inside, of which there are 24.
        config = replace(Float8LinearConfig.from_recipe_name(self.recipe_name), pad_inner_dim=True)
        convert_to_float8_training(self.layers, config=config)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float()


class Rowwise(Fp8):
    recipe_name = "rowwise"


OPTIONS: dict[str, Any] = {"accelerator": "gpu", "precision": "bf16-mixed"}
CASES: dict[str, Case] = {
    "bf16": (Fp8, CONFIG, OPTIONS),
    "accumulated": (Fp8, CONFIG, {**OPTIONS, "accumulate": 2, "optimizer": "adamw"}),
    "rowwise": (Rowwise, CONFIG, OPTIONS),
    "bf16 weights": (Fp8, CONFIG, {**OPTIONS, "precision": "bf16-true"}),
    "stage 2": (Fp8, CONFIG, {**OPTIONS, "stage": 2}),
    "graphs": (Fp8, CompileConfig(fallback="error", schedule=None, cuda_graphs=True), {**OPTIONS, "steps": 12}),
    "shards in host memory": (Fp8, CompileConfig(fallback="error", offload="all"), OPTIONS),
}


def train_both_ways() -> Any:
    same_bits_every_time()
    return both_ways(CASES)


def test_weights_that_travel_as_fp8_have_the_same_bits_on_gpus() -> None:
    (first, *_) = run_ranks(train_both_ways, GPU_RANKS, timeout=450.0)
    assert_same_bits(first, CASES)
