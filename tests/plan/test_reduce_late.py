"""Gradients of accumulated micro-batches that travel once per optimizer step: because the user or planning says so."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import ONLY, Record, assert_same_training, gpt, train
from hypothesis import given, settings
from hypothesis import strategies as st
from multiprocess import run_ranks
from test_engine import TOKENS, make_engine, one_step, sgd
from test_freshness import Shallow
from test_passes import Shape, _full, _program, _run, shapes
from test_simulate import SIZE, compute, profile, reduce, schedule
from torch.distributed.device_mesh import DeviceMesh
from tracing import Simulator

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.plan.arena import ArenaModel
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import Contention, Link, Profile
from lightning_deepcompile.plan.known_passes import resolve_passes
from lightning_deepcompile.plan.optimize import apply_passes
from lightning_deepcompile.plan.passes.reduce_late import place_reductions, reduce_late
from lightning_deepcompile.plan.plan_file import Setting, write_plan
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.program.printer import format_program
from lightning_deepcompile.program.program import collective_sequence
from lightning_deepcompile.program.reschedule import reschedule
from lightning_deepcompile.program.schedule import Instruction
from lightning_deepcompile.tuning import measuring, tuner

LIMIT = timedelta(seconds=60)  # a collective that takes longer is named by the watchdog
MODELS = {"mlp": Shallow, "gpt_tied": gpt(tied=True, layers=1)}
ACCUMULATE, STEPS = 3, 11  # a round of planning, that profiles step 3, and two steps more
PASSES = [{"step": 0, "passes": ["zero3", "prefetch"]}, {"step": 3, "passes": ["zero3", "prefetch", "reduce_late"]}]

# Schedules ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(shape=shapes(), data=st.data())
def test_gradients_may_wait_for_the_boundary_or_not(shape: Shape, data: st.DataObject) -> None:
    """Two micro-batches: the same sums; those that wait travel once."""
    shape = replace(shape, kind="backward")
    passes = resolve_passes(["zero3"], profiled=False)
    program, late = (apply_passes(_program(shape), PlanSettings(reduce=r), passes) for r in ("every", "boundary"))
    assert program.schedule.structure == late.schedule.structure, "a plan fits both"
    ids = {k for grads in shape.grads for k in grads}
    waiting = data.draw(st.sets(st.sampled_from(sorted(ids)))) if ids else set()
    groups = [i.ids for i in program.schedule.instructions if i.op == "reduce"]
    waiting = {k for group in groups if waiting.intersection(group) for k in group}
    (schedule,) = place_reductions([program.schedule], "reduce_at_boundary", waiting)
    mixed = reschedule(late, schedule, "mixed")
    assert mixed.schedule.instructions == schedule.instructions
    lines = [line for line in format_program(mixed).splitlines() if line.startswith("  reduce")]
    assert [line.startswith("  reduce at boundary ") for line in lines] == [bool({*g} & waiting) for g in groups]
    assert (collective_sequence(mixed) == collective_sequence(program)) == (not waiting)

    simulator = Simulator(_full(), boundary=False, gathered={k: _full()[k] for k in shape.kept})
    run = simulator.generate(mixed)
    for boundary in (False, True):
        simulator.boundary = boundary
        for k in shape.kept:
            simulator.gathered[k] = _full()[k].clone()
        run([*(torch.zeros(1) for _ in range(len(_full()))), torch.ones(2)])
        assert set(simulator.held) == (set() if boundary else waiting)
    assert simulator.reductions == {k: 1 if k in waiting else 2 for k in ids}
    reference = _run(program, shape.kept)[1]
    assert all(torch.equal(simulator.grads[k], 2 * reference.grads[k]) for k in ids)


def test_reduce_late_holds_as_many_gradients_as_there_is_memory_for() -> None:
    """A second for a region, two for a reduction that nothing hides, a quarter to add a gradient to its sum."""
    parts = [part for k in range(3) for part in (compute(k), reduce(k))]
    step = [schedule("forward", compute(9)), schedule("backward", *parts, Instruction("end"))]
    base = profile(step, micro_batches=4, hold_seconds=0.25 / SIZE, reduce_window=0)
    least = simulate(step, base).peak_bytes
    auto = PlanSettings(reduce="auto", rounding="any")
    # Sums are a kilobyte each. What a region takes includes the shards of gradients, half as much each, which are not
    # there before reductions: with the first of these all sums are there, and one shard. A region's peak is 10 higher.
    # The buffer from which gradients are added to those of other micro-batches is there until no micro-batch but the
    # last reduces: the third sum takes less than it.
    arriving = ArenaModel().acquire(SIZE // 2).capacity
    for count, held, third in ((0, 0, 0), (1, SIZE - 10, 0), (3, 2 * SIZE - SIZE // 2 - 10, SIZE // 2 - arriving)):
        result = reduce_late(step, PlanContext(auto, replace(base, budget=least + held)))
        late = [result[1].instructions[position].ids for position in result[1].at("reduce_at_boundary")]
        assert late == [(2,), (1,), (0,)][:count][::-1], "of equally good ones those that are reduced last"
        prediction = simulate(result, base)
        # Three of four reductions go, and four additions come.
        assert prediction.seconds == pytest.approx(4 * (1 + 3 * (1 + 2)) - count * (3 * 2 - 4 * 0.25))
        assert prediction.peak_bytes == least + held + third
    # Sums in another dtype take twice the memory, and a buffer to cast them and their results.
    double, needed = replace(base, hold_ratio=2.0), least + 2 * SIZE + 2 * SIZE - 10
    assert reduce_late(step, PlanContext(auto, replace(double, budget=needed - 1))) == step
    assert reduce_late(step, PlanContext(auto, replace(double, budget=needed))) != step
    # Without consent, measurements, further micro-batches or any gain, everything stays.
    for context in (
        PlanContext(profile=base),
        PlanContext(PlanSettings(reduce="boundary"), base),
        PlanContext(auto, replace(base, hold_seconds=None)),
        PlanContext(auto, replace(base, micro_batches=1)),
        PlanContext(auto, replace(base, hold_seconds=1.5 / SIZE)),
    ):
        assert reduce_late(step, context) == step
    # What is hidden beside compute costs nothing but what it takes from compute.
    hidden = replace(base, reduce=Link(0.0, SIZE / 2 / 0.5), reduce_window=9, hold_seconds=0.125 / SIZE)
    (_, backward) = reduce_late(step, PlanContext(auto, hidden))
    assert [backward.instructions[p].ids for p in backward.at("reduce_at_boundary")] == [(2,)]
    (_, backward) = reduce_late(step, PlanContext(auto, replace(hidden, contention=Contention(2.0, 2.0))))
    assert backward.at("reduce") == []


def _large(*ids: int) -> Instruction:
    """A mebibyte each: of less, the alignment of buffers is a large part."""
    return replace(reduce(*ids), sizes=(1 << 20,) * len(ids))


def test_gradients_of_one_parameter_wait_together_or_not_at_all() -> None:
    parts = [compute(0), _large(0, 1), compute(1), _large(2), compute(2), _large(1), Instruction("end")]
    step = [schedule("forward", compute(9)), schedule("backward", *parts)]
    base = replace(profile(step, micro_batches=2, hold_seconds=0.0, reduce_window=0), world_size=4)
    least = simulate(step, base).peak_bytes
    for room, expected in ((1.6, [(2,)]), (3.0, [(0, 1), (2,), (1,)])):
        budget = least + int(room * (1 << 20))
        (_, backward) = reduce_late(
            step, PlanContext(PlanSettings(reduce="auto", rounding="any"), replace(base, budget=budget))
        )
        assert [backward.instructions[p].ids for p in backward.at("reduce_at_boundary")] == expected


# One rank -------------------------------------------------------------------------------------------------------------


def test_a_plan_file_is_followed_as_far_as_the_user_lets_it(mesh: DeviceMesh, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    engine = make_engine(mesh, rounding="any")
    one_step(engine, TOKENS, sgd(engine))
    step = [e.program.schedule for e in engine.capture.frames.executables]
    engine.close()
    ids = step[1].instructions[step[1].at("reduce")[0]].ids
    found = {}
    choices: dict[str, dict[str, Any]] = {when: {"reduce": when} for when in ("every", "boundary")}
    for wanted, chosen in {"none": {}, **choices, "any": {"rounding": "any"}}.items():
        setting = Setting(1, 3, "cpu", rounding=chosen.get("rounding", "same"))
        path.write_text(write_plan(place_reductions(step, "reduce_at_boundary", ids), setting))
        engine = make_engine(mesh, **chosen, plan=str(path))
        one_step(engine, TOKENS, sgd(engine))
        backward = engine.capture.frames.executables[1].program
        assert "plan" in backward.history
        found[wanted] = [len(backward.schedule.at(op)) for op in ("reduce", "reduce_at_boundary")]
        engine.close()
    groups = len(step[1].at("reduce"))
    assert found == {"none": [groups, 0], "every": [groups, 0], "boundary": [0, groups], "any": [groups - 1, 1]}


def test_only_what_is_planned_can_be_auto() -> None:
    settings_ = {when: CompileConfig(reduce=when) for when in ("every", "boundary", None)}
    settings_ |= {"any": CompileConfig(rounding="any"), "fixed": CompileConfig(reduce="every", rounding="any")}
    assert {k: [c.reduction(stage) for stage in (1, 2, 3)] for k, c in settings_.items()} == {
        "every": ["every"] * 3,
        "boundary": ["boundary"] * 3,
        "any": ["boundary", "every", "auto"],
        "fixed": ["every"] * 3,
        None: ["boundary", "every", "every"],
    }
    with pytest.raises(ValueError, match=r"CompileConfig\(reduce='late'\): use 'every', 'boundary' or None"):
        CompileConfig(reduce="late")


# Two ranks ------------------------------------------------------------------------------------------------------------


class _Counts(pl.Callback):
    """Counts the gradients that each micro-batch reduced."""

    def __init__(self) -> None:
        self.reductions: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        strategy = trainer.strategy
        small = 4 * len(strategy.report())  # timed before a plan is made
        self.reductions.append(strategy.engine.runtime.stats()["reductions"] - small)

    def by_step(self) -> list[list[int]]:
        counts = [after - before for before, after in itertools.pairwise([0, *self.reductions])]
        return [counts[start : start + ACCUMULATE] for start in range(0, len(counts), ACCUMULATE)]


def _fit(model: str, stage: int = 3, accelerator: str = "cpu", **settings_: Any) -> Record:
    counts = _Counts()

    def inspect(trainer: pl.Trainer) -> dict[str, Any]:
        strategy = trainer.strategy
        return {
            "counts": counts.by_step(),
            "profile": strategy.profile(),
            "rounds": strategy.report(),
            "programs": strategy.programs(),
        }

    return train(
        MODELS[model],
        DeepCompileStrategy(
            stage=stage, timeout=LIMIT, compile=CompileConfig(region_backend="eager", **{**ONLY, **settings_})
        ),
        world_size=2,
        rank=int(os.environ["RANK"]),
        accumulate=ACCUMULATE,
        steps=STEPS,
        callbacks=[counts],
        inspect=inspect,
        accelerator=accelerator,
    )


def _train_all(runs: list[tuple[int, str | None]]) -> dict[Any, Record]:
    return {(stage, reduce): _fit("gpt_tied", stage, reduce=reduce) for stage, reduce in runs}


@pytest.mark.timeout(300)
def test_it_changes_how_often_gradients_travel_and_nothing_else() -> None:
    runs = [(3, None), (3, "boundary"), (1, "every")] + [(2, "boundary")] * ("TEST_ALL" in os.environ)
    expected = train(MODELS["gpt_tied"], "auto", world_size=1, rank=0, data_world=2, accumulate=ACCUMULATE, steps=STEPS)
    for results in run_ranks(_train_all, 2, runs, timeout=250):
        for (stage, when), record in results.items():
            assert_same_training(record, expected, params=True)
            for counts in record.extra["counts"]:
                early = 0 if when == "boundary" else counts[-1]
                assert counts[-1] > 0 and counts == [early, early, counts[-1]], (stage, when)
        often = results[3, None].extra["profile"]
        assert often.hold_seconds is None and often.accumulates
        late = results[3, "boundary"].extra
        assert late["profile"].hold_seconds > 0 and late["profile"].reduce.bandwidth > 0
        assert len(late["rounds"]) == 1 and late["rounds"][0].after_seconds is not None


def _plan_all(accelerator: str) -> dict[str, Record]:
    """Runs whose profile says that reductions are slow, and whose plans measure as the name says."""
    original, fastest = measuring.build_profile, tuner.Tuner._fastest

    def slow(*args: Any, **kwargs: Any) -> Profile:
        return replace(original(*args, **kwargs), reduce=Link(1.0, 1e6))

    def measured(*times: float) -> None:
        sequence = iter(times)
        tuner.Tuner._fastest = lambda *_: next(sequence)  # type: ignore[method-assign]

    measuring.build_profile = slow
    settings_ = {"accelerator": accelerator, "schedule": PASSES, "rounding": "any"}
    try:
        results = {}
        measured(100.0, 100.0)
        results["planned"] = _fit("mlp", **settings_)
        measured(100.0, 1000.0)
        results["slower"] = _fit("mlp", **settings_)
        measured(100.0)
        results["every"] = _fit("mlp", **{**settings_, "reduce": "every"})
    finally:
        measuring.build_profile, tuner.Tuner._fastest = original, fastest  # type: ignore[method-assign]
    return results


@pytest.mark.timeout(300)
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_planning_changes_it_between_two_optimizer_steps_and_takes_it_back(accelerator: str) -> None:
    results = run_ranks(_plan_all, 2, accelerator, timeout=280)
    expected = train(
        MODELS["mlp"], "auto", world_size=1, rank=0, data_world=2, accumulate=ACCUMULATE, steps=STEPS,
        accelerator=accelerator,
    )  # fmt: skip
    # Ranks communicate alike; what they compute again in backward is each rank's own choice, so operators may differ.
    ours, others = (re.sub(r"\d+ ops", "ops", str(result["planned"].extra["programs"])) for result in results)
    assert ours == others
    for result in results:
        often = result["every"].extra["counts"][0]
        once = [0, 0, often[-1]]
        late = {"planned": range(5, STEPS), "slower": range(5, 9), "every": ()}
        for name, record in result.items():
            counts = [once if step in late.get(name, ()) else often for step in range(len(record.extra["counts"]))]
            assert record.extra["counts"] == counts, name
            assert_same_training(record, expected, params=True)
        (planned,), (slower,) = (result[name].extra["rounds"] for name in ("planned", "slower"))
        before, after = planned.passes
        assert (before.name, after.name, planned.outcome) == ("zero3 -> prefetch", "reduce_late", "kept")
        assert after.changed.startswith("gradients reduced at the boundary: 0 become ")
        assert after.step_seconds < before.step_seconds and after.peak_bytes > before.peak_bytes
        assert "reduce_late" in str(planned) and after.changed in str(planned)
        assert "  reduce at boundary " in result["planned"].extra["programs"]["frame0.backward"]
        assert slower.outcome == "reverted"
        assert "at boundary" not in result["slower"].extra["programs"]["frame0.backward"]
