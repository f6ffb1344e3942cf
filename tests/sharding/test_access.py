"""Modules with sharded parameters behave as others expect: when they are called, read, compiled, copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_deepcompile import compat
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.sharding.access import uninstall_access

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.third = nn.Linear(8, 8)
        self.scale = Scale()

    def training_step(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.scale(self.third(self.first(x))))).square().mean()


@pytest.fixture
def engine(mesh: DeviceMesh) -> Iterator[Engine]:
    engine = Engine(Net(), mesh, CompileConfig(region_backend="eager"), stage=3)
    yield engine
    engine.close()


def test_a_call_outside_of_a_step_gathers_for_hooks_and_forward(engine: Engine) -> None:
    first, seen = engine.module.first, []

    def look(module: nn.Module, *args: Any) -> None:
        seen.append(module.weight)

    handles = [first.register_forward_pre_hook(look), first.register_forward_hook(look)]
    before = engine.uncompiled.blocks.gathered
    torch.testing.assert_close(first(X), Net().first(X))
    assert engine.uncompiled.blocks.gathered > before
    assert not any(isinstance(weight, DTensor) for weight in seen) and len(seen) == 2
    for handle in handles:
        handle.remove()
    assert isinstance(first.weight, DTensor)

    def fail(*args: Any) -> None:
        raise ValueError

    first.register_forward_pre_hook(fail)
    with pytest.raises(ValueError):
        first(X)
    assert isinstance(first.weight, DTensor)


def test_hooks_run_within_a_step(engine: Engine) -> None:
    expected = float(Net().training_step(2 * X).detach())
    engine.module.first.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert float(engine.run_step("training_step", X).detach()) == pytest.approx(expected, rel=1e-6)
    assert len(engine.capture.frames.all) == 1


def test_a_module_that_the_user_compiled_gathers_too(engine: Engine) -> None:
    graphs: list[Any] = []
    engine.module.scale.compile(backend=lambda gm, inputs: graphs.append(gm) or gm)
    torch.testing.assert_close(engine.module.scale(X), Net().scale(X))
    assert len(graphs) == 1
    assert isinstance(engine.module.scale.weight, DTensor)
    loss = engine.run_step("training_step", X)
    assert float(loss.detach()) == pytest.approx(float(Net().training_step(X).detach()), rel=1e-6)
    assert compat.INNER_CALL not in vars(copy.copy(engine.module.scale)), "copies are not compiled"


def test_a_copy_calls_like_its_original(engine: Engine) -> None:
    twin = copy.copy(engine.module.first)
    assert type(twin) is type(engine.module.first)
    torch.testing.assert_close(twin(X), Net().first(X))


def test_modules_of_one_class_and_size_share_a_class(engine: Engine) -> None:
    net = engine.module
    assert type(net.first) is type(net.third) is not type(net.second)
    for linear in (net.first, net.second):
        assert isinstance(linear, nn.Linear) and type(linear) is not nn.Linear
        assert type(linear).__name__ == "Linear" and repr(linear).startswith("Linear(")  # as summaries show it
        assert pickle.loads(pickle.dumps(type(linear))) is type(linear)


def test_a_module_holds_its_parameters_plainly_when_access_is_taken_away(engine: Engine) -> None:
    twin = copy.copy(engine.module.first)
    uninstall_access(twin)
    assert type(twin) is nn.Linear
    assert vars(twin).keys() == vars(nn.Linear(8, 8)).keys()
