"""Checkpoints of Lightning's own sharding strategies are loaded, and they load ours."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import VOCAB, Base
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from multiprocess import run_ranks
from test_checkpoint import SAVED_AFTER, SaveAt, fit, ours
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


class Net(nn.Module):
    """Sizes that two ranks cannot divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 13)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 13)) for _ in range(2))
        self.head = nn.Linear(13, VOCAB)
        self.one_row = nn.Parameter(torch.full((1, 13), 0.3))
        self.register_buffer("counter", torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.one_row
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Model(Base):
    def __init__(self, frozen: bool = False, fsdp2: bool = False) -> None:
        super().__init__()
        self.net = Net()
        self.net.layers[0].requires_grad_(not frozen)
        self.fsdp2 = fsdp2

    def configure_model(self) -> None:
        if self.fsdp2:
            for layer in self.net.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, eps=1e-3)


class CpuFSDPStrategy(FSDPStrategy):
    """Lightning's, on CPUs."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def _theirs(name: str) -> Any:
    kind, form = name.split()
    if kind == "fsdp2":
        return ModelParallelStrategy(2, 1, save_distributed_checkpoint=form == "sharded")
    return CpuFSDPStrategy(auto_wrap_policy={nn.Sequential}, state_dict_type=form)


def _exchange(folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Returns, for each pair of formats, the losses after resuming and the expected ones."""
    losses = {}
    # FSDP cannot save a full one on CPUs. With a frozen parameter, FSDP2 numbers the others as the model counts them.
    full = ("fsdp2 full",) if "TEST_ALL" in os.environ else ()
    for name in ("fsdp sharded", "fsdp2 sharded", *full):
        build = functools.partial(Model, frozen=True, fsdp2="fsdp2" in name)
        theirs = fit(_theirs(name), SaveAt(folder / name, SAVED_AFTER), build=build)[0]
        resumed = fit(ours(), resume=folder / name, build=functools.partial(Model, frozen=True))[0]
        losses[f"from {name}"] = resumed.losses, theirs.losses[SAVED_AFTER:]
    for form in ("full", "sharded"):
        mine = fit(ours(form), SaveAt(folder / form, SAVED_AFTER), build=Model)[0]
        for name in {"full": ("fsdp full", "fsdp2 full"), "sharded": ("fsdp sharded",)}[form]:
            build = functools.partial(Model, fsdp2="fsdp2" in name)
            losses[f"to {name}"] = (
                fit(_theirs(name), resume=folder / form, build=build)[0].losses,
                mine.losses[SAVED_AFTER:],
            )
    return losses


@pytest.mark.timeout(400)
def test_exchange_with_fsdp_and_fsdp2(tmp_path: Path) -> None:
    for name, (resumed, expected) in run_ranks(_exchange, 2, tmp_path)[0].items():
        assert resumed == pytest.approx(expected, rel=1e-5), name
