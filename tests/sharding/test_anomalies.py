"""`Trainer(detect_anomaly=True)` finds a NaN on any rank, names where it comes from, and ends all ranks."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from cases import Base, Record, assert_same_training, train
from multiprocess import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_deepcompile import CompileConfig, DeepCompileStrategy


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.zeros = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.linear(x))
        if self.zeros:
            x = x + torch.sqrt(x * 0) * 0  # infinite slope, times zero
        return x


class Net(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(8, 61)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Breaks(Net):
    """One rank's third batch gives no usable gradient."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.layers[1].zeros = batch_idx == 2 and self.global_rank == self.trainer.world_size - 1


def fit(build: type[Net], strategy: Any, world_size: int) -> Record:
    return train(
        build,
        strategy,
        world_size=world_size,
        rank=int(os.environ.get("RANK", 0)),
        steps=4,
        accumulate=1,
        data_world=2,
        detect_anomaly=True,
    )


def break_down(strategy: str) -> str:
    modules: list[Breaks] = []

    def build() -> Breaks:
        modules.append(Breaks())
        return modules[-1]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError) as caught:
            fit(build, DeepCompileStrategy() if strategy == "deepcompile" else strategy, 2)
    text = str(caught.value)
    if int(os.environ["RANK"]) == 1:
        assert any("torch.sqrt(x * 0)" in str(one.message) for one in said)
    assert all(p.to_local().isfinite().all() for p in modules[0].parameters())
    return text


@pytest.mark.timeout(120)
def test_a_nan_ends_all_ranks_and_is_named() -> None:
    first, second = run_ranks(break_down, 2, "deepcompile", timeout=90)
    for text in (first, second):
        assert "became NaN on rank 1" in text and "'SqrtBackward0' returned nan values" in text
        assert "'layers.2.linear' (Linear, in the block 'layers.2')" in text
    assert "left alone" in first


def train_healthy(world_size: int) -> Record:
    strategy: Any = "auto"
    if world_size > 1:
        strategy = DeepCompileStrategy(compile=CompileConfig(fallback="error", region_backend="eager"))
    record = fit(Net, strategy, world_size)
    if world_size > 1:
        assert not strategy.summary().uncompiled and strategy.summary().graphs == 0
    return record


def test_healthy_training_is_the_same() -> None:
    expected = train_healthy(1)
    for record in run_ranks(train_healthy, 2, 2):
        assert_same_training(record, expected, params=True)
