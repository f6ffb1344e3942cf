"""Modules of modules: experts, folds, ensembles, fixed points."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from corpus.case import Small, case
from corpus.schedules import Perceptron, rows


def many(g: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(32, 5, generator=g), torch.randint(0, 3, (32,), generator=g)


class Experts(Small):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(5, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 5)) for _ in range(3))
        self.head = nn.Linear(5, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(x + self.mix(x)), y)


@case("experts, masked", many)
class MaskedExperts(Experts):
    """Every expert computes all rows, and those that were not sent to it count nothing."""

    def mix(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        gates = torch.zeros(len(x), 3).scatter(1, chosen, weights / weights.sum(-1, keepdim=True))
        return sum(gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@case("experts, routed", many)
class RoutedExperts(Experts):
    """Every expert computes the rows that were sent to it, however many those are."""

    def mix(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        weight, chosen = weights.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            index = (chosen == i).nonzero(as_tuple=True)[0]
            out = out.index_add(0, index, weight[index, None] * expert(x[index]))
        return out


@case("experts, where there are rows", many)
class AskedExperts(Experts):
    """The same by masks, and experts without rows are left out (there are none here)."""

    def mix(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                out[mask] = weight[mask].unsqueeze(-1) * expert(x[mask])
        return out


@case("folds", rows, steps=6)
class Folds(Small):
    """One model per fold; a batch trains those that it is not held out from."""

    def __init__(self) -> None:
        super().__init__()
        self.folds = nn.ModuleDict({str(k): nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 3)]) for k in range(3)})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = 0
        for name, layers in self.folds.items():
            if int(name) != batch_idx % 3:
                h = x
                for layer in layers:
                    h = torch.tanh(layer(h))
                loss = loss + F.cross_entropy(h, y)
        return loss / (len(self.folds) - 1)


@case("ensemble, vmap", rows)
class Ensemble(Small):
    """Stacked parameters of equal models, called at once."""

    def __init__(self) -> None:
        super().__init__()
        members = [nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(4)]
        stacked, _ = torch.func.stack_module_state(members)
        self.stacked = nn.ParameterDict({name.replace(".", "_"): p.detach() for name, p in stacked.items()})
        self.skeleton = [copy.deepcopy(members[0]).to("meta")]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch

        def call(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(self.skeleton[0], parameters, (x,))

        stacked = {name.replace("_", "."): p for name, p in self.stacked.items()}
        logits = torch.vmap(call, in_dims=(0, None))(stacked, x)
        return F.cross_entropy(logits.flatten(0, 1), y.repeat(4))


@case("ensemble, stacked in the step", rows)
class StackedInStep(Small):
    """The members keep their own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        weights = torch.stack([member.weight for member in self.members])
        biases = torch.stack([member.bias for member in self.members])
        logits = torch.einsum("bi,eoi->ebo", x, weights) + biases[:, None]
        return F.cross_entropy(logits.mean(0), y) + 0.01 * logits.var(0).mean()


@case("fixed point", rows, same=True)
class FixedPoint(Small):
    """Iterates until convergence without gradients, and once with them."""

    def __init__(self) -> None:
        super().__init__()
        self.inject, self.cell, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        nn.init.uniform_(self.cell.weight, -0.1, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        u = self.inject(x)
        with torch.no_grad():
            z, iterations = torch.zeros_like(u), 0
            while iterations < 30:
                following = torch.tanh(self.cell(z) + u)
                iterations += 1
                difference = (following - z).abs().max().item()
                z = following
                if difference < 3e-3:
                    break
        self.log("iterations", float(iterations))
        return F.cross_entropy(self.head(torch.tanh(self.cell(z) + u)), y)


@case("hopfield", rows)
class Hopfield(Small):
    """Stored patterns are parameters; a fixed number of updates with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.patterns = nn.Parameter(torch.randn(6, 5))
        self.beta = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(5, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for _ in range(3):
            x = F.softmax(self.beta * x @ self.patterns.t(), -1) @ self.patterns
        return F.cross_entropy(self.head(x), y)


@case("shared layer", rows)
class Shared(Perceptron):
    """One layer many times, one of its parameters also in another, a bilinear form and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(9, 9)
        self.gate = nn.Bilinear(9, 9, 9, bias=False)
        self.other = nn.Linear(9, 9)
        self.other.bias = self.inner.bias

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        for _ in range(3):
            h = h + 0.3 * torch.sigmoid(self.gate(h, h)) * self.inner(h)
        return self.net(self.other(h))


@case("nested modules", rows)
class Nested(Small):
    """A LightningModule inside of another, which logs by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()
        self.scale = nn.Parameter(torch.ones(1, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.scale * self.inner(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss + 0.1 * self.inner.loss(batch)
