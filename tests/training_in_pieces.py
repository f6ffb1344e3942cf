"""Training runs with something in pieces, on two ranks beside one process: for tests of what is taken apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from cases import CASES, Record, assert_same_training, traced_as, train
from multiprocess import run_ranks
from test_lookups import Ragged

from lightning_deepcompile import CompileConfig
from lightning_deepcompile.plan.tracing import Tracing

Run = tuple[str, str, int, int]
"""Case, what compiles regions, micro-batches a step, ZeRO stage."""


def train_run(run: Run, accelerator: str, tracing: Tracing) -> Record:
    """Trains on this rank; the record's extra is the summary and the programs."""
    from lightning_deepcompile import DeepCompileStrategy

    case, backend, accumulate, stage = run
    world_size, device_type = int(os.environ["WORLD_SIZE"]), "cuda" if accelerator == "gpu" else "cpu"
    settings = traced_as(tracing, world_size, stage, device_type)
    return train(
        {**CASES, "ragged": Ragged}[case],
        DeepCompileStrategy(stage=stage, compile=CompileConfig(region_backend=backend, **settings)),
        world_size=world_size,
        rank=int(os.environ["RANK"]),
        accumulate=accumulate,
        inspect=lambda trainer: (trainer.strategy.summary(), trainer.strategy.programs()),
        accelerator=accelerator,
    )


def _train_all(runs: Sequence[Run], accelerator: str, tracing: Tracing) -> dict[Run, Record]:
    return {run: train_run(run, accelerator, tracing) for run in runs}


def equal_runs(runs: Sequence[Run], accelerator: str, tracing: Tracing) -> list[tuple[Run, Any, dict[str, str]]]:
    """Runs on two ranks that have trained as one process does: each rank's run, summary and programs."""
    seen = []
    for results in run_ranks(_train_all, 2, runs, accelerator, tracing, timeout=380):
        for run, record in results.items():
            expected = train(
                CASES[run[0]], "auto", world_size=1, rank=0, data_world=2, accumulate=run[2], accelerator=accelerator
            )
            assert_same_training(record, expected, params=True)
            seen.append((run, *record.extra))
    return seen


def _train_ragged(each: Sequence[Tracing]) -> list[Record]:
    return [train_run(("ragged", "eager", 2, 3), "cpu", tracing) for tracing in each]


def ragged_runs(*each: Tracing) -> list[list[Record]]:
    """Runs in which every rank has its own number of tokens, by rank, traced in each of these ways."""
    return run_ranks(_train_ragged, 2, each)
