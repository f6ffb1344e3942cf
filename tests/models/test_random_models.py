"""Modules at random train on 1 to 3 ranks as without sharding, compiled and not."""

from __future__ import annotations

import copy
import hashlib
import os
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from multiprocess import join, run_ranks
from random_models import Model, Spec, batches, specs
from random_training import assert_trains_alike
from torch.distributed.device_mesh import init_device_mesh

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.engine import Engine

MODELS = {1: slice(0, 100), 2: slice(100, 170), 3: slice(170, 200)}  # by ranks


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
            steps = [list(tokens.chunk(dist.get_world_size())) for tokens in batches(spec, dist.get_world_size())]
            assert_trains_alike(engine, reference, steps, lr=0.1, rtol=1e-8, none_is_zero=False)
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
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.extensive), 2, 3])
def test_they_train_as_without_sharding(world_size: int, compiled: bool) -> None:
    models = specs(200)[MODELS[world_size]]
    if "TEST_ALL" not in os.environ:
        models = models[:1] if compiled else models[::15]  # tracing takes most of the time
    for failed in run_ranks(_train_all, world_size, models, compiled, timeout=850):
        texts = [f"{models[number]}\n{error}" for number, error in failed.items()]
        if texts:
            pytest.fail(f"{len(texts)} of {len(models)} models\n\n" + "\n\n".join(texts))


def test_a_number_is_the_same_model_everywhere() -> None:
    assert specs(8) == specs(300)[:8]
    assert hashlib.sha256(repr(specs(300)).encode()).hexdigest()[:16] == "79d856ffda41906f"
