"""Plans for offloaded activations: schedules that a person can work out by hand, and promises."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan_passes import ALL
from test_simulate import compute

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.copy_placement import fit_copies, offload_all
from lightning_deepcompile.plan.costs import Contention, Link, Profile, RegionCost
from lightning_deepcompile.plan.known_passes import resolve_passes
from lightning_deepcompile.plan.least import just_in_time
from lightning_deepcompile.plan.optimize import optimize
from lightning_deepcompile.plan.passes.offload_activation import offload_activation
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.simulate import arena_bytes, simulate
from lightning_deepcompile.plan.step_pass import PassError, step_pass
from lightning_deepcompile.program.saved import Saved
from lightning_deepcompile.program.schedule import Instruction, Schedule, ScheduleError, check_schedule

COUNT, SIZE = 6, 1 << 20
"""Regions of a forward schedule, each of which saves one tensor of so many bytes."""


def copies(op: Any, *numbers: int) -> Instruction:
    return Instruction(op, numbers, (SIZE,) * len(numbers))


def _step(loads: float = 1.0, **fields: Any) -> tuple[list[Schedule], Profile]:
    """Regions take a second; a copy takes `loads` seconds; memory is what is saved."""
    names = [f"region_{k}" for k in range(COUNT)]
    last_first = names[::-1]
    forward = Schedule(
        "forward", "forward", 0, tuple(compute(k) for k in range(COUNT)),
        saved=tuple(Saved(k, SIZE, names[k], names[k]) for k in range(COUNT)),
    )  # fmt: skip
    backward = Schedule(
        "backward", "backward", 0, tuple(compute(k) for k in range(COUNT)),
        saved=tuple(Saved(k, SIZE, last_first[k], last_first[k]) for k in range(COUNT)),
    )  # fmt: skip
    regions = {}
    for k in range(COUNT):
        held = k * SIZE
        regions[f"forward/region_{k}"] = RegionCost(1.0, 0.0, held, held + SIZE, held + SIZE)
        held = (COUNT - k) * SIZE
        regions[f"backward/region_{k}"] = RegionCost(1.0, 0.0, held, held, held - SIZE)
    link, copy = Link(0.0, 1e12), Link(0.0, SIZE / loads)
    schedules = [forward, backward]
    profile = Profile(2, "cuda", tuple(schedules), regions, link, link, Contention(), copy_out=copy, copy_in=copy)
    return schedules, replace(profile, **fields)


def _plan(budget: float, mode: Any = "auto", loads: float = 1.0, **fields: Any) -> tuple[list[Schedule], Any]:
    schedules, profile = _step(loads, budget=int(budget * SIZE), **fields)
    planned = offload_activation(schedules, PlanContext(PlanSettings(offload_activations=mode), profile))
    for schedule in planned:
        check_schedule(schedule)
    assert planned[0].offloaded == planned[1].offloaded
    return planned, simulate(planned, profile)


def test_nothing_leaves_that_fits() -> None:
    schedules, _ = _step()
    assert _plan(COUNT)[0] == schedules
    assert _plan(COUNT - 1, room=SIZE)[0] == schedules, "room for larger batches is no reason"
    assert _plan(1, "none")[0] == schedules


@pytest.mark.parametrize("budget", [5, 4, 3])
def test_what_exceeds_the_budget_leaves_and_no_more(budget: int) -> None:
    planned, prediction = _plan(budget)
    assert prediction.peak_bytes <= budget * SIZE
    # Of the tensors that are away at the end of forward one comes back in time to be read.
    assert planned[0].offloaded == tuple(range(COUNT - budget))
    assert prediction.seconds == pytest.approx(2 * COUNT) and prediction.exposed_seconds == 0


def test_copies_are_where_a_person_would_put_them() -> None:
    """Each copy takes as long as a region: it runs beside the next one, and comes back beside the one before."""
    planned, _ = _plan(4)
    assert planned[0].instructions == (
        compute(0), copies("offload", 0), compute(1), copies("offload", 1), copies("wait_copy", 0),
        compute(2), copies("wait_copy", 1), compute(3), compute(4), compute(5),
    )  # fmt: skip
    assert planned[1].instructions == (
        compute(0), compute(1), compute(2), copies("reload", 1), compute(3), copies("reload", 0),
        copies("wait_copy", 1), compute(4), copies("wait_copy", 0), compute(5),
    )  # fmt: skip


def test_slow_copies_make_compute_wait_where_the_memory_is_needed() -> None:
    planned, prediction = _plan(3, loads=4.0)
    assert prediction.peak_bytes <= 3 * SIZE
    assert prediction.exposed_seconds > 0 and prediction.seconds > 2 * COUNT + 1
    roomy, roomier = _plan(5, loads=4.0)
    assert len(roomy[0].offloaded) < len(planned[0].offloaded)
    assert roomier.seconds < prediction.seconds


def test_everything_leaves_on_demand_and_host_memory_is_bounded() -> None:
    assert _plan(COUNT, "all")[0][0].offloaded == tuple(range(COUNT))
    assert _plan(COUNT, "all", host_budget=2 * SIZE)[0][0].offloaded == (0, 1)
    assert _plan(3, host_budget=2 * SIZE)[1].peak_bytes == 4 * SIZE, "as far as the host's memory goes"


def test_nothing_leaves_in_vain() -> None:
    """Only tensors that lower the peak are offloaded, however small the budget."""
    for elsewhere, leaving in ((10, ()), (4, (0, 1))):
        schedules, profile = _step(budget=2 * SIZE)
        profile.regions["backward/region_5"] = RegionCost(1.0, 0.0, SIZE, elsewhere * SIZE, 0)
        planned = offload_activation(schedules, PlanContext(PlanSettings(offload_activations="auto"), profile))
        assert planned[0].offloaded == leaving
        assert simulate(planned, profile).peak_bytes == elsewhere * SIZE


def test_a_frame_between_two_others_sees_what_they_left() -> None:
    """Two graphs of one step: while the second one runs, all that the first has left is away."""
    (forward, backward), profile = _step()
    inner = [replace(s, name=f"{s.name} 1", frame=1) for s in (forward, backward)]
    base = COUNT * SIZE
    costs = {
        f"{name} 1/{region}": replace(c, before=c.before + base, peak=c.peak + base, after=c.after + base)
        for (name, region), c in ((key.split("/"), c) for key, c in profile.regions.items())
    }
    schedules = [forward, *inner, backward]
    profile = replace(profile, regions={**profile.regions, **costs}, schedules=tuple(schedules), budget=8 * SIZE)
    planned = offload_activation(schedules, PlanContext(PlanSettings(offload_activations="auto"), profile))
    assert planned[0].offloaded == planned[3].offloaded == (0, 1, 2, 3) and planned[1].offloaded == ()
    assert simulate(planned, profile).peak_bytes == 8 * SIZE


@settings(deadline=None, max_examples=60)
@given(
    budget=st.integers(1, COUNT + 1),
    loads=st.floats(0.01, 5.0),
    mode=st.sampled_from(["auto", "all"]),
    batches=st.integers(1, 3),
)
def test_plans_keep_their_promises(budget: int, loads: float, mode: str, batches: int) -> None:
    schedules, profile = _step(loads, budget=budget * SIZE, micro_batches=batches)
    context = PlanContext(PlanSettings(offload_activations=mode), profile)
    planned = offload_activation(schedules, context)
    for schedule in planned:
        check_schedule(schedule)
        check_schedule(just_in_time(schedule))
    assert planned[0].offloaded == planned[1].offloaded
    peak, before = (simulate(s, profile).peak_bytes for s in (planned, schedules))
    assert peak <= max(before, budget * SIZE)
    if budget >= 3:
        assert peak <= budget * SIZE
    away = arena_bytes(planned)
    assert away[1][-1] == 0 and all(bytes_ <= 0 for program in away for bytes_ in program)


def test_schedules_that_lose_a_tensor_are_refused() -> None:
    (forward, backward), _ = _step()
    everything = [compute(k) for k in range(COUNT)]
    for schedule, instructions, message in [
        (forward, [copies("offload", 0), *everything, copies("wait_copy", 0)], "is computed later, by region_0"),
        (forward, [*everything, copies("offload", 0)], r"nothing waits for the copies of tensors \[0\]"),
        (forward, [*everything, copies("offload", 0, 0), copies("wait_copy", 0)], "copied twice"),
        (forward, [*everything, copies("offload", 9), copies("wait_copy", 9)], "no saved tensor 9"),
        (forward, [*everything, copies("reload", 0)], "only backward programs do that"),
        (backward, [*everything, copies("wait_copy", 0)], "is not being copied"),
        (backward, [*everything, copies("reload", 5), copies("wait_copy", 5)], "is read before, by region_0"),
        (backward, [copies("offload", 5), *everything], "only forward programs do that"),
    ]:
        with pytest.raises(ScheduleError, match=message):
            check_schedule(schedule.with_instructions(instructions))

    @step_pass("forgetful", needs=["gathers"])
    def forgetful(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
        return [offload_all(schedules)[0], schedules[1]]

    schedules, profile = _step()
    with pytest.raises(PassError, match="'forgetful', forward leaves the saved tensors .* they must be the same"):
        optimize(schedules, resolve_passes(["zero3", forgetful], profiled=True), PlanContext(profile=profile))


def test_a_plan_for_other_saved_tensors_is_fitted() -> None:
    schedules, _ = _step()
    forward, backward = offload_all(schedules)
    fewer = replace(schedules[0], saved=schedules[0].saved[:3])
    assert fit_copies(forward, schedules[0], ()) == forward
    assert fit_copies(forward, fewer, ()).offloaded == ()
    assert fit_copies(forward, fewer, (0, 2)).offloaded == (0, 2)
    assert fit_copies(backward, schedules[1], range(COUNT)) == backward
    assert fit_copies(backward, schedules[1], (1, 4)).offloaded == (1, 4), "backward follows what forward does"


def test_the_pass_is_among_the_defaults() -> None:
    names = [
        p.name for p in resolve_passes([*ALL[:3], "offload_activation", "offload_optimizer", *ALL[3:]], profiled=True)
    ]
    assert names.index("offload_activation") < names.index("unshard"), "what must leave comes first"
    assert list(itertools.chain(*(entry["passes"] for entry in _default_schedule())))[2:] == names


def _default_schedule() -> Any:
    from lightning_deepcompile.plan.known_passes import DEFAULT_SCHEDULE

    return DEFAULT_SCHEDULE
