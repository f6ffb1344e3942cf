"""Modules that change with steps and epochs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from corpus.case import Small, case


def rows(g: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 5, generator=g), torch.randint(0, 3, (6,), generator=g)


class Perceptron(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 9)
        self.net = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.tanh(self.layer(x)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


@case("curriculum", rows, steps=3, epochs=4)
class Curriculum(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * min(1.0, (self.global_step + 1) / 10)
        self.log("x", (self.current_epoch + 1) / 10)
        return loss


@case("lists by epoch", rows, steps=2, epochs=3)
class Listed(Perceptron):
    """Weights of losses, and layers, from lists that are indexed by the epoch."""

    weights = [1.0, 0.5, 0.25]
    phases = ["all", "head", "all"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = torch.tanh(self.layer(x))
        if self.phases[self.current_epoch] == "head":
            h = h.detach()
        logits = self.net(h)
        return self.weights[self.current_epoch] * F.cross_entropy(logits, y) + (
            0.01 * logits.square().mean() if self.current_epoch > 0 else 0.0
        )


@case("annealed temperature", rows, steps=3, epochs=2)
class Annealed(Perceptron):
    """A float attribute that every step lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.temperature = max(0.5, self.temperature * 0.9)
        self.log("temperature", self.temperature)
        return F.cross_entropy(self(x) / self.temperature, y)


@case("cyclic weight", rows, steps=3, epochs=2)
class Cyclic(Perceptron):
    """Of the number of the batch, the length of an epoch, and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += len(batch[0])
        progress = (self.current_epoch + batch_idx / self.trainer.num_training_batches) / self.trainer.max_epochs
        beta = 0.5 * (1 + torch.cos(torch.tensor(progress * 3.14159)))
        return self.loss(batch) * (0.1 + beta) + 1e-3 * (batch_idx % 2)


@case("warm-up by hand", rows, steps=3, epochs=2)
class WarmUp(Perceptron):
    """Learning rates that are set before the optimizer steps."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)
        optimizer.step(closure=optimizer_closure)


@case("plateau", rows, steps=2, epochs=3)
class Plateau(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss"}}


@case("one cycle, per step", rows, steps=6)
class OneCycle(Perceptron):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layer.parameters(), "lr": 0.01}, {"params": self.net.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.1], total_steps=6)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("lr", self.lr_schedulers().get_last_lr()[0])
        return self.loss(batch)


@case("accumulated and clipped", rows, steps=6,
      trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05})  # fmt: skip
class Clipped(Perceptron):
    lr = 1.0


@case("clipped by value", rows, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"})
class ClippedByValue(Perceptron):
    lr = 1.0


@case("accumulated by hand", rows, steps=5)
class AccumulatedByHand(Perceptron):
    """Two batches per optimizer step, and the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.detach()}
