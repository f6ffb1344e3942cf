"""Sharded training equals unsharded training: losses, gradients and parameters, on 2, 3 and 4 ranks."""

from __future__ import annotations

import functools
import gc
import os
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, Record, assert_same_training, gpt, train
from multiprocess import run_ranks

# (case, optimizer, micro-batches a step, stage) per world size. With TEST_ALL=1 every model runs on 2 and on 3 ranks.
# The optimizer, accumulation and the stage do not depend on the model: they run on the models that differ in them.
Run = tuple[str, str, int, int]
RUNS: dict[int, list[Run]] = {
    2: [
        *((name, "sgd", 1, 3) for name in ("frozen", "recurrent", "normed", "llama_checkpointing")),
        ("gpt_tied", "adamw", 1, 3),
        ("graph_break", "sgd", 3, 3),
        ("mlp", "sgd", 3, 1),
        ("mlp", "adamw", 3, 2),
    ],
    3: [("mlp", "sgd", 1, 3)],
    4: [("mlp", "sgd", 3, 3)],
}
if "TEST_ALL" in os.environ:  # the first test of a number of ranks trains all of them
    RUNS[2] += [(name, "sgd", 1, 3) for name in CASES if (name, "sgd", 1, 3) not in RUNS[2]]
    RUNS[2] += [("mlp", "adamw", 3, 3), ("llama_tied", "sgd", 3, 3), ("graph_break", "sgd", 3, 1)]
    RUNS[2] += [("skipped", "sgd", 3, 2), ("gpt_tied", "sgd", 3, 1)]
    RUNS[3] += [(name, "sgd", 1, 3) for name in CASES if name != "mlp"]
    RUNS[3] += [("llama", "adamw", 1, 3), ("skipped", "sgd", 3, 3), ("frozen", "sgd", 1, 1)]
    RUNS[3] += [("llama_checkpointing", "sgd", 1, 2), ("frozen", "sgd", 3, 3)]
    RUNS[3] += [("mlp", "sgd", 3, 1), ("gpt", "sgd", 3, 2)]
    RUNS[4] += [("gpt_tied", "adamw", 1, 3), ("mlp", "sgd", 3, 1)]


def _inspect(trainer: Any) -> dict[str, Any]:
    return {"summary": trainer.strategy.summary(), "programs": trainer.strategy.programs()}


def _train_all(runs: list[Run]) -> dict[Any, Record | str]:
    """One after another in the same processes: strategies that are done must not disturb those that follow."""
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    results: dict[Any, Record | str] = {}
    for run in runs:
        case, optimizer, accumulate, stage = run
        strategy = DeepCompileStrategy(stage=stage, compile=CompileConfig(region_backend="eager"))
        try:
            results[run] = train(
                CASES[case],
                strategy,
                world_size=int(os.environ["WORLD_SIZE"]),
                rank=int(os.environ["RANK"]),
                optimizer=optimizer,
                accumulate=accumulate,
                inspect=_inspect,
            )
        except Exception:
            results[run] = traceback.format_exc()
            continue
        left = weakref.ref(strategy.engine)
        del strategy
        gc.collect()
        if left() is not None:
            results[run] = "The engine, and with it the model, outlives its training."
    return results


@functools.cache
def _sharded(world_size: int) -> list[dict[Any, Record | str]]:
    return run_ranks(_train_all, world_size, RUNS[world_size], timeout=420)


@functools.cache
def _reference(world_size: int, case: str, optimizer: str, accumulate: int) -> Record:
    return train(
        CASES[case], "auto", world_size=1, rank=0, data_world=world_size, optimizer=optimizer, accumulate=accumulate
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "run"), [(world, run) for world, runs in RUNS.items() for run in runs], ids=lambda value: str(value)
)
@pytest.mark.xdist_group("training")
def test_equals_unsharded(world_size: int, run: Run) -> None:
    case, optimizer, accumulate, stage = run
    expected = _reference(world_size, case, optimizer, accumulate)
    for rank, results in enumerate(_sharded(world_size)):
        actual = results[run]
        if isinstance(actual, str):
            pytest.fail(f"rank {rank}:\n{actual}")
        # AdamW divides by the gradient's own size: where that is rounding alone, parameters differ by design.
        assert_same_training(actual, expected, params=optimizer == "sgd")
        summary = actual.extra["summary"]
        assert summary.saved_parameters == 0
        if case == "mlp" and accumulate > 1:  # of the last micro-batch
            assert (summary.gathers_per_step == 0) == (stage < 3)
        if case not in ("graph_break", "skipped", "recurrent"):  # Dynamo does not trace LSTMs
            assert summary.graphs == 1


def _train_layers(layers: list[int], cache: str) -> tuple[list[Record], dict[str, int]]:
    from torch._dynamo.utils import counters

    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache

    def one(count: int) -> Record:
        return train(
            gpt(layers=count),
            DeepCompileStrategy(compile=CompileConfig()),
            world_size=1,
            rank=0,
            steps=2,
            inspect=_inspect,
        )

    return [one(count) for count in layers], dict(counters["inductor"])


@pytest.mark.timeout(900)
@pytest.mark.xdist_group("inductor")
def test_inductor_compiles_equal_layers_once(tmp_path: Path) -> None:
    """The number of compiled regions does not grow with depth, and the compiled step computes the same."""
    layers = [3, 4]
    records, _ = run_ranks(_train_layers, 1, layers, str(tmp_path), timeout=800)[0]
    summaries = [record.extra["summary"] for record in records]
    assert len({summary.regions_compiled for summary in summaries}) == 1
    assert [summary.regions_total - summaries[0].regions_total for summary in summaries] == [0, 2]
    for count, record in zip(layers, records, strict=True):
        expected = train(gpt(layers=count), "auto", world_size=1, rank=0, steps=2)
        assert_same_training(record, expected, params=True)
    # Another run of the same script finds everything in Inductor's cache on disk.
    _, counts = run_ranks(_train_layers, 1, layers[:1], str(tmp_path), timeout=300)[0]
    assert counts.get("fxgraph_cache_miss", 0) == 0
    assert counts["fxgraph_cache_hit"] == summaries[0].regions_compiled
