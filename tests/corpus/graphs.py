"""Graphs: convolutions and attention over edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from corpus.case import Small, case


def edges(g: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """One graph, with self-loops: nodes, edges, classes of nodes."""
    loops = torch.arange(9).expand(2, 9)
    return (
        torch.randn(9, 5, generator=g),
        torch.cat([loops, torch.randint(0, 9, (2, 20), generator=g)], dim=1),
        torch.randint(0, 3, (9,), generator=g),
    )


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
