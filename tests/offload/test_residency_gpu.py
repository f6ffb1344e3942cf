"""Residency of parameters and states on GPUs: hybrid sharding, states in pinned memory, parameters kept whole."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import CASES, Record, assert_same_training, same_bits_every_time, train
from multiprocess import GPU_RANKS, run_ranks
from shuffle import TravelStates

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ACCUMULATE = 3


class KeepWhole(pl.Callback):
    """Keeps every parameter gathered, from the second step on, until the last micro-batch has used it."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        from lightning_deepcompile.plan.passes.keep_whole import keep_until_boundary

        if batch_idx == ACCUMULATE:
            capture = trainer.strategy.engine.capture
            plan = [executable.program.schedule for executable in capture.frames.executables]
            for group in [i for i in plan[0].instructions if i.op == "gather"]:
                plan = keep_until_boundary(plan, 0, 1, group)
            capture.scheduling.replan(plan=plan)


class MoveStates(pl.Callback):
    """All states leave after the second step, as a plan may have it, and come back after the third."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        engine = trainer.strategy.engine
        if batch_idx == 2 * ACCUMULATE:
            memory = engine.residency.memory()
            assert memory.away == 0 < memory.total
            allocated = torch.cuda.memory_allocated()
            assert engine.residency.place(memory.total, "a test")
            assert engine.summary().offloaded_bytes > 0
            assert engine.device.type == "cpu" or torch.cuda.memory_allocated() < allocated
        elif batch_idx == 3 * ACCUMULATE:
            assert engine.residency.place(0, "a test")
        elif batch_idx == 4 * ACCUMULATE:
            assert engine.summary().offloaded_bytes == 0


def _train_all(accelerator: str) -> dict[str, Record]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy
    from lightning_deepcompile.offload import parameters

    same_bits_every_time()
    parameters._ROOMY = 0.0  # states that fit several times are never moved

    def run(optimizer: str, callbacks: list[pl.Callback], offload: str = "none", **arguments: Any) -> Record:
        config = CompileConfig(region_backend="eager", schedule=None, offload=offload)
        return train(
            CASES["gpt_tied"],
            DeepCompileStrategy(compile=config, timeout=timedelta(seconds=60), **arguments),
            world_size=GPU_RANKS,
            rank=int(os.environ["RANK"]),
            optimizer=optimizer,
            accumulate=ACCUMULATE,
            callbacks=callbacks,
            inspect=lambda trainer: trainer.strategy.summary(),
            accelerator=accelerator,
        )

    return {
        "plain": run("adamw", []),
        "kept": run("adamw", [KeepWhole()]),
        "offloaded": run("adamw", [], offload=["states"]),
        "travel": run("adamw", [TravelStates()], offload=["states"]),
        "moved": run("adamw", [MoveStates()], offload="auto"),
        "replicas": run("sgd", [], device_mesh=(GPU_RANKS, 1)),
        "shards": run("sgd", [], device_mesh=(1, GPU_RANKS)),
    }


def _check(accelerator: str) -> None:
    expected = train(
        CASES["gpt_tied"],
        "auto",
        world_size=1,
        rank=0,
        data_world=GPU_RANKS,
        accumulate=ACCUMULATE,
        accelerator=accelerator,
    )
    for results in run_ranks(_train_all, GPU_RANKS, accelerator, timeout=380):
        plain = results["plain"]
        for name in ("kept", "offloaded", "travel", "moved"):
            assert results[name].losses == plain.losses, name
            assert all(torch.equal(results[name].params[key], plain.params[key]) for key in plain.params), name
        assert results["offloaded"].extra.offloaded_bytes > 0 and plain.extra.offloaded_bytes == 0
        # In the first micro-batch alone.
        assert 0 < ACCUMULATE * results["kept"].extra.gathers_per_step < plain.extra.gathers_per_step
        for name in ("replicas", "shards"):
            assert_same_training(results[name], expected, params=True)


def test_residency_changes_no_value() -> None:
    _check("gpu")


def test_copies_are_timed_one_way_and_both_ways() -> None:
    from lightning_deepcompile.profile.copies import measure_copies

    out, back, duplex = measure_copies(torch.device("cuda", 0))
    assert min(out.bandwidth, back.bandwidth) > 1e9 and max(out.latency, back.latency) < 1e-3
    assert 1 <= duplex < 3  # 2 would be a single link for both
