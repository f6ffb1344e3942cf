"""Plans where every batch has other sizes: few rounds, and no plan is judged by comparing different batches."""

from __future__ import annotations

import logging
import os
import random
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from custom_pass import early_ends
from multiprocess import run_ranks
from test_engine import Net, make_engine, one_step, sgd
from test_profile import EARLY
from test_slow_ranks import Heard
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from lightning_deepcompile import CompileConfig
from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.plan.costs import Link, Profile, RegionCost
from lightning_deepcompile.plan.report import Round
from lightning_deepcompile.profile.marks import Mark, StepMarks
from lightning_deepcompile.profile.region_times import RegionTimes
from lightning_deepcompile.profile.sizes import Sample, fit_curve
from lightning_deepcompile.profile.workload import Workload
from lightning_deepcompile.program.schedule import Instruction, Schedule
from lightning_deepcompile.tuning.measuring import TIMED, Comparison, Measurement
from lightning_deepcompile.tuning.tuner import _NOISE


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
            left = [one.watch for one in engine.capture.frames.executables if one.watch is not None]
            # Where a batch was larger than all before, each program notes the sizes of one run.
            assert all((one.func, one.args[1]) == (engine.tuner._foresight._note, None) for one in left), left
        engine.close()
    logger.removeHandler(heard)
    return rounds, heard.lines, *losses


def test_random_sizes_are_planned_for_and_judged_by_no_other_batch() -> None:
    for rank, (rounds, lines, plain, planned) in enumerate(run_ranks(_ragged, 2, timeout=200)):
        assert plain == planned
        assert 1 <= len(rounds) <= 3 and {done.outcome for done in rounds} <= {"kept", "unchanged"}, (rounds, lines)
        assert not [line for line in lines if "No plan was made" in line or "is reverted" in line or "computes" in line]
        if rank == 0:
            assert [line for line in lines if line.startswith("The plan of step")], "it was planned"
            limits = [line for line in lines if line.startswith("The step is limited by ")]
            assert 1 <= len(limits) <= len(rounds), "each plan is followed by what limits the step"


PER_TOKEN = 5e-3
"""Seconds; enough that the work of a step on a busy core is little beside it."""


@torch.library.custom_op("tests::sleeps_per_token", mutates_args=())
def sleeps_per_token(x: Tensor) -> Tensor:
    time.sleep(PER_TOKEN * x.shape[1])
    return x.clone()


@sleeps_per_token.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Sleeps(Net):
    """Its steps take a known time: their length in tokens decides."""

    def training_step(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x + sleeps_per_token(x.detach())).flatten(0, 1), tokens.flatten())


def _four_times_as_long() -> tuple[Round, str, Profile, list[int]]:
    """The round, the summary, the time of a step, and lengths on rank 0, where rank 1's batches are 4 times as long."""
    dist.init_process_group("gloo")
    rank, lengths = int(os.environ["RANK"]), random.Random(0)
    config = CompileConfig(region_backend="eager", schedule=EARLY)
    engine = Engine(Sleeps(), init_device_mesh("cpu", (2,)), config)
    optimizer, seen = sgd(engine), []
    while not engine.report():
        length = lengths.randint(5, 30)
        one_step(engine, torch.zeros(2, length * (4 if rank == 1 else 1), dtype=torch.long), optimizer)
        if engine.tuner._marks is not None:
            seen.append(length)
    (done,), text, profile = engine.report(), str(engine.summary()), engine.tuner.profile
    engine.close()
    assert profile is not None
    return done, text, profile, seen


def test_rank_skew_is_the_time_that_ranks_wait_for_the_one_with_more_work() -> None:
    for done, summary, profile, seen in run_ranks(_four_times_as_long, 2, timeout=100):
        mean = PER_TOKEN * sum(seen[:-1]) / len(seen[:-1])  # the last step ran when the plan was there
        assert done.skew_seconds == pytest.approx(3 * mean, rel=0.2)
        assert profile.reduce.latency > 0 and profile.gather.latency > 0, "of small transfers: blocks have one size"
        assert profile.step_seconds == pytest.approx(4 * mean, rel=0.4), (
            "the step of the mean batch, of the rank with more work"
        )
        assert done.before_exposed_seconds < done.skew_seconds / 3, "a line of its own"
        assert "rank skew" in str(done) and re.search(rf"rank skew +{done.skew_seconds * 1e3:.1f} ms", summary)


NOISE = 0.02


def _truth(length: int) -> float:
    return 1e-3 + 1e-5 * length + 2e-8 * length**2


class Known(RegionTimes):
    """Times as they are known from runs of a few sizes."""

    def __init__(self, lengths: list[int], draw: random.Random) -> None:
        super().__init__(lambda name: None)
        self.curve = fit_curve([Sample(8 * n, n, _truth(n) * draw.uniform(1, 1 + NOISE)) for n in lengths])

    def total(self, work: Any) -> float:
        return sum(self.curve.seconds(8 * length, length) for _, (length,) in work)


def _timed(length: int, seconds: float) -> StepMarks:
    memory: Any = SimpleNamespace()
    marks = StepMarks(torch.device("cpu"), memory, start=Mark(0.0, 0.0), end=Mark(seconds, seconds))
    marks.work.append(("forward", (length,)))
    return marks


def _judged(
    draw: random.Random, slower: float, lengths: tuple[int, int] = (5, 2000), then: tuple[int, int] = (5, 2000)
) -> Comparison | None:
    """The judgement of a plan under which steps take `slower` times as long, with batches of random lengths.

    Args:
        draw: Draws them.
        slower: The factor.
        lengths: The shortest and the longest of the steps before.
        then: Those of the steps behind.
    """

    def step(bounds: tuple[int, int], factor: float = 1.0) -> StepMarks:
        length = draw.randint(*bounds)
        return _timed(length, _truth(length) * factor * draw.uniform(1, 1 + NOISE))

    measurement = Measurement(3)
    before, after = [step(lengths) for _ in range(7)], [step(then, slower) for _ in range(3)]
    measurement._marks = dict(zip((-6, -5, -4, -3, -2, -1, 0), before, strict=True)) | {
        TIMED + k: marks for k, marks in enumerate(after)
    }
    measurement._times = Known([length for marks in before for _, (length,) in marks.work], draw)
    totals, seconds = measurement._totals(before)
    measurement.workload = Workload.merged(Workload.of(totals, seconds, varied=True))
    schedule = Schedule("forward", "forward", 0, (Instruction("compute", region="region_0"),))
    regions = {"forward/region_0": RegionCost(measurement.workload.mean)}
    profile = Profile(1, "cpu", (schedule,), regions, Link(0.0, 1e9), Link(0.0, 1e9))
    assert dist.group.WORLD is not None
    return measurement.compare(dist.group.WORLD, profile, (schedule,), (schedule,))


def test_no_plan_is_taken_back_for_the_batchs_sake(mesh: Any) -> None:
    """The truth is known: steps take what their lengths say. A plan that changes nothing is always kept."""
    draw = random.Random(0)
    kept = [_judged(draw, 1.0) for _ in range(300)]
    assert all(pair is None or pair.fastest <= pair.slowest * (1 + _NOISE) for pair in kept)
    assert sum(pair is not None for pair in kept) > 250, "most can be judged"
    for then in ((400, 800), (500, 2000), (1200, 1250), (5, 40)):  # as soon as the plan is there
        changed = [_judged(draw, 1.0, (100, 1000), then) for _ in range(100)]
        assert all(pair is None or pair.fastest <= pair.slowest * (1 + _NOISE) for pair in changed), then
    slower = [_judged(draw, 1.3) for _ in range(300)]
    assert sum(pair is not None and pair.fastest > pair.slowest * (1 + _NOISE) for pair in slower) > 250


@pytest.mark.parametrize(
    "before, after, expected",
    [
        ([(4, 1.0), (4, 1.1), (4, 1.2)], [(4, 2.0), (4, 2.1), (4, 2.2)], (0, 0)),
        ([(4, 1.0), (5, 1.1), (6, 1.2)], [(7, 2.0), (5, 1.3), (9, 0.1)], (1.1, 1.3)),
        ([(4, 1.0), (5, 1.1), (6, 1.2)], [(4, 2.0), (5, 1.0), (5, 1.2)], (1.1, 1.0)),
    ],
)
def test_steps_of_equal_work_are_compared_as_they_are(
    mesh: Any, before: list[tuple[int, float]], after: list[tuple[int, float]], expected: tuple[float, float]
) -> None:
    measurement = Measurement(3)
    steps = zip((-2, -1, 0, TIMED, TIMED + 1, TIMED + 2), before + after, strict=True)
    measurement._marks = {moment: _timed(*step) for moment, step in steps}
    measurement._times = Known([4, 5], random.Random(0))
    measurement.workload = Workload((), (), (), True)
    profile: Any = None
    found = measurement.compare(dist.group.WORLD, profile, (), ())
    assert found is not None and found[:2] == found[2:] == expected
