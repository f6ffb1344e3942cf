"""Schedules read from and written to programs, and what the planning passes promise for any of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shuffle import merge_some
from test_passes import Net, Shape, _full, _program, _run, shapes
from test_simulate import SIZE, compute, gather, profile, reduce, release, schedule, steps, wait
from tracing import capture

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import Contention, Link, Profile, RegionCost
from lightning_deepcompile.plan.known_passes import BUILTIN_PASSES, resolve_passes
from lightning_deepcompile.plan.least import just_in_time, least_budget
from lightning_deepcompile.plan.optimize import apply_passes, optimize
from lightning_deepcompile.plan.passes.fuse import fuse
from lightning_deepcompile.plan.passes.keep_whole import keep_until_boundary, keep_whole
from lightning_deepcompile.plan.passes.proactive_prefetch import proactive_prefetch
from lightning_deepcompile.plan.passes.unshard import unshard
from lightning_deepcompile.plan.placement import Placement
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.plan.step_memory import StepMemory
from lightning_deepcompile.plan.step_pass import Pass, PassError, step_pass
from lightning_deepcompile.program.printer import format_program
from lightning_deepcompile.program.reschedule import reschedule
from lightning_deepcompile.program.schedule import REDUCTIONS, Instruction, Schedule, ScheduleError, check_schedule

ALL = ("zero3", "prefetch", "fuse", "unshard", "keep_whole", "reduce_late", "proactive_prefetch")

# Reading and writing --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(shape=shapes(), data=st.data())
def test_random_valid_schedules_never_change_results(shape: Shape, data: st.DataObject) -> None:
    """Launches anywhere between the last release and the use, and anything kept: same values, nothing left behind."""
    program = apply_passes(_program(shape), PlanSettings(prefetch_blocks=0))
    original = program.schedule
    placement = Placement.of(original)
    positions = sorted(data.draw(st.integers(0, len(placement.body))) for _ in placement.groups)
    changed = placement.at(positions)
    changed = merge_some(changed, lambda: data.draw(st.booleans()))
    check_schedule(changed)
    result = reschedule(program, changed, "random")
    assert result.schedule.instructions == changed.instructions
    assert (result.schedule.content, result.schedule.structure) == (original.content, original.structure)
    expected, reference = _run(program, shape.kept)
    value, simulator = _run(result, shape.kept)
    assert torch.equal(value, expected)
    assert simulator.reductions == reference.reductions
    assert all(torch.equal(simulator.grads[k], reference.grads[k]) for k in reference.grads)
    assert set(simulator.gathered) == set(result.kept if shape.kind == "forward" else ())
    groups = [i.ids for i in changed.instructions if i.op in REDUCTIONS]
    assert [ids for name, ids in simulator.log if name == "reduce"] == groups
    back = reschedule(result, just_in_time(changed), "back")
    assert back.schedule.instructions == just_in_time(original).instructions


def test_schedules_that_cannot_run_are_refused() -> None:
    good = schedule("forward", gather(0), wait(0), compute(0, 0), release(0))
    check_schedule(good)
    for broken, message in [
        ([wait(0), compute(0, 0)], "not gathered before"),
        ([gather(0), compute(0, 0), release(0)], "not gathered and waited for"),
        ([gather(0), wait(0), release(0), compute(0, 0)], "not gathered and waited for"),
        ([gather(0), wait(0), compute(0, 0)], r"ends with parameters \[0\] gathered"),
    ]:
        with pytest.raises(ScheduleError, match=message):
            check_schedule(good.with_instructions(broken))
    with pytest.raises(ScheduleError, match="should with"):
        check_schedule(replace(good, kept=(0,)))


def test_a_schedule_of_another_program_is_refused() -> None:
    first, second = (
        apply_passes(_program(Shape("forward", reads, [[]] * len(reads), ())), PlanSettings())
        for reads in ([[0], [1]], [[0], [2]])
    )
    with pytest.raises(ScheduleError, match="computes or reduces other values"):
        reschedule(first, second.schedule, "foreign")
    lowered = _program(Shape("forward", [[0], [1]], [[], []], ()))
    with pytest.raises(ScheduleError, match="computes or reduces other values"):
        reschedule(first, lowered.schedule, "lowered")


def test_a_real_program_is_planned_and_still_computes_the_same() -> None:
    captured = capture(Net(), torch.arange(6).view(2, 3))
    programs = [apply_passes(captured.lower(kind), PlanSettings(prefetch_blocks=1)) for kind in ("forward", "backward")]
    step = [p.schedule for p in programs]
    planned, effects = optimize(step, resolve_passes(ALL, profiled=True), PlanContext(profile=_profile_of(step)))
    assert [e.name for e in effects] == ["zero3 -> prefetch", *ALL[2:]]
    assert set(planned[0].kept) <= set(
        captured.ids("layers.1.weight", "layers.2.weight", "layers.0.weight", "head.weight")
    )
    assert planned[0].kept, "what backward reads is kept; it reads no bias, and no embedding"
    assert effects[-1].prediction.seconds < effects[0].prediction.seconds
    for program, one in zip(programs, planned, strict=True):
        assert reschedule(program, one, "plan").schedule.instructions == one.instructions


def _profile_of(step: list[Schedule], **fields: Any) -> Profile:
    base = profile(step, seconds=0.1, gathers=1.0, **fields)
    return replace(base, gather=Link(0.5, 1000.0), reduce=Link(0.5, 1000.0))


# What each pass does --------------------------------------------------------------------------------------------------


def _blocks(count: int, distance: int = 1) -> list[Schedule]:
    forward = [part for k in range(count) for part in (gather(k), wait(k), compute(k, k), release(k))]
    backward = [part for k in reversed(range(count)) for part in (gather(k), wait(k), compute(k, k), release(k))]
    step = [schedule("forward", *forward), schedule("backward", *backward)]
    placements = [Placement.of(s) for s in step]
    return [p.at([p.groups[max(0, k - distance)].need for k in range(count)]) for p in placements]


def test_fuse_merges_what_latency_dominates_and_nothing_else() -> None:
    step = _blocks(4, distance=0)
    slow_start = replace(profile(step), gather=Link(1.0, 1e9))
    fused = fuse(step, PlanContext(profile=slow_start))
    assert [len(s.at("gather")) for s in fused] == [1, 1]
    assert simulate(fused, slow_start).seconds < simulate(step, slow_start).seconds
    no_latency = replace(profile(step), gather=Link(0.0, 1e3))
    assert fuse(step, PlanContext(profile=no_latency)) == step


def test_unshard_keeps_what_the_budget_allows_the_most_useful_first() -> None:
    step = _blocks(4)
    base = replace(profile(step, seconds=0.1, gathers=1.0))
    seconds, kept = [], []
    least = simulate(step, base).peak_bytes
    for extra in range(5):
        context = PlanContext(profile=replace(base, budget=least + extra * 1536))
        result = unshard(step, context)
        prediction = simulate(result, base)
        assert prediction.peak_bytes <= context.budget
        kept.append(len(result[0].kept))
        seconds.append(prediction.seconds)
        for one in result:
            check_schedule(one)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    assert kept == sorted(kept) and kept[-1] == 4
    # Hidden gathers cost nothing: no memory is spent on them, but for the one that forward and backward wait for.
    hidden = profile(step, seconds=10.0, gathers=0.001)
    assert unshard(step, PlanContext(profile=hidden))[0].kept == ()


def test_groups_that_help_only_together_are_kept() -> None:
    """Each of very many saves less than counts; and as many as fit are kept, of equal ones those used last."""
    count = 150
    step = _blocks(count, distance=0)
    tiny = replace(profile(step, seconds=1.0), gather=Link(1e-3, 1e9))
    context = PlanContext(profile=replace(tiny, budget=10**9))
    before = simulate(step, tiny).seconds
    (kept, _) = unshard(step, context)
    assert len(kept.kept) == count
    assert simulate(unshard(step, context), tiny).seconds == pytest.approx(before - count * 1e-3)
    tight = replace(context, profile=replace(tiny, budget=simulate(step, tiny).peak_bytes))
    assert simulate(unshard(step, tight), tiny).peak_bytes <= tight.budget


def test_keep_whole_turns_stage_3_into_stage_2_as_far_as_memory_goes() -> None:
    step = _blocks(4)
    # Forward alone reads parameter 9; it is gathered first, with nothing beside it.
    first = [gather(9), wait(9), compute(9, 9), release(9)]
    step[0] = step[0].with_instructions([*first, *step[0].instructions])
    base = profile(step, seconds=0.1, gathers=1.0, micro_batches=4)
    least = simulate(step, base).peak_bytes
    seconds, gathered = [], []
    for extra in range(6):
        context = PlanContext(profile=replace(base, budget=least + extra * 1536))
        result = keep_whole(step, context)
        for one in result:
            check_schedule(one)
        prediction = simulate(result, base)
        assert prediction.peak_bytes <= context.budget
        seconds.append(prediction.seconds)
        gathered.append(round(prediction.gather_seconds))
    assert seconds == sorted(seconds, reverse=True)
    assert gathered[0] == 4 * 9 and gathered[-1] == 5, "once a step instead of with every use"
    assert result[1].instructions[0] == Instruction("release_at_boundary", (9,), (1024,))
    assert keep_whole(step, PlanContext(profile=replace(base, micro_batches=1))) == step


def test_a_step_that_is_shorter_than_its_parts_is_planned_however_many_micro_batches_it_has() -> None:
    """Passes simulate two of the micro-batches, or four, which would take no time if all the difference was theirs."""
    step = _blocks(4)
    step[1] = step[1].with_instructions([*step[1].instructions, reduce(0, 1, 2, 3), Instruction("end")])
    base = _profile_of(step, micro_batches=64, hold_seconds=0.0, budget=1 << 60)
    short = replace(base, unexplained_seconds=-0.1 * simulate(step, base).seconds)
    for name, count in (("unshard", 2), ("keep_whole", 2), ("reduce_late", 4)):
        plans = [
            BUILTIN_PASSES[name].run(step, PlanContext(PlanSettings(reduce="auto", rounding="any"), p))
            for p in (base, short)
        ]
        assert plans[0] == plans[1] != step, name
        part = PlanContext(profile=short).require_profile(name, count)
        expected = 0.9 * simulate(step, replace(base, micro_batches=count)).seconds
        assert simulate(step, part).seconds == pytest.approx(expected, rel=0.05)


def test_what_is_kept_until_the_boundary_changes_no_value() -> None:
    shapes = (Shape("forward", [[0, 1], [2], [1]], [[], [], []], ()), Shape("backward", [[1], [2]], [[1], [2, 0]], ()))
    settings_ = PlanSettings()
    programs = [apply_passes(_program(shape), settings_) for shape in shapes]
    step = [program.schedule for program in programs]
    kept = step
    for position in step[0].at("gather"):
        kept = keep_until_boundary(kept, 0, 1, step[0].instructions[position])
    assert all(i.op != "release" for s in kept for i in s.instructions)
    forward, backward = (reschedule(p, s, "keep_whole") for p, s in zip(programs, kept, strict=True))
    assert "release at boundary" in format_program(backward)
    left = (0, 1, 2)
    assert set(_run(forward)[1].gathered) == set(left)
    for boundary, remains in ((False, set(left)), (True, set())):
        for program, plain in ((forward, programs[0]), (backward, programs[1])):
            value, simulator = _run(program, left, boundary=boundary)
            assert torch.equal(value, _run(plain)[0])
        assert set(simulator.gathered) == remains
    with pytest.raises(ScheduleError, match="only backward programs know"):
        check_schedule(
            step[0].with_instructions([*step[0].instructions, Instruction("release_at_boundary", (0,), (8,))])
        )


def test_prefetch_is_as_early_as_needed_and_no_earlier() -> None:
    forward = _blocks(5, distance=0)[:1]
    # A gather takes as long as two and a half regions: without memory limits the first waits are what is exposed.
    slow = profile(forward, seconds=1.0, gathers=2.5)
    early = proactive_prefetch(forward, PlanContext(profile=slow))
    assert simulate(early, slow).seconds == pytest.approx(5 * 2.5 + 1)
    # A gather takes a third of a region: one block ahead is enough, and no more than two groups are ever there.
    fast = profile(forward, seconds=1.0, gathers=1 / 3)
    late = simulate(proactive_prefetch(forward, PlanContext(profile=fast)), fast)
    assert late.seconds == pytest.approx(5 + 1 / 3)
    assert late.peak_bytes == 2 * 1536 + 30
    # With memory for one group at a time it stays where it was.
    tight = replace(slow, budget=least_budget(forward, slow))
    assert simulate(proactive_prefetch(forward, PlanContext(profile=tight)), slow).peak_bytes <= tight.budget


def test_plans_change_with_the_link() -> None:
    step = _blocks(6)
    kept = []
    for gathers in (0.01, 0.8, 5.0):
        context = PlanContext(profile=profile(step, seconds=1.0, gathers=gathers, budget=4 * 1536 + 30))
        planned, _ = optimize(step, resolve_passes(ALL, profiled=True), context)
        kept.append(len(planned[0].kept))
    assert kept[0] < kept[-1]


def test_with_less_memory_steps_get_slower_little_by_little() -> None:
    """Values that a backward pass leaves grow with every block: only its end has no memory for a gather ahead."""
    count = 8
    forward = [part for k in range(count) for part in (gather(k), wait(k), compute(k, k), release(k))]
    parts = [(gather(k), wait(k), compute(k, k), release(k), reduce(k)) for k in reversed(range(count))]
    backward = [part for block in parts for part in block]
    step = [schedule("forward", *forward), schedule("backward", *backward, Instruction("end"))]
    base = profile(step, gathers=0.7, reduce_window=0)
    left = {f"backward/region_{k}": RegionCost(1.0, 0, 0, SIZE * (count - k)) for k in range(count)}
    before = {f"backward/region_{k}": SIZE * (count - 1 - k) for k in range(count)}
    costs = {name: replace(cost, before=before[name], peak=cost.after) for name, cost in left.items()}
    base = replace(base, regions=base.regions | costs)
    least, times = least_budget(step, base), []
    for budget in range(least, least + 6 * 1536 + 1, 512):
        _, effects = optimize(
            step, resolve_passes(ALL, profiled=True), PlanContext(profile=replace(base, budget=budget))
        )
        assert effects[-1].prediction.peak_bytes <= budget
        times.append(effects[-1].prediction.seconds)
    assert times == sorted(times, reverse=True)
    # With the least memory all but the last gathers are hidden; that memory is needed at the end of backward alone.
    assert times[0] < 1.06 * times[-1] < 0.8 * simulate(step, base).seconds


@pytest.mark.parametrize("spare", [-1, 0, 512, 1536])
def test_effort_of_placing_gathers_where_memory_is_short_grows_with_blocks_not_their_square(
    monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    """Slow gathers are wanted far ahead, and there is memory for few: each block's launches have to move later."""
    simulated, first_excess = [], StepMemory.first_excess
    monkeypatch.setattr(StepMemory, "first_excess", lambda *a: simulated.append(0) or first_excess(*a))

    def effort(count: int) -> int:
        parts = [part for k in range(count) for part in (gather(k), wait(k), compute(k, k), release(k))]
        step = [schedule("forward", *parts)]
        base = profile(step, gathers=3.0)
        simulated.clear()
        budget = least_budget(step, base) + spare
        result = proactive_prefetch(step, PlanContext(profile=replace(base, budget=budget)))
        predicted = simulate(result, replace(base, budget=budget))
        assert predicted.peak_bytes <= max(budget, least_budget(step, base))
        return len(simulated)

    few, many = effort(10), effort(40)
    assert many <= 4 * few * 2, "the logarithm of the blocks may double it"


def test_where_memory_is_short_no_pass_runs_before_what_it_needs() -> None:
    ran: list[str] = []

    def made(name: str, needs: list[str], provides: list[str]) -> Pass:
        return step_pass(name, needs, provides)(lambda schedules, context: ran.append(name) or schedules)

    uses = [part for k in range(2) for part in (wait(k), compute(k, k), release(k))]
    step = [schedule("forward", gather(0), gather(1), *uses)]
    context = PlanContext(profile=profile(step, budget=1))
    for needs, order in (
        (["gathers", "profile"], "ab bab"),
        (["gathers"], "ab"),
        (["mark", "profile"], "ab"),
    ):
        passes = resolve_passes(["zero3", made("a", [], ["mark"]), made("b", needs, [])], profiled=True)
        for schedules, rounds in ((step, 2), ([just_in_time(one) for one in step], 1)):
            ran.clear()
            optimize(schedules, passes, context)
            assert "".join(ran) == rounds * order.replace(" ", ""), "gathers right before their use are planned once"


@settings(deadline=None, max_examples=25)
@given(
    step=steps(),
    seconds=st.floats(0.01, 10),
    gathers=st.floats(0.01, 10),
    spare=st.integers(0, 6),
    device_type=st.sampled_from(["cpu", "cuda"]),
    compute_factor=st.floats(1, 2),
    micro_batches=st.integers(1, 2),
    hold=st.floats(0, 1),
    latency=st.floats(0, 2),
)
def test_no_pass_exceeds_the_budget_or_slows_the_step(
    step: list[Schedule],
    seconds: float,
    gathers: float,
    spare: int,
    device_type: str,
    compute_factor: float,
    micro_batches: int,
    hold: float,
    latency: float,
) -> None:
    base = profile(step, seconds, gathers, contention=Contention(compute_factor, compute_factor))
    base = replace(base, device_type=device_type, micro_batches=micro_batches, hold_seconds=hold / SIZE)
    base = replace(base, gather=replace(base.gather, latency=latency), reduce=replace(base.reduce, latency=latency))
    base = replace(base, budget=least_budget(step, base) + spare * 1536)
    context = PlanContext(PlanSettings(reduce="auto", rounding="any"), base)
    _, effects = optimize(step, resolve_passes(ALL, profiled=True), context)
    assert effects[-1].prediction.peak_bytes <= base.budget, "there is a plan within it"
    before = simulate(step, base)
    reductions = [k for s in step for i in s.instructions if i.op in REDUCTIONS for k in i.ids]
    for name in ALL[2:]:
        step = BUILTIN_PASSES[name].run(step, context)
        for one in step:
            check_schedule(one)
        after = simulate(step, base)
        assert after.peak_bytes <= max(before.peak_bytes, context.budget)
        if before.peak_bytes <= context.budget:
            assert after.seconds <= before.seconds * 1.001
        before = after
    assert [k for s in step for i in s.instructions if i.op in REDUCTIONS for k in i.ids] == reductions


# Names and order ------------------------------------------------------------------------------------------------------


def _made(name: str, needs: list[str], provides: list[str]) -> Pass:
    return step_pass(name, needs, provides)(lambda schedules, context: schedules)


def test_passes_are_found_and_their_order_is_checked() -> None:
    assert [p.name for p in resolve_passes(ALL, profiled=True)] == list(ALL)
    for passes, profiled, message in [
        (["zero4"], True, "There is no pass 'zero4'. Use one of fuse, "),
        (["zero3", "nowhere.module:name"], True, "cannot be imported"),
        (["zero3", "json:dumps"], True, "is a function, no pass"),
        (["zero3", "unshard"], False, "'unshard' needs a profile"),
        (["prefetch", "zero3"], True, "'prefetch' needs 'gathers' from 'zero3', which comes after it"),
        (["prefetch"], True, "which no pass before it provides: put 'zero3' before it"),
        (["zero3", _made("c", ["magic"], [])], True, "no pass provides that"),
        (["zero3", "fuse", "prefetch"], True, "must come before passes that plan a step"),
        ([], True, "No pass schedules the communication"),
    ]:
        with pytest.raises(PassError, match=message):
            resolve_passes(passes, profiled=profiled)


def test_planning_starts_from_what_passes_make_that_say_so() -> None:
    ran: list[str] = []
    mine = step_pass("mine", ["gathers"], initial=True)(lambda schedules, context: ran.append("mine") or schedules)
    passes = resolve_passes(["zero3", mine, "fuse"], profiled=True)
    step = _blocks(2)
    _, effects = optimize(step, passes, PlanContext(profile=profile(step)))
    assert [effect.name for effect in effects] == ["zero3 -> mine", "fuse"] and ran == []
    program = apply_passes(_program(Shape("forward", [[0]], [[]], ())), PlanSettings(), passes[:2])
    assert program.history == ("lower", "zero3", "mine") and ran == ["mine"]


def test_a_pass_that_loses_programs_or_breaks_a_schedule_is_refused() -> None:
    shape = Shape("forward", [[0], [1]], [[], []], ())
    for run, message in [
        (lambda schedules, context: [], "must return a schedule for each program"),
        (lambda schedules, context: [schedules[0].with_instructions(schedules[0].instructions[1:])], "not gathered"),
    ]:
        passes = resolve_passes(["zero3", step_pass("mine", ["gathers"])(run)], profiled=False)
        with pytest.raises(ValueError, match=message):
            apply_passes(_program(shape), PlanSettings(), passes)
    assert len(_full()) == 6
