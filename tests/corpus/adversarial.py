"""Adversarial training: several optimizers, taken by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from corpus.case import Small, case


def noisy(g: Generator) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(6, 8, generator=g) + 1, torch.randn(6, 4, generator=g), torch.rand(6, 1, generator=g)


class TwoPlayers(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 10), nn.LayerNorm(10), nn.ReLU(), nn.Linear(10, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 10), nn.LeakyReLU(0.2), nn.Linear(10, 1))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.05, momentum=0.5),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1),
        ]


@case("gan", noisy)
class Gan(TwoPlayers):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        real, noise, _ = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        score = self.discriminator(self.generator(noise))
        g_loss = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
        self.manual_backward(g_loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        real_score, fake_score = self.discriminator(real), self.discriminator(self.generator(noise).detach())
        d_loss = 0.5 * (
            F.binary_cross_entropy_with_logits(real_score, torch.ones_like(real_score))
            + F.binary_cross_entropy_with_logits(fake_score, torch.zeros_like(fake_score))
        )
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)
        self.manual_backward(d_loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        return {"loss": (g_loss + d_loss).detach()}


@case("retained graph", noisy)
class Retained(TwoPlayers):
    """One optimizer, and two backward passes through the same features."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        real, noise, _ = batch
        optimizer, _ = self.optimizers()
        fake = self.generator(noise)
        first, second = fake.square().mean(), (fake - real).abs().mean()
        optimizer.zero_grad()
        self.manual_backward(first, retain_graph=True)
        self.manual_backward(second)
        optimizer.step()
        return {"loss": first.detach() + second.detach()}


@case("gan, zero_grad first", noisy)
class PlainGan(TwoPlayers):
    """Without toggling: the generator's loss leaves gradients in the discriminator, which are zeroed."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        real, noise, _ = batch
        opt_g, opt_d = self.optimizers()
        fake = self.generator(noise)
        d_loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake.detach())).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        g_loss = F.softplus(-self.discriminator(fake)).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        return {"loss": d_loss.detach() + g_loss.detach()}


@case("wgan-gp", noisy)
class WganGp(TwoPlayers):
    """The critic's gradient with respect to what it judges is part of its loss; the generator's turn is every other."""

    def gradient_penalty(self, real: Tensor, fake: Tensor, epsilon: Tensor) -> Tensor:
        mixed = (epsilon * real + (1 - epsilon) * fake).requires_grad_(True)
        score = self.discriminator(mixed)
        (gradient,) = torch.autograd.grad(
            score, mixed, torch.ones_like(score), create_graph=True, retain_graph=True, only_inputs=True
        )
        return ((gradient.norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        real, noise, epsilon = batch
        opt_g, opt_d = self.optimizers()
        fake = self.generator(noise).detach()
        loss = self.discriminator(fake).mean() - self.discriminator(real).mean()
        loss = loss + 10 * self.gradient_penalty(real, fake, epsilon)
        opt_d.zero_grad()
        self.manual_backward(loss)
        opt_d.step()
        if batch_idx % 2 == 0:
            opt_g.zero_grad()
            self.manual_backward(-self.discriminator(self.generator(noise)).mean())
            opt_g.step()
        return {"loss": loss.detach()}


@case("spectral norm", noisy)
class SpectralNorm(Small):
    """A discriminator alone; power iteration writes to buffers of the parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(8, 12)),
            nn.LeakyReLU(0.1),
            nn.Unflatten(1, (3, 4)),
            parametrizations.spectral_norm(nn.Conv1d(3, 5, 3)),
            nn.Flatten(),
            parametrizations.spectral_norm(nn.Linear(10, 1), n_power_iterations=2),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        real, noise, _ = batch
        fake = torch.cat([noise, noise.flip(1)], 1)
        return F.relu(1 - self.net(real)).mean() + F.relu(1 + self.net(fake)).mean()


@case("spectral and weight norm, by hooks", noisy)
class HookedNorms(Small):
    """The older functions, which compute the weight in a hook before each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.spectral_norm(nn.Linear(8, 12))
        self.second = nn.utils.weight_norm(nn.Linear(12, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.softplus(-self.second(torch.tanh(self.first(batch[0])))).mean()
