"""Derivatives inside of the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from corpus.case import Small, case
from corpus.schedules import Perceptron, rows


class Sine(nn.Module):
    def __init__(self, inputs: int, outputs: int, frequency: float) -> None:
        super().__init__()
        self.linear, self.frequency = nn.Linear(inputs, outputs), frequency

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency * self.linear(x))


def points(g: Generator) -> tuple[Tensor, Tensor]:
    x = torch.rand(8, 2, generator=g) * 2 - 1
    return x, x.norm(dim=1, keepdim=True) - 0.5


@case("siren, eikonal", points)
class Siren(Small):
    """A distance whose gradient has length one."""

    lr = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Sine(2, 12, 5.0), Sine(12, 12, 1.0), nn.Linear(12, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, distance = batch
        x = x.clone().requires_grad_(True)
        y = self.net(x)
        gradient = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]
        return F.mse_loss(y, distance) + 0.1 * (gradient.norm(dim=-1) - 1).square().mean()


@case("physics-informed", points)
class Physics(Small):
    """Second derivatives: Burgers' equation."""

    lr = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))
        self.viscosity = nn.Parameter(torch.tensor(0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        points, start = batch
        x, t = points[:, :1].requires_grad_(), points[:, 1:].requires_grad_()
        u = self.net(torch.cat([x, t], dim=1))

        def d(y: Tensor, by: Tensor) -> Tensor:
            return torch.autograd.grad(y, by, torch.ones_like(y), create_graph=True, retain_graph=True)[0]

        u_x = d(u, x)
        residual = d(u, t) + u * u_x - self.viscosity * d(u_x, x)
        return residual.square().mean() + F.mse_loss(self.net(torch.cat([x, torch.zeros_like(t)], 1)), start)


@case("laplacian by functions", points)
class Functional(Small):
    """The same kind of loss by `torch.func`."""

    lr = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, value = batch
        gradient = torch.func.vmap(torch.func.grad(lambda point: self.net(point).sum()))(x)
        hessian = torch.func.vmap(torch.func.hessian(lambda point: self.net(point)[0]))(x)
        laplacian = hessian.diagonal(dim1=-2, dim2=-1).sum(-1)
        return (laplacian - value[:, 0]).square().mean() + 0.1 * gradient.square().mean()


@case("forces", points)
class Forces(Small):
    """Energies, and forces as their gradients, as of molecular dynamics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 10), nn.SiLU(), nn.Linear(10, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, energy = batch
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            predicted = self.net(x)
            forces = -torch.autograd.grad(predicted.sum(), x, create_graph=self.training)[0]
        return F.mse_loss(predicted, energy) + F.mse_loss(forces, -x.detach())


@case("adversarial examples", rows)
class AdversarialExamples(Perceptron):
    """The fast gradient sign, and a penalty on the gradient's size."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        loss = self.loss((x, y))
        (gradient,) = torch.autograd.grad(loss, x)
        return self.loss((x.detach() + 0.1 * gradient.sign(), y))


@case("meta-learning", rows, reference="ddp")
class Maml(Perceptron):
    """A step of gradient descent inside of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        fast = dict(self.net.named_parameters())
        h = torch.tanh(self.layer(x))
        inner = F.cross_entropy(torch.func.functional_call(self.net, fast, (h,)), y)
        gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.net, fast, (h.flip(1),)), y)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


class LinearFunction(torch.autograd.Function):
    """Saves a weight for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


@case("autograd functions", rows)
class Functions(Perceptron):
    """Domain adaptation by a reversed gradient, and a linear layer written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(9, 2, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = torch.tanh(self.layer(x))
        domain = LinearFunction.apply(Reverse.apply(h, 0.3), self.domain.weight)
        return F.cross_entropy(self.net(h), y) + F.cross_entropy(domain, y % 2)
