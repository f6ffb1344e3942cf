"""Tests steps that a module calls on its optimizers and schedulers themselves, and that stay outside of graphs."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_deepcompile.user_code.host_calls import HostCalls


class Manual(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("own", ["none", "scheduler", "compiled"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_steps_are_put_back(own: str) -> None:
    """Also after an error, for an optimizer that is given twice, and where a step runs within a step."""
    module = Manual()
    optimizer = torch.optim.SGD([module.weight], 0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if own == "scheduler" else None
    if own == "compiled":
        optimizer.step = torch.compile(optimizer.step, backend="eager")
    before = dict(vars(optimizer)), {} if scheduler is None else dict(vars(scheduler))
    calls, called = HostCalls(module, after_toggle=lambda: None), []

    def closure() -> Tensor:
        called.append(torch.compiler.is_compiling())
        module.weight.grad = torch.ones(2)
        return module.weight.sum()

    stepping = [optimizer, optimizer, *([] if scheduler is None else [scheduler])]
    with pytest.raises(KeyError), calls.outside_graphs(stepping):
        replaced = optimizer.step
        with calls.outside_graphs(stepping):
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)  # as methods that start anew make one
            assert optimizer.step is replaced
            assert float(optimizer.step(closure)) == 2
        assert float(optimizer.step(closure=closure)) == 1
        assert optimizer.step() is None
        raise KeyError("of a step")
    assert float(module.weight.sum()) == -1 and len(called) == 2
    for stepped, kept in zip((optimizer, scheduler), before, strict=True):
        assert stepped is None or vars(stepped).get("step") == kept.get("step")
    module.automatic_optimization = True
    with calls.outside_graphs(stepping):
        assert vars(optimizer).get("step") == before[0].get("step")
