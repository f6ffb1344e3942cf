"""Modules that use their own parameters other than by calling layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from corpus.case import Small, case
from corpus.schedules import Perceptron, rows


@case("penalty on all parameters", rows)
class Penalty(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        l1 = sum(p.abs().sum() for p in self.parameters())
        l2 = sum(p.pow(2).sum() for name, p in self.named_parameters() if "bias" not in name)
        return self.loss(batch) + 1e-3 * l1 + 1e-2 * l2


@case("weights read in the step", rows)
class Reads(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        w = self.layer.weight
        orthogonal = (w.t() @ w - torch.eye(5)).square().sum()
        h = torch.tanh(F.linear(batch[0], w, self.layer.bias))
        return F.cross_entropy(self.net(h), batch[1]) + 0.01 * orthogonal + 0.01 * self.net[2].weight[0].norm()


@case("clamped in the step", rows)
class Clamped(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.layer.weight.data.clamp_(-0.3, 0.3)
        return self.loss(batch)


@case("scaled in the step", rows)
class Scaled(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net[0].weight.data.mul_(0.5)
        return self.loss(batch)


@case("normalised without gradients", rows)
class Normalised(Perceptron):
    """Weights kept on a sphere; and a row that is kept at zero."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net[2].weight.copy_(F.normalize(self.net[2].weight, dim=1))
            self.layer.bias[0] = 0.0
        return self.loss(batch)


@case("hooks", rows)
class Hooks(Perceptron):
    """Forward hooks that look and that change, a pre-hook, and one that keeps activations for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
        self.net[0].register_forward_hook(lambda module, args, output: output + 0.1)
        self.net[1].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen["hidden"] = output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.1 * self.seen["hidden"].square().mean()


@case("backward hooks", rows)
class BackwardHooks(Perceptron):
    """A tensor's gradient is turned around, and a module's is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = torch.tanh(self.layer(batch[0]))
        if h.requires_grad:
            h.register_hook(lambda gradient: -0.5 * gradient)
        return F.cross_entropy(self.net(h), batch[1])


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(rank))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * (x @ self.a.t() @ self.b.t())


@case("lora", rows)
class LoraFinetuning(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.layer, self.net[0] = Lora(self.layer, 2), Lora(self.net[0], 2)
        self.net[2].bias.requires_grad_(True)


@case("frozen and freed", rows, steps=2, epochs=3)
class Freed(Perceptron):
    """A backbone in evaluation mode without gradients, which is trained from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        trained = self.current_epoch >= 1
        self.layer.requires_grad_(trained)
        self.layer.train(trained)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def tasks(g: Generator) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(6, 5, generator=g), torch.randint(0, 3, (6,), generator=g), torch.randn(6, generator=g)


@case("several tasks", tasks)
class Tasks(Small):
    """Uncertainties of tasks are parameters without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 9), nn.ReLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(9, 3), "value": nn.Linear(9, 1)})
        self.log_vars = nn.ParameterDict({name: nn.Parameter(torch.tensor(0.1)) for name in self.heads})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, kind, value = batch
        h = self.body(x)
        losses = {
            "kind": F.cross_entropy(self.heads["kind"](h), kind),
            "value": F.mse_loss(self.heads["value"](h).squeeze(-1), value),
        }
        self.log_dict(losses)
        return sum(torch.exp(-self.log_vars[name]) * loss + self.log_vars[name] for name, loss in losses.items())


@case("gradients by hand", rows, same=True)
class ByHand(Perceptron):
    """`autograd.grad` of the loss, handed to the parameters, and a plain update without an optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        parameters = list(self.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        optimizer = self.optimizers()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach()}
