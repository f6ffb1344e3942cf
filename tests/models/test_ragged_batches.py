"""Modules at random, batches of which every rank has its own sizes, default settings: they train as under DDP.

``TEST_ALL=1 pytest -n 12 tests/models/test_ragged_batches.py`` trains 300 of them, on 2 and on 3 ranks.
"""

from __future__ import annotations

import copy
import os
import random
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from multiprocess import join, run_ranks
from random_models import LENGTH, VOCAB, Model, Spec, specs
from random_training import assert_trains_alike
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.engine import Engine

STEPS = 10
"""Two are timed, two measured, all others run as planned; three of these are compared with those before."""


def ragged(spec: Spec, world_size: int) -> list[list[Tensor]]:
    """Every rank's batch of every step: most have the same sizes, others a dimension of one or any."""
    choose = random.Random(spec.seed)
    generator = torch.Generator().manual_seed(spec.seed)
    fixed = "rms norm" in str(spec.ops)  # which is over the whole length
    least = 2 if "group norm" in str(spec.ops) else 1  # of which PyTorch refuses a single number

    def sizes() -> tuple[int, int]:
        any_size = choose.randint(1, 4), choose.randint(1, 4)
        rows, length = choose.choice([(2, 3), (2, 3), (1, 3), (2, 1), (1, 1), any_size])
        return max(rows, least), LENGTH if fixed else length

    return [[torch.randint(0, VOCAB, sizes(), generator=generator) for _ in range(world_size)] for _ in range(STEPS)]


def _fails(
    spec: Spec, parts: list[list[Tensor]], backend: str, stage: int, device_type: str = "cpu"
) -> tuple[str, int]:
    """The ranks' errors in training, "" if there is none, and how often ranks took turns; the same on all of them."""
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    reference = Model(spec).double().to(device_type)
    parts = [[part.to(device_type) for part in step] for step in parts]
    engine, error = None, ""
    try:
        config = CompileConfig(region_backend=backend)
        engine = Engine(copy.deepcopy(reference), mesh, config, stage=stage, timeout=timedelta(seconds=40))
        assert_trains_alike(engine, reference, parts, lr=0.05, rtol=1e-7, none_is_zero=True)
    except Exception:
        error = traceback.format_exc()
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    turns = 0
    if engine is not None:
        turns = engine.timeline.order.turns
        engine.abort() if any(errors) else engine.close()
    torch._dynamo.reset()
    return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), turns


def _train_all(models: list[Spec], backend: str) -> dict[int, str]:
    join("cpu")
    results = [
        _fails(spec, ragged(spec, dist.get_world_size()), backend, 3 if number % 4 else 1 + number // 4 % 2)
        for number, spec in enumerate(models)
    ]
    return {number: text for number, (text, _) in enumerate(results) if text}


PARTS = 15
"""Of the models, of which each part is a test."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.extensive) for part in range(1, PARTS))])
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.extensive), 3])
def test_they_train_as_without_sharding(world_size: int, part: int) -> None:
    models = specs(300)[part::PARTS]
    if "TEST_ALL" not in os.environ:
        models = models[0 if world_size == 2 else 10 :: 20]  # each on one number of ranks
    backend = "inductor" if part % 5 == 1 else "eager"
    for failed in run_ranks(_train_all, world_size, models, backend, timeout=1150):
        texts = [f"{models[number]}\n{error}" for number, error in failed.items()]
        if texts:
            pytest.fail(f"{len(texts)} of {len(models)} models\n\n" + "\n\n".join(texts))


PLAIN = Spec((("linear", 5), ("layer norm", 5)), seed=3, frozen=(), ties=(), unused=False, broken=None)


def _once(
    moments: list[int], rare: tuple[int, int], device_type: str = "cpu", backend: str = "eager"
) -> list[tuple[str, int]]:
    join(device_type)
    results = []
    for moment in moments:
        sizes = [(4, 3)] * STEPS, [(4, 3)] * moment + [rare] + [(4, 3)] * (STEPS - moment - 1)
        generator = torch.Generator().manual_seed(1)
        steps = zip(*sizes, strict=True)
        parts = [[torch.randint(0, VOCAB, size, generator=generator) for size in step] for step in steps]
        results.append(_fails(PLAIN, parts, backend, 3, device_type))
    return results


@pytest.mark.timeout(300)
def test_a_rank_may_meet_other_sizes_in_any_step() -> None:
    """Two steps are measured (3 and 4), and there programs run otherwise, also those that are compiled within one."""
    moments = list(range(STEPS)) if "TEST_ALL" in os.environ else [3, 6]
    for results in run_ranks(_once, 2, moments, (2, 3), timeout=280):
        for moment, (error, turns) in zip(moments, results, strict=True):
            assert not error, f"step {moment}: {error}"
            assert turns == 0, f"step {moment}: programs are the same but for sizes"


def _a_product_over_one(device_type: str) -> tuple[str, int, int]:
    ((error, turns),) = _once([4], (1, 1), device_type, "inductor")
    return error, turns, torch._dynamo.utils.counters["inductor"]["decompose_mm"]


@pytest.mark.timeout(300)
def test_a_dimension_of_one_makes_another_graph() -> None:
    for results in run_ranks(_once, 2, [4], (1, 1), timeout=280):
        ((error, turns),) = results
        assert not error and turns > 0, error


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "device_type", [pytest.param("cpu", marks=pytest.mark.extensive), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_a_product_over_a_dimension_of_one_is_another_operator(device_type: str) -> None:
    """Inductor multiplies instead, on the rank with a single row: on GPUs always, on CPUs if tensors are small.

    On CPUs ranks take turns then. On GPUs their programs still communicate alike, and they do not.
    """
    ranks = run_ranks(_a_product_over_one, 2, device_type, timeout=280)
    for error, turns, _ in ranks:
        assert not error, error
        assert turns > 0 or device_type == "cuda"
    assert any(decomposed for *_, decomposed in ranks)


NEWER = Spec(
    (("cat", ((("attention", 1),),)), ("lstm", 2), ("residual", ((("twice", 6),),))),
    seed=307,
    frozen=(53,),
    ties=(),
    unused=False,
    broken=3,
)


def _sized(sizes: list[tuple[tuple[int, int], tuple[int, int]]]) -> tuple[str, int]:
    join("cpu")
    generator = torch.Generator().manual_seed(1)
    return _fails(
        NEWER, [[torch.randint(0, VOCAB, size, generator=generator) for size in step] for step in sizes], "eager", 1
    )


@pytest.mark.extensive
@pytest.mark.timeout(300)
def test_sizes_that_a_rank_has_met_may_run_newer_graphs() -> None:
    """In the last step both ranks have met their sizes, beside each other, too; the second has compiled more since."""
    sizes = [((1, 1), (1, 3)), ((1, 4), (2, 3)), ((2, 4), (3, 4)), ((1, 3), (2, 3)), ((1, 1), (1, 3))]
    for error, turns in run_ranks(_sized, 2, sizes, timeout=280):
        assert not error and turns > 0, error


def _graphs() -> dict[str, int]:
    """The graphs of this rank for each of `GRAPHS`; it has trained as without sharding."""
    join("cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = CompileConfig(region_backend="eager")
    graphs = {}
    for name, (steps, _) in GRAPHS.items():
        generator = torch.Generator().manual_seed(1)
        reference = Model(PLAIN).double()
        engine = Engine(copy.deepcopy(reference), mesh, config, stage=3, timeout=timedelta(seconds=40))
        parts = [[torch.randint(0, VOCAB, size, generator=generator) for size in sizes] for sizes in steps]
        assert_trains_alike(engine, reference, parts, lr=0.05, rtol=1e-7, none_is_zero=True)
        engine.close()
        graphs[name] = engine.capture.frames.captured
        torch._dynamo.reset()
    return graphs


ROWS = random.Random(5)
GRAPHS: dict[str, tuple[list[list[tuple[int, int]]], int]] = {
    "from the first step on": ([[(ROWS.randint(1, 8), ROWS.randint(5, 60)) for _ in range(2)] for _ in range(40)], 2),
    "few rows later": ([[(4, 9), (4, 9)], [(4, 7), (4, 12)], [(3, 7), (2, 8)], [(6, 5), (5, 5)]], 2),
    "on one rank, later": ([[(4, 9), (4, 9)], [(4, 9), (4, 9)], [(3, 9), (4, 9)]], 2),
}
"""The ranks' sizes in every step, and the graphs of the rank with most of them: one of them may be of a single row."""


@pytest.mark.timeout(300)
def test_few_graphs() -> None:
    ranks = run_ranks(_graphs, 2, timeout=280)
    assert {name: max(graphs[name] for graphs in ranks) for name in GRAPHS} == {
        name: graphs for name, (_, graphs) in GRAPHS.items()
    }
