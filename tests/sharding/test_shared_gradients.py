"""Graphs in which one tensor is several things: a gradient of several uses, an output twice, a buffer and its copy."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from multiprocess import run_ranks
from test_handover import trainer_of
from test_python_in_steps import ours
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


class Base(pl.LightningModule):
    """A layer and a head; records the losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.losses: tuple[float, ...] = ()

    def loss(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).tanh()).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses += (float(outputs["loss"]),)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class UsedTwice(Base):
    """A layer's bias has the same gradient from both of its uses."""

    def loss(self, x: Tensor) -> Tensor:
        return self.head((self.layer(x) + self.layer(x.flip(1)) + self.layer(2 * x)).relu()).square().mean()


class LogsACopy(Base):
    """The loss is a copy, and so is what is logged."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch).clone()
        self.log("loss", loss)
        self.kept = loss.clone().detach()
        return loss


class Shuffles(Base):
    """Mixes a batch with itself."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        torch.manual_seed(batch_idx)
        order = torch.randperm(len(batch))
        return self.loss(0.7 * batch + 0.3 * batch[order])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch[torch.randperm(len(batch))])


class Queue(Base):
    """Keys of earlier batches, written behind a break of the graph (momentum contrast)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(8, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        query = self.head(self.layer(batch).tanh())
        loss = F.cross_entropy(query @ self.queue.clone().detach().T, torch.zeros(len(batch), dtype=torch.long))
        with torch.no_grad():
            place = int(self.place)
            self.queue[place : place + 2] = query
            self.place[0] = (place + 2) % 8
        return loss


class Measures(Base):
    """Metrics are called, updated, computed and logged, one with a column of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.error = MeanMetric(), MeanSquaredError()
        self.several = MetricCollection([MulticlassAccuracy(4), MulticlassF1Score(4)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        logits = self.head(self.layer(batch).tanh())
        target = batch[:, :4].argmax(1)
        loss = F.cross_entropy(logits, target)
        self.mean(loss)
        self.several.update(logits, target)
        column = logits[:, 0]
        self.log("error", self.error(column.detach(), batch[:, 0]))
        self.log_dict({"mean": self.mean, "total": self.mean.compute(), **self.several})
        return loss + column.mean()


class BackwardInHooks(Base):
    """Saliency after each batch, which is nobody's gradient, and a loss that a hook adds."""

    def on_after_backward(self) -> None:
        self.loss(torch.ones(1, 6)).backward()

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        super().on_train_batch_end(outputs)
        self.zero_grad()
        (100 * self.loss(torch.ones(1, 6))).backward()
        assert self.head.bias.grad is not None
        self.zero_grad()


class Mixed(Base):
    """Parameters of several dtypes stay what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.frozen = nn.Linear(6, 6, dtype=torch.bfloat16).requires_grad_(False)

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(self.frozen(x.bfloat16()).double())


def _run(build: type[Base], strategy: Any, size: int = 2) -> Base:
    """Trains with eight batches, of which each of several ranks has its part."""
    torch.manual_seed(5)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    module, batches = build(), torch.randn(8, world, size, 6)[:, rank].reshape(-1, 6)
    trainer_of(strategy).fit(module, DataLoader(batches, size), DataLoader(batches[:size], size))
    return module


@pytest.mark.parametrize("build", [LogsACopy, Shuffles, Queue, Measures, Mixed])
def test_trains_as_without_compilation(build: type[Base]) -> None:
    expected, module = _run(build, "auto"), _run(build, ours())
    assert len(module.losses) == 8 and module.losses == pytest.approx(expected.losses, rel=1e-5)
    metrics, known = module.trainer.callback_metrics, expected.trainer.callback_metrics
    torch.testing.assert_close(metrics, known, rtol=1e-5, atol=1e-6, check_dtype=False)
    assert [p.dtype for p in module.parameters()] == [p.dtype for p in expected.parameters()]


SHARED = (UsedTwice, Measures, BackwardInHooks)


def _losses() -> list[tuple[float, ...]]:
    return [_run(build, ours()).losses for build in SHARED]


def test_two_ranks_train_as_one() -> None:
    losses = torch.tensor(run_ranks(_losses, 2)).mean(0)
    expected = [_run(build, "auto", size=4).losses for build in SHARED]
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=1e-6)


class Assigns(Base):
    """An average of weights as it is often written, and other ways to put a tensor in a parameter's place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.how == "data":
            self.layer.weight.data = self.layer.weight.data * 0.9
        elif batch_idx == 2 and self.how == "parameter":
            self.layer.weight = nn.Parameter(self.layer.weight.detach() * 0.9)
        elif batch_idx == 2 and self.how == "module":
            self.layer.to(torch.float64)
            self.layer.to(torch.float32)
        elif self.how == "nothing":
            self.float().to("cpu")


@pytest.mark.parametrize("how", ["parameter", "module"])
def test_what_steps_would_not_see_is_refused(how: str) -> None:
    with pytest.raises(RuntimeError, match=r"'layer.weight'.*copy_"):
        _run(lambda: Assigns(how), ours())  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["data", "nothing"])
def test_values_that_are_assigned_and_conversions_that_change_nothing(how: str) -> None:
    module, expected = (_run(lambda: Assigns(how), strategy) for strategy in (ours(), "auto"))  # type: ignore[arg-type]
    assert module.losses == pytest.approx(expected.losses, rel=1e-5)
