"""Predictions about a step's first gathers, which may be launched before it, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_simulate import SIZE, SLOT, compute, gather, profile, reduce, release, schedule, wait

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import FirstGathers, Profile, RegionCost
from lightning_deepcompile.plan.passes.proactive_prefetch import proactive_prefetch
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.program.schedule import Instruction, Schedule


def test_gathers_that_open_a_step_run_while_the_trainer_is_busy() -> None:
    forward = schedule(
        "forward",
        *(gather(0), gather(1), wait(0), compute(0, 0), release(0)),
        *(gather(2), wait(1), compute(1, 1), release(1)),
        *(wait(2), compute(2, 2), release(2)),
    )
    backward = schedule("backward", compute(0), reduce(0), Instruction("end"))
    both = [forward, backward]
    late = profile(both, gathers=2.0, optimizer_seconds=3.0)
    # Gathers 0-2, 2-4 and 4-6, regions 2-3, 4-5 and 6-7, backward 7-8, its reduction 8-12, the optimizer 12-15.
    result = simulate(both, late)
    assert (result.seconds, result.exposed_seconds) == (pytest.approx(15.0), pytest.approx(2 + 1 + 1 + 4))
    # They start three seconds before: from -3 to -1 and from -1 to 1. The region that waits for the first runs from 0
    # to 1, the second from 1 to 2; the third gather may have the first one's memory at 1, and takes until 3.
    early = simulate(
        both, Profile.from_json(replace(late, first_gathers=FirstGathers(True, between_seconds=3.0)).to_json())
    )
    starts = [span.start for span in early.spans if span.stream == "gather"]
    assert starts == [pytest.approx(-3.0), pytest.approx(-1.0), pytest.approx(1.0)]
    assert early.seconds == pytest.approx(3 + 1 + 1 + 4 + 3)
    assert early.exposed_seconds == pytest.approx(1 + 4), "what runs while nobody wants to compute is not exposed"
    assert early.gather_seconds == result.gather_seconds
    # Without time in between they are launched no later than before.
    assert simulate(both, replace(late, first_gathers=FirstGathers(True))).seconds == result.seconds
    # Only a step's first micro-batch finds them.
    twice = replace(late, micro_batches=2)
    opened = replace(twice, first_gathers=FirstGathers(True, between_seconds=3.0))
    assert simulate(both, twice).seconds - simulate(both, opened).seconds == pytest.approx(15.0 - 12.0)


def test_a_head_start_is_as_long_as_the_optimizer_steps_on_the_rest() -> None:
    """Four blocks of a second, each gathered in two; four seconds of optimizer, one for each block's parameters."""
    blocks = [(wait(k), compute(k, k), release(k)) for k in range(4)]
    backward = schedule("backward", compute(0), Instruction("end"))

    def opened(count: int) -> list[Schedule]:
        launches = [gather(k) for k in range(4)]
        first, *others = blocks
        rest = [*launches[count:], *first[1:], *(part for block in others for part in block)]
        return [schedule("forward", *launches[:count], first[0], *rest), backward]

    base = profile(opened(1), gathers=2.0, optimizer_seconds=4.0, first_gathers=FirstGathers(True))
    assert simulate(opened(1), base).seconds == pytest.approx(8 + 1 + 1 + 4)
    led = Profile.from_json(replace(base, first_gathers=FirstGathers(True, True)).to_json())
    # Opened with one: three seconds before the step, which it needs two of; the next ones then wait for the step.
    # With two: two seconds before; the second one ends two seconds into it. With three, one; and with all, none.
    seconds = [simulate(opened(count), led).seconds - 5 for count in (1, 2, 3, 4)]
    assert seconds == [pytest.approx(expected) for expected in (6 + 1, 6 + 1, 7 + 1, 8 + 1)]
    (best, _) = proactive_prefetch(
        opened(1), PlanContext(profile=replace(led, first_gathers=FirstGathers(True, True, 1.0)))
    )
    assert [i.op for i in best.instructions[:3]] == ["gather", "gather", "wait"]


def test_gathers_between_steps_take_memory_beside_what_a_step_leaves() -> None:
    forward = schedule("forward", gather(0), gather(1), wait(0), compute(0, 0), release(0), wait(1), release(1))
    backward = schedule("backward", compute(0), reduce(0), Instruction("end"))
    both = [forward, backward]
    base = profile(both, first_gathers=FirstGathers(True))
    costs = {"forward/region_0": RegionCost(1.0), "backward/region_0": RegionCost(1.0, after=5000 + SIZE)}
    base = replace(base, regions=costs)
    memory = simulate(both, base).memory
    assert [point.bytes for point in memory[:2]] == [5000 + SLOT, 5000 + 2 * SLOT]
    assert simulate(both, base).peak_bytes == 5000 + 2 * SLOT
    assert simulate(both, replace(base, first_gathers=FirstGathers())).peak_bytes == 5000 + SIZE
    # Over a budget that the second one breaks, it is launched behind the first wait.
    context = PlanContext(profile=replace(base, budget=5000 + 2 * SLOT - 1))
    (moved, _) = proactive_prefetch(both, context)
    assert [i.op for i in moved.instructions[:3]] == ["gather", "wait", "gather"]
    assert simulate([moved, backward], base).peak_bytes == 5000 + SLOT
