"""Trains a module sharded and whole, side by side, and compares losses, gradients and parameters of every step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from cases import full
from torch import Tensor, nn

from lightning_deepcompile.engine.engine import Engine

__all__ = ["assert_trains_alike"]


def assert_trains_alike(
    engine: Engine, reference: nn.Module, steps: list[list[Tensor]], *, lr: float, rtol: float, none_is_zero: bool
) -> None:
    """Runs ``training_step`` and an optimizer's step on all ranks for each of `steps`; a collective.

    Numbers are in double precision: many gradients are zero except for rounding, as of a bias before a norm.

    Args:
        engine: Trains the module in shards; must be a copy of `reference`.
        reference: Trains in every process on the batches of all ranks.
        steps: The batches of all ranks, for every step.
        lr: The learning rate.
        rtol: The relative tolerance; the absolute one is a thousandth of it.
        none_is_zero: Whether an absent gradient equals zeros, as where ranks take turns.
    """

    def assert_close(actual: Tensor | None, expected: Tensor | None, name: str) -> None:
        if none_is_zero:
            actual = torch.zeros_like(expected) if actual is None and expected is not None else actual
            expected = torch.zeros_like(actual) if expected is None and actual is not None else expected
        assert (actual is None) == (expected is None), f"{name}: {actual} against {expected}"
        if actual is not None:
            pair = actual.cpu(), expected.cpu()
            torch.testing.assert_close(*pair, rtol=rtol, atol=rtol / 1000, msg=lambda m: f"{name}: {m}")

    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer, expected_optimizer = _sgd(engine.module, lr), _sgd(reference, lr)
    engine.attach_optimizer(optimizer)
    for step, parts in enumerate(steps):
        expected = sum(reference.training_step(part) for part in parts) / world
        engine.timeline.drop_stale_gradients()
        actual = engine.run_step("training_step", parts[rank])
        optimizer.zero_grad()
        expected_optimizer.zero_grad()
        expected.backward()
        engine.backward(actual.backward)
        mean = actual.detach().clone()
        dist.all_reduce(mean)
        ours = dict(engine.module.named_parameters())
        assert_close(mean / world, expected.detach(), f"loss of step {step}")
        for name, parameter in reference.named_parameters():
            assert_close(full(ours[name].grad), parameter.grad, f"step {step}, gradient of {name}")
        optimizer.step()
        engine.parameters_changed()
        expected_optimizer.step()
    for name, parameter in reference.named_parameters():
        assert_close(full(ours[name]), parameter.detach(), name)


def _sgd(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=lr)
