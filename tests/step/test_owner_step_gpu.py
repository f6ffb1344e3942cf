"""Owner ranks on GPUs: the exchange runs concurrently with steps on other chunks, and changes nothing."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from cases import Base, Record, assert_same_training, train
from multiprocess import GPU_RANKS, run_ranks
from test_owner_step import Lars, WithLars
from torch import Tensor, nn

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


class Wide(Base):
    """Blocks that are chunks of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 512)
        self.layers = nn.ModuleList(nn.Linear(512, 512 * 40, bias=False) for _ in range(4))
        self.head = nn.Linear(512, 61)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).unflatten(-1, (512, 40)).mean(-1)
        return self.head(x)

    def configure_optimizers(self) -> Any:
        return Lars(self.parameters(), lr=0.01)


def _train_all() -> list[Record]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    records = []
    for build in (WithLars, Wide):
        strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
        options = {"accelerator": "gpu", "accumulate": 2, "gradient_clip_val": 0.5}
        records.append(train(build, strategy, world_size=world, rank=rank, **options))
    return records


def test_owners_on_gpus_equal_unsharded_training() -> None:
    options: dict[str, Any] = {"accumulate": 2, "gradient_clip_val": 0.5}
    expected = [
        train(build, "auto", world_size=1, rank=0, data_world=GPU_RANKS, **options) for build in (WithLars, Wide)
    ]
    for records in run_ranks(_train_all, GPU_RANKS, timeout=300):
        for actual, reference in zip(records, expected, strict=True):
            assert_same_training(actual, reference, params=True)
