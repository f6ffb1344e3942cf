"""Hooks on parameters: those behind accumulation are called as in one process, others are refused when they come."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Base, Record, assert_same_training, full, train
from multiprocess import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_deepcompile import CompileConfig, DeepCompileStrategy

MOMENTS = ("setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_batch_start")


class Net(Base):
    """Parameters that are not used in every batch, one without rows, and an uncompiled layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 7)
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])
        self.layers[1].forward = torch.compiler.disable(self.layers[1].forward)
        self.now_and_then = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.head = nn.Linear(7, 61)
        self.calls: list[tuple[str, Tensor]] = []

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        if self.uses_all:
            x = x + self.now_and_then(x)
        return self.head(x * self.scale)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.uses_all = batch_idx % 2 == 0
        return super().training_step(batch, batch_idx)


class Hooked(Net):
    """Registers hooks at `moment`, which change gradients, and are removed in the end."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self.moment = moment
        self.handles: list[Any] = []
        if moment == "__init__":
            self.register_all()

    def register_all(self) -> None:
        if not self.handles:
            self.handles = [self.register(name, p) for name, p in self.named_parameters()]

    def register(self, name: str, parameter: nn.Parameter) -> Any:
        def hook(seen: Tensor) -> None:
            assert seen is dict(self.named_parameters())[name] and not torch.is_grad_enabled()
            grad = seen.grad
            assert grad is not None and grad.shape == seen.shape
            self.calls.append((name, full(grad)))
            grad.mul_(0.5)

        return parameter.register_post_accumulate_grad_hook(hook)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            for handle in self.handles:
                handle.remove()
            self.ended = len(self.calls)

    def on_train_end(self) -> None:
        assert len(self.calls) == self.ended > 0


class StepsInBackward(Net):
    """Each parameter's own optimizer steps when its gradient is there, which is freed then."""

    def on_fit_start(self) -> None:
        self.own = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in self.parameters()}
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.step)

    def step(self, parameter: Tensor) -> None:
        self.own[parameter].step()
        parameter.grad = None


def _register(self: Hooked, moment: str) -> None:
    if self.moment == moment:
        self.register_all()


def _at(moment: str) -> Callable[..., Any]:
    def hook(self: Hooked, *args: Any, **kwargs: Any) -> Any:
        _register(self, moment)
        return getattr(super(Hooked, self), moment)(*args, **kwargs)

    return hook


for _moment in MOMENTS:
    setattr(Hooked, _moment, _at(_moment))


def calls_by_name(module: Net) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for name, grad in module.calls:
        found.setdefault(name, []).append(grad)
    return found


def run(moment: str, world_size: int, stage: int) -> tuple[Record, dict[str, list[Tensor]]]:
    modules: list[Net] = []

    def build() -> Net:
        modules.append(StepsInBackward() if moment == "steps" else Hooked(moment))
        return modules[-1]

    strategy: Any = "auto"
    if world_size > 1:
        strategy = DeepCompileStrategy(stage=stage, compile=CompileConfig(region_backend="eager"))
    rank = int(os.environ.get("RANK", 0))
    record = train(build, strategy, world_size=world_size, rank=rank, data_world=2, steps=3, accumulate=2)
    return record, calls_by_name(modules[0])


WAYS = [("__init__", 3), ("configure_optimizers", 3), ("on_train_batch_start", 3), ("steps", 2)]  # and the stage
if "TEST_ALL" in os.environ:
    WAYS += [(moment, 3) for moment in (*MOMENTS, "steps") if (moment, 3) not in WAYS]


def run_all(world_size: int) -> dict[tuple[str, int], Any]:
    return {way: run(way[0], world_size, stage=way[1]) for way in WAYS}


def test_hooks_behind_accumulation_are_called_as_in_one_process() -> None:
    alone = run_all(1)
    for ranks in run_ranks(run_all, 2, 2):
        for way, (expected, expected_calls) in alone.items():
            record, calls = ranks[way]
            assert_same_training(record, expected, params=True)
            assert calls.keys() == expected_calls.keys() and (calls or way[0] == "steps")
            for name, grads in expected_calls.items():
                assert len(calls[name]) == len(grads) < 6, (way, name)
                for ours, theirs in zip(calls[name], grads, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max() + 1e-9))


class Refused(Base):
    def __init__(self, moment: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(61, 8), nn.Linear(8, 61))
        self.moment = moment

    def refuse(self, moment: str) -> None:
        if moment == self.moment:
            self.net[1].weight.register_hook(lambda gradient: gradient * 0)

    def on_fit_start(self) -> None:
        self.refuse("on_fit_start")

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.refuse(f"batch {batch_idx}")

    def on_after_backward(self) -> None:
        self.refuse("on_after_backward")

    @torch.compiler.disable
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.refuse("step")
        return super().training_step(batch, batch_idx)


def refuse() -> None:
    rank = int(os.environ["RANK"])
    for moment in ("on_fit_start", "batch 1", "on_after_backward", "step"):
        with pytest.raises(ValueError, match=r"'net.1.weight' has a hook .*register_post_accumulate_grad_hook"):
            train(lambda moment=moment: Refused(moment), DeepCompileStrategy(), world_size=2, rank=rank, steps=3)


def test_other_hooks_are_refused_when_they_are_registered() -> None:
    run_ranks(refuse, 2)
