"""What a step does with numbers that it has read from tensors: it may change with every step, and cost compilations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_step_containers import Fills, ours, run
from torch import Tensor


def text(module: Any, loss: Tensor, index: int) -> None:
    module.list.append("loss " + str(loss.item() * 3) + " step " + str(module.global_step))


def table(module: Any, loss: Tensor, index: int) -> None:
    values = {"thrice": 3 * loss.item(), "loss": loss.detach().item()}
    module.log_dict(values)
    module.dict[index] = values["thrice"]


def listed(module: Any, loss: Tensor, index: int) -> None:
    module.list.extend(value * 2 for value in torch.stack([loss, loss + 1]).tolist())


def perplexity(module: Any, loss: Tensor, index: int) -> None:
    value = math.exp(min(loss.item(), 3.0))
    module.log("perplexity", value)
    module.list.append(value - 1)


ACTIONS = {action.__name__: action for action in (text, table, listed, perplexity)}


@pytest.mark.parametrize("name", ACTIONS)
def test_it_does_not_end_training(name: str) -> None:
    expected, module = run("auto", ACTIONS[name], Fills), run(ours(), ACTIONS[name], Fills)
    metrics, ours_metrics = expected.trainer.callback_metrics, module.trainer.callback_metrics
    torch.testing.assert_close(ours_metrics, metrics, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.dict, expected.dict, rtol=1e-5, atol=1e-5)
    if name == "text":
        numbers = [[float(line.split()[1]) for line in lines] for lines in (module.list, expected.list)]
        torch.testing.assert_close(*numbers, rtol=1e-5, atol=1e-5)
        assert [line.split()[2:] for line in module.list] == [line.split()[2:] for line in expected.list]
    else:
        torch.testing.assert_close(module.list, expected.list, rtol=1e-5, atol=1e-5)
