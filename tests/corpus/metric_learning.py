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


def triplets(g: Generator) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(5, 8, generator=g) for _ in range(3))


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


@case("clip", views, reference="ddp")
class Clip(Small):
    """Two towers and a temperature that is clamped after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 6), nn.Linear(8, 6)
        self.logit_scale = nn.Parameter(torch.tensor(2.659))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = F.normalize(self.image(batch[0]), dim=-1), F.normalize(self.text(batch[1]), dim=-1)
        logits, labels = self.logit_scale.exp() * a @ b.t(), torch.arange(len(a))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.logit_scale.clamp_(0, 2.66)


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


@case("triplets", triplets)
class Triplets(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.PReLU(), nn.Linear(12, 5))
        self.loss = nn.TripletMarginLoss(margin=2.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        anchor, positive, negative = (self.net(x) for x in batch)
        return self.loss(anchor, positive, negative)


def labelled(g: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8, generator=g), torch.arange(8) % 3


@case("hard triplets and prototypes", labelled, reference="ddp")
class HardTriplets(Small):
    """The hardest pairs of a batch, centres of classes, and a margin on angles."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5))
        self.centres = nn.Parameter(torch.randn(3, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        z = self.net(x)
        distance = torch.cdist(z, z) + 1e-6
        same = y[:, None] == y[None]
        hardest = (distance * same).amax(1) - distance.masked_fill(same, 1e9).amin(1)
        cosine = F.linear(F.normalize(z), F.normalize(self.centres))
        target = F.one_hot(y, 3)
        margin = torch.where(target.bool(), torch.cos(torch.acos(cosine.clamp(-0.999, 0.999)) + 0.2), cosine)
        return F.relu(hardest + 0.5).mean() + F.cross_entropy(8 * margin, y)
