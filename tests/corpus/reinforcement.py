"""Reinforcement learning: several optimizer steps per batch, target networks, policies."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

from corpus.case import Small, case


def rollout(g: Generator) -> tuple[Tensor, ...]:
    return (
        torch.randn(8, 5, generator=g),
        torch.randint(0, 3, (8,), generator=g),
        torch.randn(8, generator=g),
        -1.0 - 0.1 * torch.rand(8, generator=g),
    )


@case("ppo", rollout, reference="ddp", steps=3)
class Ppo(Small):
    """Epochs over the minibatches of a rollout, with clipped gradients, inside of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
        self.critic = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        optimizer, total = self.optimizers(), torch.zeros(())
        for _ in range(2):
            for start in (0, 4):
                state, action, returns, old = (part[start : start + 4] for part in batch)
                value = self.critic(state)[:, 0]
                advantage = (returns - value).detach()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy = Categorical(logits=self.actor(state))
                ratio = (policy.log_prob(action) - old).exp()
                clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = F.mse_loss(value, returns) - clipped.mean() - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                total += loss.detach()
        return {"loss": total}


def transitions(g: Generator) -> tuple[Tensor, ...]:
    return (
        torch.randn(6, 5, generator=g),
        torch.randint(0, 3, (6,), generator=g),
        torch.randn(6, generator=g),
        torch.rand(6, generator=g) < 0.2,
        torch.randn(6, 5, generator=g),
    )


class QLearning(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
        self.target = copy.deepcopy(self.net)

    def loss(self, batch: Any) -> Tensor:
        state, action, reward, done, following = batch
        value = self.net(state).gather(1, action.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            best = self.target(following).max(1)[0]
            best[done] = 0.0
        return nn.SmoothL1Loss()(value, best.detach() * 0.9 + reward)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@case("dqn", transitions)
class Dqn(QLearning):
    """The target is the network of some steps ago."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step % 2 == 0:
            self.target.load_state_dict(self.net.state_dict())


@case("dqn, target in the step", transitions)
class DqnInStep(QLearning):
    """The same from inside of the step, as in Lightning's own examples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.global_step % 2 == 0:
            self.target.load_state_dict(self.net.state_dict())
        self.log("loss", loss)
        return loss


@case("soft actor-critic", transitions)
class SoftActorCritic(Small):
    """Three optimizers, two critics, and targets that follow them, all from inside of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor = nn.Linear(5, 3)
        self.q1, self.q2 = nn.Linear(5, 3), nn.Linear(5, 3)
        self.t1, self.t2 = copy.deepcopy(self.q1), copy.deepcopy(self.q2)
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))

    def configure_optimizers(self) -> Any:
        critics = [*self.q1.parameters(), *self.q2.parameters()]
        return [torch.optim.SGD(p, lr=0.05) for p in (self.actor.parameters(), critics, [self.log_alpha])]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        state, action, reward, done, following = batch
        actor, critic, temperature = self.optimizers()
        with torch.no_grad():
            policy = Categorical(logits=self.actor(following))
            best = torch.min(self.t1(following), self.t2(following)) - self.log_alpha.exp() * policy.logits
            target = reward + 0.9 * (~done) * (policy.probs * best).sum(-1)
        q_loss = sum(F.mse_loss(q(state).gather(1, action[:, None])[:, 0], target) for q in (self.q1, self.q2))
        critic.zero_grad()
        self.manual_backward(q_loss)
        critic.step()

        policy = Categorical(logits=self.actor(state))
        best = torch.min(self.q1(state), self.q2(state)).detach()
        actor_loss = (policy.probs * (self.log_alpha.exp().detach() * policy.logits - best)).sum(-1).mean()
        actor.zero_grad()
        self.manual_backward(actor_loss)
        actor.step()

        alpha_loss = (self.log_alpha.exp() * (policy.entropy().detach() - 0.5)).mean()
        temperature.zero_grad()
        self.manual_backward(alpha_loss)
        temperature.step()
        for online, target_net in ((self.q1, self.t1), (self.q2, self.t2)):
            for p, t in zip(online.parameters(), target_net.parameters(), strict=True):
                t.data.mul_(0.9).add_(0.1 * p.data)
        return {"loss": (q_loss + actor_loss + alpha_loss).detach()}
