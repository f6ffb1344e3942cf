"""Questions about a parameter inside of a step are answered as in one process, whichever thread asks."""

from __future__ import annotations

import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from multiprocess import run_ranks
from test_handover import trainer_of
from torch import Tensor, nn

from lightning_deepcompile import CompileConfig, DeepCompileStrategy

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Head(nn.Linear):
    """Its own forward asks."""

    seen: list[Any]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(("own forward", self.weight.requires_grad, self.weight.is_leaf, self.bias.requires_grad))
        return super().forward(x)


class Asks(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5))
        self.net[2].bias.requires_grad_(False)
        self.head = Head(5, 3)
        self.head.bias.requires_grad_(False)
        self.head.seen = self.seen = []

    def ask(self) -> None:
        for p in (self.net[0].weight, self.net[2].bias):
            self.seen.append((p.requires_grad, p.is_leaf, p.dtype, tuple(p.shape), p.numel(), p.ndim, p.stride()))
            self.seen.append((p.data.requires_grad, (p * 2).requires_grad, p.view(-1).is_leaf, len(p)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.ask()
        return self.head(self.net(batch)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.ask()
        return self.head(self.net(batch))

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


class AsksForGradients(Asks):
    """Gradients of the last step are there until the next backward pass."""

    def ask(self) -> None:
        super().ask()
        weight, bias = self.net[0].weight, self.net[2].bias
        if weight.grad is not None:
            norm = torch.linalg.vector_norm(getattr(weight.grad, "full_tensor", lambda: weight.grad)())
            self.seen.append((tuple(weight.grad.shape), round(norm.item(), 5)))
        self.seen.append((weight.grad is None, bias.grad is None))


def ask(build: type[Asks], world_size: int, compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    module = build()
    strategy: Any = "auto"
    if world_size > 1:
        strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    if not compiled:
        for name in STEPS:
            setattr(module, name, torch.compiler.disable(getattr(module, name)))
    trainer = trainer_of(strategy, num_sanity_val_steps=0)
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    mine = rows.view(2, world_size, -1, 6)[:, trainer.global_rank].flatten(0, 1)
    data = torch.utils.data.DataLoader(mine, batch_size=4 // world_size)
    trainer.fit(module, data, data)
    trainer.test(module, data)
    trainer.predict(module, data)
    if compiled and build is Asks and world_size > 1:
        assert not strategy.summary().uncompiled
    return module.seen


def ask_in_all_ways(world_size: int) -> list[list[Any]]:
    return [ask(build, world_size, compiled) for build in (Asks, AsksForGradients) for compiled in (True, False)]


def test_attributes_in_steps_are_those_of_one_process() -> None:
    expected = ask_in_all_ways(1)
    assert len(expected[1]) > 20 and any(isinstance(entry[-1], float) for entry in expected[2])
    for found in run_ranks(ask_in_all_ways, 2, 2):
        assert found == expected


class Watched(pl.LightningModule):
    """A thread looks at a parameter while the step is compiled, and runs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.seen: set[Any] = set()
        self.errors: set[str] = set()
        self.done = threading.Event()

    def look(self) -> None:
        while not self.done.wait(0.001):
            weight = self.net[0].weight
            self.seen.add((tuple(weight.shape), weight.dtype, weight.requires_grad, weight.numel()))
            if self.asks_for_values:
                for compute in (lambda: self.net[0].weight.norm(), lambda: self.net(torch.ones(1, 8))):
                    try:
                        compute()
                    except RuntimeError as error:
                        self.errors.add(str(error))

    def on_train_start(self) -> None:
        self.asks_for_values = False
        self.thread = threading.Thread(target=self.look, name="monitor", daemon=True)
        if self.global_rank == 1:
            self.thread.start()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.asks(batch_idx)
        return self.net(batch).square().mean()

    @torch.compiler.disable
    def asks(self, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 3:
            self.asks_for_values = True
            while len(self.errors) < 2:
                self.done.wait(0.01)
            self.asks_for_values = False

    def on_train_end(self) -> None:
        self.done.set()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def watch() -> tuple[set[Any], set[str]]:
    module = Watched()
    trainer = trainer_of(DeepCompileStrategy(compile=CompileConfig(region_backend="eager")))
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(24, 8), batch_size=2))
    return module.seen, module.errors


@pytest.mark.timeout(90)
def test_another_thread_looks_at_parameters_while_steps_compile_and_run() -> None:
    _, (seen, errors) = run_ranks(watch, 2, timeout=60)
    assert seen == {((8, 8), torch.float32, True, 64)}
    assert len(errors) == 2 and all("'monitor'" in error and "full_parameters" in error for error in errors)
