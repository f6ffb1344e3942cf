"""Optimizers as users write them, for tests: element-wise, tensor by tensor, and such that couple tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["GlobalClip", "Lars", "Lion", "MuonWithAuxAdam", "Sam", "SignSam"]


class Lion(Optimizer):
    """Element-wise: the sign of an average."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.add_((average * first + p.grad * (1 - first)).sign(), alpha=-group["lr"])
                average.mul_(second).add_(p.grad, alpha=1 - second)
        return loss


class Lars(Optimizer):
    """Tensor by tensor: a rate for each, by the norms of the tensor and of its gradient."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, trust: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "trust": trust, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                ratio = group["trust"] * p.norm() / (p.grad.norm() + 1e-9)
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                state["momentum_buffer"].mul_(group["momentum"]).add_(p.grad * ratio)
                p.sub_(state["momentum_buffer"] * group["lr"])
        return loss


class GlobalClip(Optimizer):
    """Couples all tensors: gradients are clipped by their common norm inside of the step."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, limit: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "limit": limit, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held if p.grad is not None]).norm()
        for group in self.param_groups:
            factor = (group["limit"] / norm).clamp(max=1)
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    state["momentum_buffer"].mul_(group["momentum"]).add_(p.grad * factor)
                    p.sub_(state["momentum_buffer"] * group["lr"])
        return loss


class Sam(Optimizer):
    """Sharpness-aware minimization as it is widely copied: wraps another optimizer, assigns ``.data``."""

    def __init__(
        self, params: Iterable[Any], base: type[Optimizer] = torch.optim.SGD, rho: float = 0.05, **settings: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        """Climbs to the neighbour of the largest loss."""
        norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        """Goes back, and descends by the gradient of the neighbour."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        assert closure is not None, "SAM requires a closure"
        closure = torch.enable_grad()(closure)
        loss = closure()  # Lightning's closures zero gradients and go backward
        self.first_step(zero_grad=True)
        closure()
        self.second_step()
        return loss

    def _grad_norm(self) -> Tensor:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.norm(torch.stack([p.grad.norm(p=2) for p in held if p.grad is not None]), p=2)


class SignSam(Optimizer):
    """Element-wise, though its closure is evaluated twice: climbs by signs."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, rho: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        assert closure is not None
        closure = torch.enable_grad()(closure)
        loss = closure()
        climbed = [(g, p, p.grad.sign()) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for group, p, sign in climbed:
            p.add_(sign, alpha=group["rho"])
        closure()
        for group, p, sign in climbed:
            p.sub_(sign, alpha=group["rho"])
            p.data = p.data - p.grad * group["lr"]
        return loss


class MuonWithAuxAdam(Optimizer):
    """Muon for groups with ``use_muon``, Adam for the others, in one class."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            settings = {"lr": 0.02, "momentum": 0.95} if group["use_muon"] else {"lr": 3e-4, "betas": (0.9, 0.95)}
            for key, value in settings.items():
                group.setdefault(key, value)
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if group["use_muon"]:
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    average = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                    update = _orthogonal(p.grad.lerp(average, group["momentum"]))
                    p.add_(update * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5, alpha=-group["lr"])
                    continue
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                first, second = group["betas"]
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - second)
                mean = state["exp_avg"] / (1 - first ** state["step"])
                square = state["exp_avg_sq"] / (1 - second ** state["step"])
                p.sub_(mean / (square.sqrt() + 1e-8) * group["lr"])
        return loss


def _orthogonal(update: Tensor) -> Tensor:
    """Newton-Schulz, in fp32: CPUs compare exactly."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.mT if update.shape[-2] > update.shape[-1] else update
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if update.shape[-2] > update.shape[-1] else x
