"""Unusual users' modules train on two ranks as one process does on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Mlp, Record, assert_same_training
from multiprocess import run_ranks
from test_handover import Small
from test_unmodified import fit, ours
from torch import Tensor, nn
from torch.nn import functional as F


class Contrastive(Small):
    """Compares with what the other ranks have, and sends gradients back."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch[:, :-1]).mean(1)
        for layer in self.layers:
            x = x + layer(x)
        first, second = (F.normalize(part, dim=-1) for part in (x, self.head(x)[:, :13]))
        first, second = (part.reshape(-1, 13) for part in self.all_gather([first, second], sync_grads=True))
        return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


class Bank(Small):
    """Prototypes that are read transposed and copied, and written behind a break of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(61, 13))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch[:, 0])
        loss = F.cross_entropy((x + self.layers[0](x)) @ self.bank.t().clone(), batch[:, 1])
        with torch.no_grad():
            everybody = self.all_gather(x.detach()).reshape(-1, 13)
            for number, row in enumerate(everybody.sort(0).values):
                self.bank[number] = 0.5 * self.bank[number] + 0.5 * row
        return loss


class Hyper(Small):
    """One layer's parameters are computed by another one; it is read itself, too. It runs uncompiled as a whole."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        weights = {"weight": 0.1 * self.head.weight.t() @ self.head.weight, "bias": self.one_row[0]}
        x = torch.func.functional_call(self.unused_too, weights, (x,)) + self.unused_too(x)
        call = torch.compiler.disable(torch.func.functional_call)
        return self.head(x + call(self.unused_too, {"weight": weights["weight"] * 2}, (x,)))

    def __init__(self) -> None:
        super().__init__()
        self.unused_too = nn.Linear(13, 13)


# Per model: how many graphs its step is.
WORKS: dict[str, tuple[Callable[[], Mlp], int]] = {
    "contrastive": (Contrastive, 2),
    "bank": (Bank, 2),
    "hyper": (Hyper, 0),
}


def _works() -> dict[str, tuple[Record, int]]:
    results = {}
    for name, (build, _) in WORKS.items():
        strategy = ours()
        results[name] = fit(strategy, build)[0], strategy.summary().graphs
    return results


@pytest.fixture(scope="module")
def sharded() -> list[dict[str, Any]]:
    return run_ranks(_works, 2)


@pytest.mark.xdist_group("unmodified ranks")
@pytest.mark.parametrize("name", WORKS)
def test_it_trains_as_alone(name: str, sharded: list[dict[str, Any]]) -> None:
    build, expected_graphs = WORKS[name]
    expected, _ = fit("auto", build)
    for results in sharded:
        record, graphs = results[name]
        assert_same_training(record, expected, params=True)
        assert_same_buffers(record, expected)
        assert graphs == expected_graphs, "whatever runs outside of graphs, the rest of the step does not"


def assert_same_buffers(actual: Record, expected: Record) -> None:
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(actual.buffers[name], buffer, rtol=1e-5, atol=1e-5, msg=name)
