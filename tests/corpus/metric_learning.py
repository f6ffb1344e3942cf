"""Metric learning: losses over pairs of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from corpus.case import Small, case


def views(g: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 8, generator=g)
    return x + 0.1 * torch.randn(6, 8, generator=g), x + 0.1 * torch.randn(6, 8, generator=g)


class Embedder(Small):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.projector(self.backbone(x)), dim=-1)


@case("simclr", views, reference="ddp")
class SimClr(Embedder):
    """All other rows of a rank's batch are negatives."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(torch.cat(batch))
        similarity = z @ z.t() / 0.5
        similarity.fill_diagonal_(-1e9)
        labels = torch.arange(len(z)).roll(len(z) // 2)
        self.log("top1", (similarity.argmax(-1) == labels).float().mean())
        return F.cross_entropy(similarity, labels)


@case("byol", views, reference="ddp")
class Byol(Small):
    """A target that follows the online network without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target, self.predictor = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 6)
        self.target.load_state_dict(self.online.state_dict())
        for parameter in self.target.parameters():
            parameter.requires_grad = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = 0.0
        for a, b in (batch, batch[::-1]):
            with torch.no_grad():
                target = self.target(b)
            loss = loss - F.cosine_similarity(self.predictor(self.online(a)), target).mean()
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for t, o in zip(self.target.parameters(), self.online.parameters(), strict=True):
            t.data = 0.95 * t.data + 0.05 * o.data
