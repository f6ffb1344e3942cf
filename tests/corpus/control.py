"""Steps that do more than compute a loss: numpy, texts, metrics, lists, decisions on values."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

from corpus.case import case
from corpus.schedules import Perceptron, rows


@case("memory bank", rows, reference="ddp", steps=6)
class MemoryBank(Perceptron):
    """A list that grows, of which the last ones are read."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        feature = torch.tanh(self.layer(x))
        loss = F.cross_entropy(self.net(feature), y)
        if self.bank:
            loss = loss + 0.1 * (feature.mean(0) - torch.stack(self.bank[-8:]).mean(0)).square().sum()
        self.bank.append(feature.mean(0).detach())
        return loss


@case("queue in a buffer", rows, reference="ddp", steps=5)
class Queue(Perceptron):
    """A queue like MoCo's, written at a position that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(9, 12), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        feature = F.normalize(self.layer(x), dim=1)
        loss = self.loss(batch) + 0.1 * (feature @ self.queue.clone().detach() / 0.5).logsumexp(1).mean()
        start = int(self.pointer)
        self.queue[:, start : start + len(x)] = feature.T.detach()
        self.pointer[0] = (start + len(x)) % 12
        return loss


@case("early exit", rows, same=True)
class EarlyExit(Perceptron):
    """The number of layers that run depends on the loss so far."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(9, 3) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x, loss, depth = torch.tanh(self.layer(x)), torch.zeros(()), 0
        for block, head in zip(self.blocks, self.heads, strict=True):
            depth += 1
            x = x + torch.tanh(block(x))
            loss = loss + F.cross_entropy(head(x), y)
            if loss.item() > 2.0 + 0.05 * batch_idx:
                break
        self.log("depth", float(depth))
        return loss / depth


@case("numpy in the loss", rows, reference="ddp")
class Numpy(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        counts = np.bincount(y.cpu().numpy(), minlength=3)
        weights = torch.from_numpy((1.0 / (1.0 + counts)).astype(np.float32))
        logits = self(x)
        loss = F.cross_entropy(logits, y, weight=weights)
        hardness = np.exp(-loss.detach().cpu().numpy())
        probabilities = logits.detach().softmax(-1).numpy()
        entropy = float(-(probabilities * np.log(probabilities)).sum(-1).mean())
        return loss * float(hardness) + 0.01 * entropy * logits.square().mean()


@case("assignment", rows, reference="ddp")
class Assignment(Perceptron):
    """Pairs that a greedy matching in Python finds, as of detection with queries."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        cost = (1 - logits.detach().softmax(-1)[:, y]).tolist()
        free, pairs = set(range(len(y))), []
        for row in range(len(y)):
            best = min(free, key=lambda column, row=row: (cost[row][column], column))
            free.remove(best)
            pairs.append((row, best))
        source, target = (torch.tensor(part) for part in zip(*pairs, strict=True))
        return F.cross_entropy(logits[source], y[target])


@case("metrics", rows, steps=3, epochs=2)
class Metrics(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.scores = torchmetrics.MetricCollection(
            [
                torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
                torchmetrics.ConfusionMatrix(task="multiclass", num_classes=3),
            ]
        )
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.scores.update(logits, y)
        self.mean(loss)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        values = self.scores.compute()
        assert int(values["MulticlassConfusionMatrix"].sum()) == 36
        self.scores.reset()


@case("texts", rows)
class Texts(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        started = time.perf_counter()
        loss = self.loss(batch)
        text = f"step {self.global_step}: loss {loss.item():.4f}, rows {len(batch[0]):>3d}, {loss=}"
        self.lines = [*getattr(self, "lines", []), text]
        if batch_idx % 2 == 0:
            print(text, end="", file=open("/dev/null", "w"))  # noqa: SIM115
        assert time.perf_counter() >= started
        return {"loss": loss, "text": text, "length": len(text)}


@case("statistics of weights", rows)
class Statistics(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("norm", self.layer.weight.norm())
        self.log("singular", torch.linalg.svdvals(self.layer.weight.detach())[0])
        if batch_idx % 2 == 0:
            self.log_dict({"mean": self.net[0].weight.mean().item(), "std": self.net[2].weight.std().item()})
        assert self.layer.weight.shape == (9, 5) and self.layer.weight.numel() == 45
        return loss


@case("outputs of a hook", rows, reference="ddp")
class Outputs(Perceptron):
    """Results of steps are collected until the epoch ends; extra losses wait in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[dict[str, Tensor]] = []
        self.extra: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        self.extra["sparsity"] = h.abs().mean()
        return self.net(h)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch) + 0.1 * sum(self.extra.values())
        self.outputs.append({"loss": loss.detach(), "preds": self(batch[0]).argmax(-1).detach()})
        return {"loss": loss, "logits": self(batch[0]).detach()}

    def on_train_epoch_end(self) -> None:
        self.log("epoch_loss", torch.stack([o["loss"] for o in self.outputs]).mean(), sync_dist=True)
        assert len(torch.cat([o["preds"] for o in self.outputs])) == 24
        self.outputs.clear()
