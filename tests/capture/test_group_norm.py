"""Group norms get gradients that are not contiguous, for which PyTorch's CPU kernel returned wrong ones of weights.

Autograd makes them contiguous before it calls that kernel, up to PyTorch 2.13 at least; graphs have no such calls, as
the operator is decomposed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import full
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.engine import Engine

BACKWARD = torch.ops.aten.native_group_norm_backward.default


class _Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is BACKWARD:
            self.gradients.append(args[0])
        return function(*args, **kwargs or {})


class _Normed(nn.Module):
    """Transposes behind the norm, within its graph or behind a break, where the gradient crosses from another graph."""

    def __init__(self, breaks: bool, uncompiled: bool) -> None:
        super().__init__()
        self.norm, self.head, self.breaks = nn.GroupNorm(3, 6), nn.Linear(6, 4), breaks
        if uncompiled:
            self.norm.forward = torch.compiler.disable(self.norm.forward)

    def training_step(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return F.softplus(self.head(y.mT)).square().sum()


@pytest.mark.parametrize("uncompiled", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
def test_weights_have_the_gradients_of_one_process(mesh: DeviceMesh, breaks: bool, uncompiled: bool) -> None:
    torch.manual_seed(1)
    reference = _Normed(breaks, uncompiled=False)
    nn.init.normal_(reference.norm.weight)
    module = _Normed(breaks, uncompiled)
    module.load_state_dict(copy.deepcopy(reference.state_dict()))
    engine = Engine(module, mesh, CompileConfig(region_backend="eager"))
    x = torch.randn(2, 5, 6).mT  # nor is this one
    reference.training_step(x).backward()
    loss = engine.run_step("training_step", x)
    with _Called() as called:  # Dynamo compiles nothing within one
        engine.backward(loss.backward)
    assert bool(called.gradients) == uncompiled
    ours = dict(engine.module.named_parameters())
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(full(ours[name].grad), parameter.grad, rtol=1e-5, atol=1e-6, msg=name)
    engine.close()
