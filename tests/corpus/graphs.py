"""Graphs: convolutions and attention over edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from corpus.case import Small, case


def dense(g: Generator) -> tuple[Tensor, Tensor, Tensor]:
    adjacency = (torch.rand(3, 6, 6, generator=g) < 0.4).float()
    return torch.randn(3, 6, 5, generator=g), adjacency + adjacency.mT, torch.randint(0, 3, (3,), generator=g)


def edges(g: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """One graph, with self-loops: nodes, edges, classes of nodes."""
    loops = torch.arange(9).expand(2, 9)
    return (
        torch.randn(9, 5, generator=g),
        torch.cat([loops, torch.randint(0, 9, (2, 20), generator=g)], dim=1),
        torch.randint(0, 3, (9,), generator=g),
    )


@case("gcn, dense", dense)
class DenseGcn(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, adjacency, y = batch
        adjacency = adjacency + torch.eye(6)
        degree = adjacency.sum(-1).rsqrt()
        adjacency = degree[..., None] * adjacency * degree[..., None, :]
        for layer in self.layers:
            x = F.relu(adjacency @ layer(x))
        return F.nll_loss(self.head(x.mean(1)).log_softmax(-1), y)


@case("gcn, edges", edges, reference="ddp")
class EdgeGcn(Small):
    """Messages along edges, summed by `index_add`, then by `scatter_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, (source, target), y = batch
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target)))
        h = self.first(x)
        h = F.relu(torch.zeros_like(h).index_add_(0, target, h[source]) / degree[:, None])
        h = self.second(h)
        h = torch.zeros_like(h).scatter_add(0, target[:, None].expand(-1, 8), h[source])
        return F.cross_entropy(self.head(F.relu(h)), y)


@case("gcn, sparse", edges, reference="ddp")
class SparseGcn(Small):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, edges, y = batch
        adjacency = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (len(x), len(x))).coalesce()
        h = F.relu(torch.sparse.mm(adjacency, self.first(x)))
        return F.cross_entropy(self.head(torch.sparse.mm(adjacency, h)), y)


@case("graph attention", edges, reference="ddp")
class GraphAttention(Small):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(5, 12, bias=False), nn.Linear(12, 3)
        self.source, self.target = (nn.Parameter(torch.randn(1, 3, 4) * 0.3) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, (source, target), y = batch
        h = self.project(x).view(-1, 3, 4)
        scores = F.leaky_relu((h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target], 0.2)
        index = target[:, None].expand_as(scores)
        most = torch.full((len(x), 3), -torch.inf).scatter_reduce(0, index, scores, "amax")
        weights = (scores - most[target]).exp()
        weights = weights / torch.zeros(len(x), 3).scatter_add(0, index, weights)[target]
        h = torch.zeros_like(h).index_add(0, target, weights[..., None] * h[source])
        return F.cross_entropy(self.head(F.elu(h.flatten(1))), y)
