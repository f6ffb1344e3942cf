"""The start of planning rounds, and the memory they rely on: on one rank, with plans that are never reverted."""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from custom_pass import early_ends
from multiprocess import run_ranks
from test_engine import TOKENS, make_engine, one_step, sgd
from test_profile import EARLY, ROUND
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.profile.build import limit_memory
from lightning_deepcompile.tuning.shortages import Shortage
from lightning_deepcompile.tuning.tuner import Tuner


@pytest.fixture(autouse=True)
def plans_are_kept(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    monkeypatch.setattr(Tuner, "_fastest", lambda *_: 0.001)


def test_no_plan_counts_on_memory_that_was_not_there(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh, schedule=EARLY)
    optimizer = sgd(engine)
    for step in range(40):
        if step == 14:
            engine.tuner._retry._shortages.append(Shortage(0, "", "", ""))
        one_step(engine, TOKENS if step < 17 else TOKENS[:, :6], optimizer)
    outcomes = [done.outcome for done in engine.report()]
    assert outcomes[:2] == ["kept", "leaner"] and len(outcomes) == 3, "the last one is of a program that came later"
    profile, limit = engine.tuner.profile, engine.tuner._foresight.limit
    assert profile is not None and profile.budget is not None and limit is not None
    assert profile.budget + profile.room <= limit
    engine.close()
    for known, budget, room in ((None, 70, 30), (200, 70, 30), (80, 70, 10), (60, 60, 0)):
        left = limit_memory(replace(profile, budget=70, room=30), known)
        assert (left.budget, left.room) == (budget, room), known


def test_a_single_odd_batch_uses_up_no_attempt(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh, schedule=EARLY)
    optimizer = sgd(engine)
    for step in range(90):
        one_step(engine, TOKENS[:, :6] if step == 12 else TOKENS, optimizer)
    assert [done.step for done in engine.report()] == [5] and engine.tuner._agenda.attempts == 1
    looks = engine.tuner._agenda.recheck
    assert looks is not None
    while engine.tuner._step < looks + 5:  # what comes to stay is found at the next look
        one_step(engine, TOKENS[:1], optimizer)
    assert [done.step for done in engine.report()] == [5, looks + 5]
    engine.close()


def _lengths_that_return() -> tuple[list[int], int, list[float], list[float]]:
    """Steps of rounds, attempts, and losses with and without plans, where one rank meets another length."""
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,)), int(os.environ["RANK"])
    Tuner._fastest = lambda *_: 0.001  # type: ignore[method-assign]
    losses: list[list[float]] = []
    # A pass that always changes something: when a round ends that changes nothing, looks begin earlier.
    planned = [{**entry, "passes": ["zero3", "prefetch", early_ends]} for entry in EARLY[1:]]
    for schedule in (EARLY[:1], EARLY[:1] + planned):
        torch._dynamo.reset()
        engine = make_engine(mesh, schedule=schedule)
        optimizer = sgd(engine)
        lengths = [6 if rank == 1 and (8 <= step < 16 or step >= 40) else 12 for step in range(64)]
        losses.append([one_step(engine, TOKENS[:, :length], optimizer) for length in lengths])
        steps, attempts = [done.step for done in engine.report()], engine.tuner._agenda.attempts
        engine.close()
    return steps, attempts, *losses


def test_what_comes_back_is_planned_once_it_is_measured() -> None:
    """After the look at step 19 the other length is not what is measured, after the one at step 48 it is."""
    for steps, attempts, plain, planned in run_ranks(_lengths_that_return, 2):
        assert (steps, attempts) == ([5, 53], 3) and plain == planned


def _ended_after(mesh: DeviceMesh, steps: int) -> weakref.ref[Any]:
    engine = make_engine(mesh, schedule=EARLY)
    optimizer = sgd(engine)
    for _ in range(steps):
        one_step(engine, TOKENS, optimizer)
    engine.close()
    return weakref.ref(engine.runtime)


def test_a_training_that_ends_while_it_is_measured_leaves_nothing(mesh: DeviceMesh) -> None:
    for steps in range(1, ROUND + 1) if "TEST_ALL" in os.environ else (4, 5, 8):
        runtime = _ended_after(mesh, steps)
        gc.collect()
        assert runtime() is None, f"{steps} steps"


def test_a_pass_that_needs_no_profile_is_applied_once(mesh: DeviceMesh) -> None:
    passes = ["zero3", "prefetch", early_ends]
    for schedule in ([{"step": 0, "passes": passes}], [{"step": 0, "passes": passes}, {"step": 3, "passes": passes}]):
        engine = make_engine(mesh, schedule=schedule)
        engine.capture.scheduling.replan(PlanSettings(prefetch_blocks=1))
        optimizer = sgd(engine)
        for _ in range(ROUND):
            one_step(engine, TOKENS, optimizer)
        lines = engine.programs()["frame0.forward"].splitlines()[1:]
        gathers = [line.split()[1] for line in lines if line.startswith("  gather")]
        assert gathers == ["embed", "head", "blocks.0", "blocks.1", "blocks.2"], schedule
        for done in engine.report():
            assert [p.name for p in done.passes] == ["zero3 -> prefetch", "early_ends"]
            assert done.passes[1].changed != "nothing", "as planning starts from what it has not touched"
        engine.close()


STAGES = (1, 2) if "TEST_ALL" in os.environ else (2,)


def _measures() -> list[tuple[list[str], bool, bool]]:
    dist.init_process_group("gloo")
    mesh, found = init_device_mesh("cpu", (2,)), []
    for stage in STAGES:
        losses = []
        for schedule in (None, "auto"):
            torch._dynamo.reset()
            engine = make_engine(mesh, schedule=schedule, stage=stage)
            optimizer = sgd(engine)
            losses.append([one_step(engine, TOKENS, optimizer) for _ in range(8)])
            for _ in range(8):  # ranks that a busy machine delays are compared over some more
                if not engine.tuner.settled:
                    one_step(engine, TOKENS, optimizer)
            rounds, profile = engine.report(), engine.profile()
            engine.close()
        measured = (
            engine.tuner.settled and profile is not None and sum(cost.seconds for cost in profile.regions.values()) > 0
        )
        found.append(([done.outcome for done in rounds], measured, losses[0] == losses[1]))
    return found


def test_a_step_is_measured_where_nothing_is_gathered() -> None:
    for found in run_ranks(_measures, 2, timeout=120):
        assert found == [(["measured"], True, True)] * len(STAGES)
