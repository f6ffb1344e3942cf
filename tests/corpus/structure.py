"""Modules of modules: folds, ensembles, fixed points."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corpus.case import Small, case
from corpus.schedules import Perceptron, rows


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
