"""Floats that steps compute from their last value: as without compilation, and without compiling for each value."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from multiprocess import run_ranks
from test_step_containers import Fills, ours, run
from torch import Tensor

from lightning_deepcompile.step_numbers import StepNumber


def average(module: Any, loss: Tensor, index: int) -> None:
    module.mean = 0.9 * module.mean + 0.1 * loss.item()
    module.log("mean", module.mean)


def count(module: Any, loss: Tensor, index: int) -> None:
    module.count += 1.0
    module.log_dict({"count": module.count, "half": module.count / 2, "left": 100 - module.count})


def before_and_after(module: Any, loss: Tensor, index: int) -> None:
    """An immutable number: what was read before is what it was."""
    last = module.count
    module.count += 0.5 * loss.item()
    module.list.append(module.count - last)
    module.dict[index] = last
    module.mean = -module.count


def shown(module: Any, loss: Tensor, index: int) -> None:
    module.mean = 2 * module.mean + loss.item()
    module.list.append(f"{module.mean:.3f} {round(module.mean, 2)} {int(module.mean)} {module.mean}")


def compared(module: Any, loss: Tensor, index: int) -> None:
    module.mean = 0.5 * module.mean + 3.0
    if module.mean > 5:
        module.count = min(module.count, 0.1 * module.mean)
        module.mean = 0.0 if index % 4 else math.sqrt(module.mean)


ACTIONS = {action.__name__: action for action in (average, count, before_and_after, shown, compared)}


class Numbers(Fills):
    """Has numbers, and remembers what they were after every step."""

    def __init__(self, fill: Any) -> None:
        super().__init__(fill)
        self.mean, self.count = 0.0, 1.0
        self.history: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        values = [self.mean, self.count, *self.list, *self.dict.values()]
        assert not any(type(value) in (StepNumber, Tensor) for value in values), values
        self.history.append((self.mean, self.count, dict(self.trainer.callback_metrics)))


@pytest.mark.parametrize("name", ACTIONS)
def test_numbers_are_what_they_are_without_compilation(name: str) -> None:
    expected, strategy = run("auto", ACTIONS[name], Numbers), ours()
    module = run(strategy, ACTIONS[name], Numbers)
    assert len(module.history) == 20 and module.history[-1] != module.history[0]
    torch.testing.assert_close(module.history, expected.history, rtol=1e-5, atol=1e-5)
    assert [type(value) for value in module.list] == [type(value) for value in expected.list]
    if name == "shown":
        assert len(module.list) == 20 and module.list[0].split()[0] == expected.list[0].split()[0]
    else:
        torch.testing.assert_close([module.list, module.dict], [expected.list, expected.dict], rtol=1e-5, atol=1e-5)


class Scaled(Numbers):
    """Its loss is computed with a number that the step computes, in every way in which tensors meet numbers."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        whole = torch.where(batch > 0, self.mean * batch, 1 - batch / self.mean)
        assert whole.dtype is torch.float32 and (loss * self.mean).dtype is torch.float32
        return {"loss": self.mean * loss + loss / self.mean + 0 * whole.sum(), "mean": self.mean}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        assert type(outputs["mean"]) is float
        self.history.append(float(outputs["loss"]))


def grow(module: Any, loss: Tensor, index: int) -> None:
    module.mean = 1.0 if index == 0 else 0.9 * module.mean + 0.1


def test_losses_that_depend_on_them() -> None:
    expected, module = run("auto", grow, Scaled), run(ours(), grow, Scaled)
    assert module.history == pytest.approx(expected.history, rel=1e-5)


def on_first_rank(module: Any, loss: Tensor, index: int) -> None:
    if module.global_rank == 0:
        average(module, loss, index)


def _on_first_rank() -> float:
    module = run(ours(), on_first_rank, Numbers)
    return module.mean if os.environ["RANK"] == "0" else len(module.history)


def test_ranks_may_compute_different_ones() -> None:
    mean, steps = run_ranks(_on_first_rank, 2)
    assert mean > 0 and steps == 20
