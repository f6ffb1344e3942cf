"""Generative models: autoencoders, diffusion, flows, densities."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from corpus.case import Small, case


def rows(g: Generator) -> Tensor:
    return torch.randn(6, 8, generator=g)


@case("vae", rows, reference="ddp")
class Vae(Small):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6))
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mu, logvar = self.encoder(batch).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        reconstruction = F.mse_loss(self.decoder(z), batch)
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(-1).mean()
        self.log_dict({"reconstruction": reconstruction, "kl": kl})
        return reconstruction + 0.1 * kl


@case("vae, distributions", rows, reference="ddp")
class DistributionVae(Small):
    """The same with `torch.distributions`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 6), nn.Linear(3, 8)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mu, scale = self.encoder(batch).chunk(2, dim=-1)
        q = torch.distributions.Normal(mu, F.softplus(scale) + 1e-3)
        prior = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(mu))
        z = q.rsample()
        p = torch.distributions.Normal(self.decoder(z), self.log_scale.exp())
        kl = torch.distributions.kl_divergence(q, prior)
        return (kl.sum(-1) - p.log_prob(batch).sum(-1)).mean() * 0.1


@case("tied autoencoder", rows)
class Tied(Small):
    """The decoder is the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 5)
        self.bias = nn.Parameter(torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.encoder(batch))
        return F.mse_loss(F.linear(hidden, self.encoder.weight.t(), self.bias), batch)


@case("vector quantisation", rows)
class Quantised(Small):
    """Straight-through to the nearest code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.codes = nn.Linear(8, 6), nn.Linear(6, 8), nn.Embedding(7, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self.encoder(batch).view(-1, 3)
        code = torch.cdist(z, self.codes.weight).argmin(-1)
        quantised = self.codes(code)
        commitment = F.mse_loss(quantised.detach(), z) + 0.25 * F.mse_loss(quantised, z.detach())
        quantised = z + (quantised - z).detach()
        return F.mse_loss(self.decoder(quantised.view(-1, 6)), batch) + commitment


def noised(g: Generator) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(6, 8, generator=g), torch.randn(6, 8, generator=g), torch.randint(0, 20, (6,), generator=g)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(6, 10), nn.SiLU(), nn.Linear(10, 10))
        self.first, self.last = nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(1000.0) * torch.arange(3) / 3)
        angles = t[:, None] * frequencies
        return self.last(F.silu(self.first(x) + self.time(torch.cat([angles.sin(), angles.cos()], -1))))


class Diffusion(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = Denoiser()
        betas = torch.linspace(1e-4, 0.2, 20)
        self.register_buffer("alphas_cumprod", (1 - betas).cumprod(0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, noise, t = batch
        a = self.alphas_cumprod[t][:, None]
        return F.mse_loss(self.net(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


@case("ddpm", noised)
class Ddpm(Diffusion):
    pass


@case("diffusion with an average", noised)
class Averaged(Diffusion):
    """A copy follows the network after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.ema = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for average, parameter in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                average.mul_(0.9).add_(parameter, alpha=0.1)


@case("diffusion with a list average", noised)
class ListAveraged(Diffusion):
    """The same by `torch._foreach`, and the average teaches."""

    def __init__(self) -> None:
        super().__init__()
        self.ema = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, noise, t = batch
        with torch.no_grad():
            teacher = self.ema(x, t)
        return super().training_step(batch, batch_idx) + 0.1 * F.mse_loss(self.net(x, t), teacher)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.parameters()), list(self.net.parameters()), 0.1)


class Coupling(nn.Module):
    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, dim=-1)
        if self.flip:
            a, b = b, a
        scale, shift = self.net(a).chunk(2, dim=-1)
        scale = torch.tanh(scale)
        return torch.cat([a, b * scale.exp() + shift], -1), scale.sum(-1)


@case("flow", rows)
class Flow(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(bool(i % 2)) for i in range(3))
        self.turn = nn.Parameter(torch.linalg.qr(torch.randn(8, 8)).Q.contiguous())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch @ self.turn
        logdet = torch.linalg.slogdet(self.turn).logabsdet
        for layer in self.layers:
            x, more = layer(x)
            logdet = logdet + more
        return 0.1 * (0.5 * (x.square() + math.log(2 * math.pi)).sum(-1) - logdet).mean()


def pairs(g: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3, generator=g), torch.randn(6, 1, generator=g)


@case("mixture density", pairs)
class MixtureDensity(Small):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 9), nn.Tanh())
        self.pi, self.mu, self.sigma = (nn.Linear(9, 4) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.body(x)
        components = torch.distributions.Normal(self.mu(h), F.softplus(self.sigma(h)) + 0.1)
        return -torch.logsumexp(self.pi(h).log_softmax(-1) + components.log_prob(y), -1).mean()
