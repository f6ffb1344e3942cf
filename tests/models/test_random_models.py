"""Modules at random train on 1 to 3 ranks as without sharding, compiled and not."""

from __future__ import annotations

import copy
import os
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cases import full
from multiprocess import join, run_ranks
from random_models import ROWS, Model, Spec, batches, specs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine import Engine

MODELS = {1: slice(0, 100), 2: slice(100, 170), 3: slice(170, 200)}  # by ranks


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)


def _assert_close(actual: Tensor | None, expected: Tensor | None, name: str) -> None:
    """Compares in double precision: many gradients are zero except for rounding, as of a bias before a norm."""
    assert (actual is None) == (expected is None), f"{name}: {actual} against {expected}"
    if actual is not None:
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-11, msg=lambda m: f"{name}: {m}")


def _compare(spec: Spec, engine: Engine, reference: Model) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer, expected_optimizer = sgd(engine.module), sgd(reference)
    engine.attach_optimizer(optimizer)
    for step, tokens in enumerate(batches(spec, world)):
        expected = sum(reference.training_step(part) for part in tokens.chunk(world)) / world
        engine.drop_stale_gradients()
        actual = engine.run_step("training_step", tokens[rank * ROWS : (rank + 1) * ROWS])
        optimizer.zero_grad()
        expected_optimizer.zero_grad()
        expected.backward()
        engine.backward(actual.backward)
        mean = actual.detach().clone()
        dist.all_reduce(mean)
        _assert_close(mean / world, expected.detach(), f"loss of step {step}")
        ours = dict(engine.module.named_parameters())
        for name, parameter in reference.named_parameters():
            _assert_close(full(ours[name].grad), parameter.grad, f"step {step}, gradient of {name}")
        optimizer.step()
        engine.parameters_changed()
        expected_optimizer.step()
    for name, parameter in reference.named_parameters():
        _assert_close(full(ours[name]), parameter.detach(), name)


def _train_all(models: list[Spec], compiled: bool) -> dict[int, str]:
    """The errors of those that fail, by number; all ranks hear of each."""
    join("cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    failed: dict[int, str] = {}
    for number, spec in enumerate(models):
        reference = Model(spec).double()
        module = copy.deepcopy(reference)
        if not compiled:
            module.training_step = torch.compiler.disable(module.training_step)
        engine, error = None, ""
        try:
            config = CompileConfig(region_backend="eager")
            engine = Engine(module, mesh, config, stage=3 - number % 3, timeout=timedelta(seconds=40))
            _compare(spec, engine, reference)
        except Exception:
            error = traceback.format_exc()
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if any(errors):
            failed[number] = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(errors))
        if engine is not None:
            engine.abort() if any(errors) else engine.close()
        torch._dynamo.reset()
    return failed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "uncompiled"])
@pytest.mark.parametrize("world_size", MODELS)
def test_they_train_as_without_sharding(world_size: int, compiled: bool) -> None:
    models = specs(200)[MODELS[world_size]]
    assert len(set(models)) == MODELS[world_size].stop - MODELS[world_size].start
    if "TEST_ALL" not in os.environ:
        models = models[:: 5 if compiled else 2]  # tracing takes most of the time
    for failed in run_ranks(_train_all, world_size, models, compiled, timeout=850):
        texts = [f"{models[number]}\n{error}" for number, error in failed.items()]
        if texts:
            pytest.fail(f"{len(texts)} of {len(models)} models\n\n" + "\n\n".join(texts))
