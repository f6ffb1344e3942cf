"""Plans where every batch has other sizes: few rounds, and no plan is judged by comparing different batches."""

from __future__ import annotations

import logging
import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from custom_pass import early_ends
from multiprocess import run_ranks
from test_engine import make_engine, one_step, sgd
from test_profile import EARLY
from test_slow_ranks import Heard
from torch.distributed.device_mesh import init_device_mesh

from lightning_deepcompile.plan.report import Round
from lightning_deepcompile.profile.probe import Mark, StepProbe
from lightning_deepcompile.tuning.measuring import TIMED, Measurement


def _ragged() -> tuple[list[Round], list[str], list[float], list[float]]:
    """The rounds and messages of 60 steps with random sizes, and the losses with and without plans."""
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,)), int(os.environ["RANK"])
    heard, logger = Heard(logging.INFO), logging.getLogger("lightning_deepcompile")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    planned = [{**entry, "passes": ["zero3", "prefetch", early_ends]} for entry in EARLY[1:]]
    losses: list[list[float]] = []
    for schedule in (EARLY[:1], EARLY[:1] + planned):
        torch._dynamo.reset()
        sizes = random.Random(rank)
        generator = torch.Generator().manual_seed(rank)
        engine = make_engine(mesh, schedule=schedule)
        optimizer = sgd(engine)
        losses.append([])
        for _ in range(60):
            rows, length = sizes.choice((1, 2, 2, 3, 4)), sizes.randint(2, 40)
            losses[-1].append(one_step(engine, torch.randint(0, 16, (rows, length), generator=generator), optimizer))
        rounds = list(engine.report())
        if rounds and engine.tuner._round is None:
            assert all(executable.watch is None for executable in engine.capture.executables), "nothing is noted now"
        engine.close()
    logger.removeHandler(heard)
    return rounds, heard.lines, *losses


def test_random_sizes_are_planned_for_and_judged_by_no_other_batch() -> None:
    for rank, (rounds, lines, plain, planned) in enumerate(run_ranks(_ragged, 2, timeout=200)):
        assert plain == planned
        assert 1 <= len(rounds) <= 3 and {done.outcome for done in rounds} <= {"kept", "unchanged"}, rounds
        assert not [line for line in lines if "No plan was made" in line or "taken back" in line or "computes" in line]
        if rank == 0:
            assert [line for line in lines if line.startswith("The plan of step")], "it was planned"


def _timed(size: int, seconds: float) -> StepProbe:
    memory: Any = SimpleNamespace()
    probe = StepProbe(torch.device("cpu"), memory, start=Mark(0.0, 0.0), end=Mark(seconds, seconds))
    probe.work.append(("forward", (size, 8)))
    return probe


@pytest.mark.parametrize(
    "before, after, expected",
    [
        ([(4, 1.0), (4, 1.1), (4, 1.2)], [(4, 2.0), (4, 2.1), (4, 2.2)], (0, 0)),
        ([(4, 1.0), (5, 1.1), (6, 1.2)], [(7, 2.0), (8, 2.1), (9, 2.2)], None),
        ([(4, 1.0), (5, 1.1), (6, 1.2)], [(7, 2.0), (5, 1.3), (9, 0.1)], (1.1, 1.3)),
        ([(4, 1.0), (5, 1.1), (6, 1.2)], [(4, 2.0), (5, 1.0), (5, 1.2)], (1.1, 1.0)),
    ],
)
def test_steps_are_compared_where_their_work_is_equal(
    mesh: Any, before: list[tuple[int, float]], after: list[tuple[int, float]], expected: tuple[float, float] | None
) -> None:
    measurement = Measurement(3)
    steps = zip((-2, -1, 0, TIMED, TIMED + 1, TIMED + 2), before + after, strict=True)
    measurement._probes = {moment: _timed(*step) for moment, step in steps}
    assert measurement.compare(dist.group.WORLD) == expected
