"""Groups of gradients that are reduced together: when planning does that, and that it changes no bit."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Record, gpt, train
from multiprocess import run_ranks
from shuffle import Shuffle, merge_some
from test_engine import TOKENS, make_engine, one_step, sgd
from test_freshness import Shallow
from test_passes import Net, Shape, _program
from test_simulate import SIZE, compute, profile, reduce, reduce_late, schedule
from torch.distributed.device_mesh import DeviceMesh
from tracing import capture

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.plan.admit import admitted
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import Link, Profile
from lightning_deepcompile.plan.difference import difference
from lightning_deepcompile.plan.optimize import apply_passes
from lightning_deepcompile.plan.passes.fuse import fuse
from lightning_deepcompile.plan.passes.reduce_late import place_reductions
from lightning_deepcompile.plan.plan_file import PlanFileError, Setting, read_plan, write_plan
from lightning_deepcompile.plan.reductions import merge_reductions
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.profile.instrument import instrument
from lightning_deepcompile.profile.marks import Isolation, StepMarks
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.program.live import live_bytes
from lightning_deepcompile.program.printer import format_program
from lightning_deepcompile.program.program import collective_sequence
from lightning_deepcompile.program.reschedule import reschedule
from lightning_deepcompile.program.schedule import REDUCTIONS, Instruction, Schedule, ScheduleError, check_schedule
from lightning_deepcompile.tuning import measuring, tuner

# Decisions ------------------------------------------------------------------------------------------------------------


def _step(*reductions: Instruction) -> list[Schedule]:
    """A forward pass of one region, and a backward pass of as many as there are reductions."""
    parts = [part for k, one in enumerate(reductions) for part in (compute(k), one)]
    return [schedule("forward", compute(9)), schedule("backward", *parts, Instruction("end"))]


def _groups(step: list[Schedule]) -> list[tuple[int, ...]]:
    return [i.ids for s in step for i in s.instructions if i.op in REDUCTIONS]


def _profile(step: list[Schedule], link: Link, **fields: Any) -> Profile:
    """Compute waits for every reduction at once; what a region leaves includes the gradient that it makes."""
    base = profile(step, **{"reduce_window": 0, **fields})
    costs = {key: replace(cost, peak=30 + SIZE, after=20 + SIZE) for key, cost in base.regions.items()}
    return replace(base, regions=base.regions | costs, reduce=link)


def test_groups_that_latency_dominates_are_reduced_together() -> None:
    step = _step(*(reduce(k) for k in range(4)))
    latency = _profile(step, Link(1.0, 1e12))
    assert simulate(step, latency).seconds == pytest.approx(1 + 4 * (1 + 1))
    fused = fuse(step, PlanContext(profile=latency))
    assert fused[1].instructions == (
        *map(compute, range(4)),
        replace(reduce(0, 1, 2, 3), made=tuple(f"region_{k}" for k in range(4))),
        Instruction("end"),
    )
    check_schedule(fused[1])
    assert simulate(fused, latency).seconds == pytest.approx(1 + 4 + 1)
    assert difference(step, fused) == "groups of reductions: 4 become 1"
    # At less than a third of a group's time, latency is no reason; and without any nothing gets shorter.
    for link in (Link(1.0, SIZE / 4), Link(0.0, 1e3)):
        assert fuse(step, PlanContext(profile=_profile(step, link))) == step


def test_more_than_two_gpus_merge_with_consent() -> None:
    step = _step(*(reduce(k) for k in range(4)))
    for ranks, device_type, mode, merges in (
        (2, "cuda", "needed", True),
        (3, "cuda", "needed", False),
        (3, "cuda", "any", True),
        (3, "cpu", "same", True),
    ):
        settings = PlanSettings(rounding=mode)
        latency = replace(_profile(step, Link(1.0, 1e12)), world_size=ranks, device_type=device_type)
        assert (len(_groups(fuse(step, PlanContext(settings, latency)))) == 1) == merges, (ranks, device_type, mode)
        # A plan file of a run that agreed is split for one that does not.
        merged = fuse(step, PlanContext(PlanSettings(reduce="auto", rounding="any"), latency))
        assert _groups(admitted(merged, settings, ranks, device_type)) == _groups(merged if merges else step)


def test_groups_are_reduced_together_as_far_as_memory_goes() -> None:
    step = _step(*(reduce(k) for k in range(4)))
    base = _profile(step, Link(1.0, 1e12))
    least = simulate(step, base).peak_bytes
    sizes = []
    for extra in range(5):
        context = PlanContext(profile=replace(base, budget=least + extra * SIZE))
        fused = fuse(step, context)
        assert simulate(fused, base).peak_bytes <= context.budget
        sizes.append([len(ids) for ids in _groups(fused)])
    assert sizes == [[1, 1, 1, 1], [2, 2], [3, 1], [4], [4]]
    # A step that exceeds its budget may not exceed it any further.
    assert fuse(step, PlanContext(profile=replace(base, budget=1))) == step


def test_what_is_hidden_beside_compute_stays_apart() -> None:
    """Half a second of latency and a quarter of one on the wire, beside regions of a second: only the last shows."""
    step = _step(*(reduce(k) for k in range(4)))
    hidden = _profile(step, Link(0.5, 2 * SIZE), reduce_window=9)
    assert simulate(step, hidden).seconds == pytest.approx(1 + 4 + 0.75)
    assert fuse(step, PlanContext(profile=hidden)) == step
    # Where compute is much shorter, the wire is what the step waits for: one latency instead of four.
    busy = replace(hidden, regions={key: replace(cost, seconds=0.01) for key, cost in hidden.regions.items()})
    assert _groups(fuse(step, PlanContext(profile=busy))) == [(0, 1, 2, 3)]


def test_groups_that_travel_at_other_times_stay_apart() -> None:
    now = Instruction("reduce_now", (7,), (SIZE,))
    for step, expected in (
        (_step(reduce(0), reduce_late(1), reduce(2), reduce_late(3)), [(0,), (1,), (2,), (3,)]),
        (_step(reduce(0), now, reduce(1), reduce(2)), [(0,), (1, 2)]),
        (_step(reduce_late(0), reduce_late(1), reduce(2)), [(0, 1), (2,)]),
    ):
        base = _profile(step, Link(1.0, 1e12), micro_batches=2, hold_seconds=0.0)
        assert _groups(fuse(step, PlanContext(profile=base))) == expected


# Programs -------------------------------------------------------------------------------------------------------------


def test_a_real_program_is_regrouped_and_still_the_same() -> None:
    captured = capture(Net(), torch.arange(6).view(2, 3))
    program = apply_passes(captured.lower("backward"), PlanSettings(prefetch_blocks=1))
    original = program.schedule
    assert len(_groups([original])) == 5
    turns = iter([True, True, False, True])
    merged = merge_some(original, lambda: next(turns))
    first = reschedule(program, merged, "merged")
    lines = [line.split(" (")[0] for line in format_program(first).splitlines() if line.startswith("  reduce")]
    assert lines == ["  reduce   head, layers.2", "  reduce   layers.1, layers.0, embed"]
    sequence = [ids for name, ids in collective_sequence(first) if name == "reduce"]
    assert sequence == _groups([merged]) and sum(sequence, ()) == sum(_groups([original]), ())
    assert live_bytes(first) == live_bytes(program), "gradients that wait are the simulator's to count"

    # From any grouping to any other, and back.
    other = merge_reductions(original, *original.at("reduce")[1:3])
    late = place_reductions([merge_some(original, lambda: True)], "reduce_at_boundary")[0]
    for wanted in (other, late, merged, original):
        first = reschedule(first, wanted, "again")
        found = first.schedule
        assert found.instructions == wanted.instructions
        assert (found.content, found.structure) == (original.content, original.structure)
    assert format_program(first).splitlines()[1:] == format_program(program).splitlines()[1:]


def test_gradients_cannot_travel_before_they_are_there() -> None:
    shape = Shape("backward", [[0], [1], [2]], [[0], [1], [2]], ())
    program = apply_passes(_program(shape), PlanSettings())
    original = program.schedule
    first, second, third = original.at("reduce")
    parts = list(original.instructions)
    group = replace(reduce(0, 1), made=("region_0", "region_1"), values=("gradient_0", "gradient_1"))
    for position, instruction, message in [
        (first, group, r"reduce \(0, 1\)\): gradients are computed later, by \['region_1'\]"),
        (first, replace(group, made=()), "the gradient of parameter 1 is computed later, by region_1"),
        (second, replace(group, made=("region_0",)), "2 gradients cannot come from"),
        (second, replace(group, ids=(1, 0)), "computes or reduces other values"),
        (second, replace(reduce(1), made=("region_1",), values=("gradient_1",)), "computes or reduces other values"),
    ]:
        changed = [*parts]
        changed[position] = instruction
        wanted = original.with_instructions(
            i for k, i in enumerate(changed) if k in (position, third) or k > second or i.op != "reduce"
        )
        with pytest.raises(ScheduleError, match=message):
            reschedule(program, wanted, "broken")
    with pytest.raises(ScheduleError, match="backward has ended"):
        check_schedule(original.with_instructions([*parts[:third], *parts[third + 1 :], parts[third]]))


def test_plan_files_say_what_makes_gradients() -> None:
    setting = Setting(2, 3, "cpu")
    plain = replace(_step(reduce(0), reduce(1))[1], content="key")
    merged = merge_reductions(plain, *plain.at("reduce"))
    text = write_plan([merged], setting)
    assert read_plan(text, setting).schedules == {"key": merged}
    old = write_plan([plain], setting).replace(', "made": []', "").replace(',\n     "made": []', "")
    assert "made" not in old and read_plan(old, setting).schedules == {"key": plain}
    with pytest.raises(PlanFileError, match="computed later, by"):
        read_plan(text.replace('"region_1"\n', '"region_5"\n'), setting)


def test_profiled_programs_reduce_every_gradient_at_once(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh, memory_budget=1 << 40)
    one_step(engine, TOKENS, sgd(engine))
    executables = engine.capture.frames.executables
    original = [e.program.schedule for e in executables]
    engine.capture.scheduling.replan(plan=[merge_some(s, lambda: True) for s in original])
    assert len(_groups(original)) > len(_groups([e.program.schedule for e in executables])) == 1
    isolated = instrument(
        executables, StepMarks(torch.device("cpu"), PeakMemory(torch.device("cpu")), Isolation(int, int))
    )
    assert _groups(list(isolated.values())) == _groups(original)
    engine.close()


# Two ranks ------------------------------------------------------------------------------------------------------------


class _Merge(Shuffle):
    """Reduces all gradients of a program at once from the second step on."""

    def swap(self, capture: Capture) -> list[Schedule]:
        step = [merge_some(e.program.schedule, lambda: True) for e in capture.frames.executables]
        capture.scheduling.replan(plan=step)
        return step


def _fit(model: str = "mlp", callbacks: Any = (), **settings: Any) -> Record:
    def inspect(trainer: Any) -> dict[str, Any]:
        strategy = trainer.strategy
        stats = strategy.engine.runtime.stats()
        return {
            "rounds": strategy.report(),
            "program": strategy.programs()["frame0.backward"],
            "groups": stats["reduce_groups"],
            "reductions": stats["reductions"],
        }

    return train(
        {"mlp": Shallow, "gpt_tied": gpt(tied=True)}[model],
        DeepCompileStrategy(compile=CompileConfig(region_backend="eager", **settings)),
        world_size=2,
        rank=int(os.environ["RANK"]),
        steps=11,
        accumulate=2,
        callbacks=callbacks,
        inspect=inspect,
    )


def _all(folder: str) -> dict[str, tuple[Record, ...]]:
    """Runs that must not differ: as lowered, merged by hand, by planning where latency is long, and by its file."""
    plain = [{"step": 0, "passes": ["zero3", "prefetch"]}]
    results = {
        f"{model} {when}": tuple(_fit(model, c, schedule=plain, reduce=when) for c in ([], [_Merge()]))
        for model, when in (("mlp", "every"), ("gpt_tied", "boundary"))
    }
    original, fastest = measuring.build_profile, tuner.Tuner._fastest
    measuring.build_profile = lambda *a, **k: replace(original(*a, **k), reduce=Link(1.0, 1e12))
    tuner.Tuner._fastest = lambda *_: 100.0  # type: ignore[method-assign]
    schedule_ = [*plain, {"step": 3, "passes": ["zero3", "prefetch", "fuse"]}]
    try:
        runs = [_fit(schedule=schedule_, plan=f"{folder}/plan.json") for _ in range(2)]
    finally:
        measuring.build_profile, tuner.Tuner._fastest = original, fastest  # type: ignore[method-assign]
    results["planned"] = (results["mlp every"][0], *runs)
    return results


@pytest.mark.timeout(400)
def test_reducing_together_changes_no_bit(tmp_path: Any) -> None:
    for results in run_ranks(_all, 2, str(tmp_path), timeout=380):
        for name, (plain, *merged) in results.items():
            for one in merged:
                assert plain.losses == one.losses, name
                assert all(torch.equal(plain.params[key], one.params[key]) for key in plain.params), name
                small = 4 * len(one.extra["rounds"])  # timed before a plan is made
                assert one.extra["reductions"] == plain.extra["reductions"] + small
                assert one.extra["groups"] < plain.extra["groups"]
                assert one.extra["program"].count("\n  reduce ") == 1 < plain.extra["program"].count("\n  reduce ")
        _, planned, loaded = results["planned"]
        (done,) = planned.extra["rounds"]
        assert done.outcome == "kept" and re.search(r"groups of reductions: \d+ become 1\b", done.passes[1].changed)
        assert loaded.extra["rounds"] == [] and loaded.extra["groups"] < planned.extra["groups"]
