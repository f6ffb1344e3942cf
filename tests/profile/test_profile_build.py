"""Measurements are turned into models of links, and one profile of all ranks."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from test_simulate import SIZE, compute, gather, profile, reduce, release, schedule, wait

from lightning_deepcompile.plan.costs import WORST, Contention, Link, Profile, ProfileError
from lightning_deepcompile.plan.least import just_in_time
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.profile.build import build_profile, reconcile
from lightning_deepcompile.profile.links import Transfer, fit_link, transfers_of
from lightning_deepcompile.profile.marks import Mark, ProgramRun, StepMarks
from lightning_deepcompile.profile.merge import merge_profiles, numbers_of, with_numbers
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.program.schedule import Instruction, Schedule


def fit(samples: list[tuple[int, float]], world_size: int) -> Link:
    return fit_link([Transfer("gradients", *one) for one in samples], world_size)


def test_links_are_fitted() -> None:
    true = Link(20e-6, 300e9)
    sizes = [1 << k for k in range(12, 30, 3)]
    fitted = fit([(size, true.seconds(size, 8)) for size in sizes], 8)
    assert fitted.latency == pytest.approx(true.latency) and fitted.bandwidth == pytest.approx(true.bandwidth)
    same = fit([(1 << 20, 0.001)] * 3, 2)
    assert same.latency == 0 and same.seconds(1 << 20, 2) == pytest.approx(0.001)
    assert fit([], 2).seconds(1 << 30, 2) < 0.01
    assert fit([(100, 0.5), (200, 0.7)], 1).latency == pytest.approx(0.5)
    assert fit([(1 << 20, 0.2), (1 << 10, 0.4)], 2).bandwidth > 0, "a bigger transfer was faster"
    negative = fit([(1 << 10, 1e-6), (1 << 20, 1e-2)], 2)
    assert negative.latency >= 0 and negative.bandwidth > 0


def test_a_small_transfer_tells_latency_from_bandwidth() -> None:
    """Blocks of one size, and an embedding of another kind that takes a tenth less than it should."""
    true, block, embedding = Link(30e-6, 240e9), 436 << 20, 1000 << 20
    groups = [(block, true.seconds(block, 2))] * 16 + [(embedding, 0.9 * true.seconds(embedding, 2))]
    assert fit(groups, 2).latency > 5 * true.latency, "they do not tell it"
    found = fit([*groups, (2 << 10, true.seconds(2 << 10, 2))], 2)
    assert found.latency == pytest.approx(true.latency, rel=0.2)
    assert found.seconds(block, 2) == pytest.approx(true.seconds(block, 2), rel=0.02)


def test_ranks_plan_with_the_slowest_times_and_the_least_budget() -> None:
    forward = schedule("forward", gather(0), wait(0), compute(0, 0), release(0))
    fast, slow = profile([forward], 1.0, budget=100), profile([forward], 3.0, budget=50, step_seconds=2.0)
    merged = merge_profiles([fast, slow])
    assert merged == merge_profiles([slow, fast])
    assert merged.regions["forward/region_0"].seconds == 3.0
    assert (merged.budget, merged.step_seconds) == (50, 2.0)
    with pytest.raises(ProfileError, match="Rank 0 ran .* and rank 1"):
        merge_profiles([fast, profile([replace(forward, structure="other")])])


def test_every_number_of_a_profile_says_which_rank_counts() -> None:
    """A number that does not is that of rank 0, which is right only where all ranks have the same."""
    equal = {"world_size", "reduce_window", "window_from", "unexplained_seconds", "topology", "replicated"}
    plain = profile([schedule("forward", compute(0))])
    numbers = [f for f in fields(Profile) if isinstance(getattr(plain, f.name), int | float | None)]
    assert {f.name for f in numbers if WORST not in f.metadata} == equal
    everything = numbers_of(plain)
    assert with_numbers(plain, everything) == plain and len(everything) > len(numbers)


def _step(program: str, *seconds: float) -> StepMarks:
    moments = [0.0, *itertools.accumulate(seconds)]
    run = ProgramRun(program, 0, [Mark(moment, moment) for moment in moments])
    device, start, end = torch.device("cpu"), Mark(0.0, 0.0), Mark(moments[-1], moments[-1])
    return StepMarks(device, PeakMemory(device), runs=[run], start=start, end=end, micro_batches=1)


def _built(observed: StepMarks, isolated: StepMarks, before: dict[str, Schedule], then: dict[str, Schedule]) -> Profile:
    return build_profile(
        observed, isolated, before, then, transfers_of(isolated, then), world_size=2, hold_ratio=1.0, hosted={},
        window_from=0, budget=None, step_seconds=0.0, replicated=False,
        live={name: {"region_0": (0, 0, 0), "region_1": (0, 0, 0)} for name in then},
    )  # fmt: skip


def test_steps_that_ran_other_programs_are_no_profile() -> None:
    """Steps that alternate, and a program that was compiled in the first step, which is not marked there."""
    generator = schedule("generator", gather(0), wait(0), compute(0, 0), release(0), compute(1))
    critic = replace(generator, name="critic")
    first, second = (_step(name, 0.5, 0.5, 1.0, 0.0, 2.0) for name in ("generator", "critic"))
    both = {"generator": generator, "critic": critic}
    with pytest.raises(ProfileError, match=r"\['generator'\] ran.*one of the two profiled steps only"):
        _built(first, second, both, both)
    with pytest.raises(ProfileError, match=r"\['critic'\] ran.*one of the two profiled steps only"):
        _built(replace(second, runs=[]), second, {"generator": generator}, both)


def test_a_hiccup_of_one_step_is_not_what_a_region_takes() -> None:
    schedules = {"forward": schedule("forward", gather(0), wait(0), compute(0, 0), release(0), compute(1))}
    # A gather and its wait, a region of 1 s, a release, and one of 2 s: memory was allocated in the first step.
    observed, isolated = _step("forward", 0.0, 0.5, 1.2, 0.0, 9.0), _step("forward", 0.5, 0.5, 8.0, 0.0, 2.0)
    built = _built(observed, isolated, schedules, schedules)
    assert [built.regions[f"forward/region_{k}"].seconds for k in range(2)] == pytest.approx([1.2, 2.0])
    assert built.gather.seconds(SIZE, 2) == pytest.approx(1.0)


def test_gathers_and_reductions_slow_compute_down_by_factors_of_their_own() -> None:
    forward = schedule(
        "forward",
        *(gather(0), gather(1), wait(0), compute(0, 0), release(0)),
        *(wait(1), compute(1, 1), release(1)),
    )
    backward = schedule(
        "backward",
        *(gather(0), gather(1), wait(0), compute(0, 0), release(0), reduce(0)),
        *(wait(1), compute(1, 1), release(1), reduce(1), Instruction("end")),
    )
    schedules = {"forward": forward, "backward": backward}
    alone = {name: just_in_time(one) for name, one in schedules.items()}

    def step(forward: list[float], backward: list[float]) -> StepMarks:
        parts = _step("forward", *forward), _step("backward", *backward)
        return replace(parts[0], runs=[run for part in parts for run in part.runs])

    gathered = [0.5, 0.5]  # launch and wait
    isolated = step([*gathered, 2, 0, *gathered, 2, 0], [*gathered, 3, 0, 2, *gathered, 3, 0, 2, 0])
    # Of 2 s of gathers compute waits for 1 s. In backward it waits for 3 of 6 s, which hides 1 s of gathers, and 2 s of
    # reductions.
    observed = step([0, 0, 1, 2.1, 0, 0, 2, 0], [0, 0, 3, 3.1, 0, 0, 0, 3.5, 0, 0, 0])
    found = _built(observed, isolated, schedules, alone).contention
    assert (found.beside_gathers, found.beside_reductions) == (pytest.approx(1.1), pytest.approx(1.25))
    # Backward alone does not tell them apart.
    backwards = [replace(one, runs=one.runs[1:]) for one in (observed, isolated)]
    found = _built(*backwards, {"backward": backward}, {"backward": alone["backward"]}).contention
    assert found.beside_gathers == found.beside_reductions == pytest.approx(1.2)


def _with_link(**fields: Any) -> Profile:
    """A backward pass that reduces beside gathers."""
    backward = schedule(
        "backward",
        *(gather(0), gather(1), gather(2), wait(0), compute(0, 0), reduce(0)),
        *(wait(1), compute(1, 1), reduce(1), wait(2), compute(2, 2), reduce(2)),
    )
    return profile([backward], **fields)


@pytest.mark.parametrize("factor", [1.0, 1.4, 2.0])
def test_a_step_says_how_much_of_a_link_gathers_and_reductions_share(factor: float) -> None:
    true = _with_link(seconds=0.5, gathers=2.0, contention=Contention(shared_link=factor))
    seen = replace(true, contention=Contention(), step_seconds=simulate(true.schedules, true).seconds)
    found = reconcile(seen)
    assert found.contention.shared_link == pytest.approx(factor, abs=0.02)
    assert found.unexplained_seconds == pytest.approx(0.0, abs=0.02 * found.step_seconds)


def test_a_step_that_hides_its_gathers_says_nothing_of_the_link() -> None:
    hidden = _with_link(seconds=4.0, gathers=0.01, contention=Contention(), step_seconds=9.0)
    found = reconcile(hidden)
    assert found.contention == Contention() and found.unexplained_seconds < 0
