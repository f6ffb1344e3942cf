"""Bytes of states are known before an optimizer's first step: those that it has afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_deepcompile.step.optimizers import bytes_of_states
from lightning_deepcompile.step.state_sizes import predict_state_bytes


def torchao(name: str, **settings: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        import torchao.optim

        return getattr(torchao.optim, name)(parameters, **settings)

    return make


CASES: dict[str, tuple[Callable[[list[nn.Parameter]], Optimizer], torch.dtype, float]] = {
    "AdamW": (torch.optim.AdamW, torch.float32, 8),
    "AdamW, bf16": (torch.optim.AdamW, torch.bfloat16, 4),
    "AdamW, fused": (lambda p: torch.optim.AdamW(p, fused=True), torch.float32, 8),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), torch.float32, 0),
    "Muon": (lambda p: torch.optim.Muon(p), torch.float32, 4),
    "AdamW8bit": (torchao("AdamW8bit"), torch.float32, 2.03),
    "AdamWFp8": (torchao("AdamWFp8"), torch.float32, 2.03),
    "AdamW4bit": (torchao("AdamW4bit"), torch.float32, 1.06),
    "stochastic rounding": (torchao("_AdamW", bf16_stochastic_round=True), torch.bfloat16, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_the_states_of_the_first_step_are_predicted(name: str) -> None:
    make, dtype, each = CASES[name]
    parameters = [nn.Parameter(torch.zeros(1024, 256, dtype=dtype)), nn.Parameter(torch.zeros(512, 512, dtype=dtype))]
    optimizer = make(parameters)
    predicted = predict_state_bytes(optimizer, {parameter: tuple(parameter.shape) for parameter in parameters})
    assert not optimizer.state
    assert predicted == pytest.approx(each * 2 * 2**18, rel=0.01)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    assert predicted == bytes_of_states(optimizer)


def test_what_needs_values_is_not_predicted() -> None:
    class Reads(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert float(self.param_groups[0]["params"][0].sum()) < 1e9
            return super().step(closure)

    parameter = nn.Parameter(torch.zeros(8, 4))
    assert predict_state_bytes(Reads([parameter], lr=0.1), {parameter: (8, 4)}) is None
