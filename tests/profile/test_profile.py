"""Measuring, planning and swapping while a model trains: on one rank, and on two with gloo."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from cases import CASES, Record, train
from multiprocess import run_ranks
from shuffle import Shuffle
from test_engine import TOKENS, Net, make_engine, one_step, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.plan.budget import MemoryBudgetError
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.known_passes import resolve_passes
from lightning_deepcompile.plan.passes.keep_whole import keep_until_boundary
from lightning_deepcompile.plan.passes.unshard import keep_gathered, unshard_candidates
from lightning_deepcompile.plan.placement import Placement
from lightning_deepcompile.plan.plan_file import PLAN_VERSION
from lightning_deepcompile.plan.simulate import arena_bytes
from lightning_deepcompile.plan.step_pass import step_pass
from lightning_deepcompile.tuning.tuner import Tuner

PLANNED = ["zero3", "prefetch", "fuse", "unshard", "keep_whole", "proactive_prefetch"]
EARLY = [{"step": 0, "passes": ["zero3", "prefetch"]}, {"step": 3, "passes": PLANNED}]
ROUND = 3 + 6 + 1  # steps until a round that profiles step 3 is over


def make_planner(mesh: Any, **settings: Any) -> tuple[Engine, torch.optim.Optimizer]:  # noqa: F811
    engine = make_engine(mesh, schedule=EARLY, **settings)
    return engine, sgd(engine)


# One rank -------------------------------------------------------------------------------------------------------------


def test_a_round_profiles_plans_swaps_and_measures(mesh: Any, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    engine, optimizer = make_planner(mesh)
    plain = make_engine(mesh, schedule=EARLY[:1])
    plain_optimizer = sgd(plain)
    with caplog.at_level(logging.INFO, "lightning_deepcompile.tuning.tuner"):
        for step in range(ROUND + 1):
            assert one_step(engine, TOKENS, optimizer) == one_step(plain, TOKENS, plain_optimizer), f"step {step}"
    (done,) = engine.report()
    assert done.step == 5 and done.outcome in ("kept", "reverted", "unchanged")
    assert [p.name for p in done.passes] == ["zero3 -> prefetch", *PLANNED[2:]]
    assert all(p.step_seconds > 0 and p.peak_bytes > 0 for p in done.passes)
    assert done.before_seconds > 0 and (done.outcome == "unchanged" or done.after_seconds > 0)
    assert "Measuring steps 3 and 4" in caplog.text and "step 5" in caplog.text and "ms a step" in caplog.text
    assert engine.capture.regions.compiled == plain.capture.regions.compiled, "nothing is compiled again"
    profile = engine.tuner.profile
    assert profile is not None and Profile.from_json(profile.to_json()) == profile
    assert profile.micro_batches == 1 and {s.kind for s in profile.schedules} == {"forward", "backward"}
    assert plain.report() == []
    engine.close()
    plain.close()


def test_unprofiled_steps_run_the_code_that_they_always_ran(mesh: Any) -> None:  # noqa: F811
    engine, optimizer = make_planner(mesh)
    marked, isolated = [], []
    for _ in range(ROUND + 1):
        one_step(engine, TOKENS, optimizer)
        isolated.append(engine.tuner.isolates)
        code = [e._run.__code__.co_names for e in engine.capture.frames.executables]
        marked.append(any("mark" in names for names in code))
    assert marked == [step in (3, 4, 8) for step in range(ROUND + 1)], "the last one for the report"
    # What was gathered for the old programs is not the new one's. (A plan that turns out slower is taken back later.)
    assert isolated[:7] == [step in (4, 5) for step in range(7)]
    engine.close()


def test_gathered_parameters_take_the_memory_that_the_simulator_says(mesh: Any) -> None:  # noqa: F811
    engine = make_engine(mesh, schedule=EARLY[:1], memory_budget="1GiB")  # without one, a single rank gathers nothing
    optimizer = sgd(engine)
    shuffle = Shuffle()
    one_step(engine, TOKENS, optimizer)
    for _ in range(8):
        step = shuffle.swap(engine.capture)
        engine.runtime.memory.free_unused()
        engine.runtime.reset_stats()
        one_step(engine, TOKENS, optimizer)
        assert engine.runtime.stats()["arena_peak_bytes"] == max(max(points) for points in arena_bytes(step))
    engine.close()


def test_a_slower_plan_is_taken_back(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    engine, optimizer = make_planner(mesh)
    times = iter([0.001, 1.0])
    monkeypatch.setattr(type(engine.tuner), "_fastest", lambda *_: next(times))
    for step in range(ROUND + 1):
        if step == 3:
            before = engine.programs()
        if step == 5:
            _force_another_plan(engine)
        one_step(engine, TOKENS, optimizer)
    (done,) = engine.report()
    assert done.outcome == "reverted" and done.after_seconds == 1.0
    assert engine.programs() == before
    engine.close()


def _force_another_plan(engine: Engine) -> None:
    @step_pass("late", needs=["gathers"])
    def late(schedules: Any, context: Any) -> Any:
        placements = [Placement.of(s) for s in schedules]
        return [p.at([g.need for g in p.groups]) for p in placements]

    engine.tuner._agenda.passes = resolve_passes(["zero3", "prefetch", late], profiled=True)


def test_a_profile_that_fails_is_reported_and_tried_again_a_few_times(
    mesh: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, optimizer = make_planner(mesh)
    monkeypatch.setattr(type(engine.tuner), "_measured", lambda *_: {}["broken"])
    before = [one_step(engine, TOKENS, optimizer) for _ in range(3)]
    programs = engine.programs()
    losses = [one_step(engine, TOKENS, optimizer) for _ in range(90)]
    assert losses[-1] < before[0] and engine.programs() == programs
    assert caplog.text.count("No plan was made at step") == 3
    assert "rank 0: KeyError: 'broken'" in caplog.text and engine.report() == []
    engine.close()


def test_running_out_of_memory_under_a_plan_says_what_limits_it(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    engine, optimizer = make_planner(mesh)
    monkeypatch.setattr(type(engine.tuner), "_fastest", lambda *_: 0.001)
    error = torch.OutOfMemoryError("no memory")
    for step in range(ROUND + 1):
        if step == 5:
            engine.tuner.note_memory(error)
            assert not hasattr(error, "__notes__"), "there is no plan yet"
            _force_another_plan(engine)
        one_step(engine, TOKENS, optimizer)
    engine.tuner.note_memory(ValueError())
    engine.tuner.note_memory(error)
    (note,) = error.__notes__
    assert note.startswith("Since step 5 a plan") and "memory_budget" in note
    engine.close()


def test_a_budget_that_nothing_fits_states_what_would(mesh: Any) -> None:  # noqa: F811
    engine, optimizer = make_planner(mesh, memory_budget="1000B")
    with pytest.raises(MemoryBudgetError, match=r"allows 1000 bytes.* needs? \d+ "):
        for _ in range(ROUND):
            one_step(engine, TOKENS, optimizer)
    engine.close()


def test_a_budget_that_steps_break_is_planned_for_again(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    budget = 1 << 20
    peaks = iter([budget + 2048, budget])  # a device whose steps take memory that the simulator knows nothing of
    monkeypatch.setattr(Tuner, "_peak", lambda _: next(peaks))
    monkeypatch.setattr(Tuner, "_fastest", lambda *_: 1.0)
    engine, optimizer = make_planner(mesh, memory_budget=f"{budget}B")
    budgets = set()
    for step in range(3 * ROUND):
        if step == 5:
            _force_another_plan(engine)
        one_step(engine, TOKENS, optimizer)
        budgets.add(engine.tuner.profile.budget if engine.tuner.profile else budget)
    margin = budget // 256
    assert len(engine.report()) == 2  # the second may change nothing
    assert budgets == {budget, budget - margin, budget - margin - 2048}
    engine.close()


@pytest.mark.parametrize("length", [7, 36])
def test_other_shapes_have_the_plan_of_the_nearest_program_at_once(mesh: Any, length: int) -> None:  # noqa: F811
    torch._dynamo.reset()  # which remembers, across engines, that this size varies
    engine, optimizer = make_planner(mesh)
    for step in range(ROUND):
        if step == 5:
            _force_another_plan(engine)
        one_step(engine, TOKENS, optimizer)
    planned = bool(engine.capture.scheduling.plan)  # a busy machine may have taken the plan back
    one_step(engine, torch.arange(2 * length).reshape(2, length) % 16, optimizer)
    assert ("plan" in engine.capture.frames.executables[-1].program.history) == planned
    engine.close()


def test_plan_files(  # noqa: F811
    mesh: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plans" / "plan.json"
    caplog.set_level(logging.INFO, "lightning_deepcompile")
    engine, optimizer = make_planner(mesh, plan=str(path))
    for step in range(ROUND):
        if step == 5:
            _force_another_plan(engine)
        one_step(engine, TOKENS, optimizer)
    engine.close()
    if engine.report()[0].outcome == "reverted":  # a busy machine: there is nothing to save
        return
    programs = engine.programs()
    strip = {name: text.partition("\n")[2] for name, text in programs.items()}

    assert f"The plan is written to {str(path)!r}" in caplog.text

    # The next run starts with it, profiles nothing, and trains alike.
    second, optimizer = make_planner(mesh, plan=str(path))
    losses = [one_step(second, TOKENS, optimizer) for _ in range(ROUND)]
    assert {name: text.partition("\n")[2] for name, text in second.programs().items()} == strip
    assert second.report() == [] and losses[-1] < losses[0]
    second.close()
    assert f"Training starts with the plan {str(path)!r}" in caplog.text and "replaced by" not in caplog.text

    # Another shape is another program: the plan does not cover it, and the run plans for itself.
    third, optimizer = make_planner(mesh, plan=str(path))
    for _ in range(2 + ROUND + 2):
        one_step(third, TOKENS[:, :6], optimizer)
    assert len(third.report()) == 1
    third.close()
    if third.report()[0].outcome != "reverted":
        assert f"The plan {str(path)!r} was for another model, or for other shapes: replaced" in caplog.text

    # So is a model with one more module, whose parameters have other numbers.
    plain_init = Net.__init__

    def with_another(module: Net) -> None:
        plain_init(module)
        module._modules = {"another": nn.Linear(3, 3), **module._modules}

    with monkeypatch.context() as patch:
        patch.setattr(Net, "__init__", with_another)
        changed, optimizer = make_planner(mesh, plan=str(path))
        one_step(changed, TOKENS, optimizer)
        assert not any("plan" in executable.program.history for executable in changed.capture.frames.executables)
        changed.close()

    # Damaged and foreign plans are refused with the reason, and training goes on.
    text = path.read_text()
    with_kept = re.sub(r'"kept": \[[^]]*\]', '"kept": [true]', text, count=1)
    for broken, reason in [
        ("{", "it is no JSON"),
        ("{}", "it has no `version`"),
        (text.replace(f'"version": {PLAN_VERSION}', '"version": 99'), "it has version 99"),
        (text.replace('"states": null', '"states": {"away": -1, "slots": 3}'), "optimizer states in"),
        (text.replace('"states": null', '"states": {"away": 0}'), "it is damaged (states.slots is missing)"),
        (text.replace('"fewest": ', '"fewest": -'), "it was made for Batches"),
        (text.replace('"world_size": 1', '"world_size": 64'), "'world_size': 64"),
        (text.replace('"stage": 3', '"stage": 1'), "'stage': 1"),
        (text.replace('"memory_budget": null', '"memory_budget": 64'), "'memory_budget': 64"),
        (text.replace('"rounding": "same"', '"rounding": "any"'), "'rounding': 'any'"),
        (
            text.replace('"chunked_mlps": 0', '"chunked_mlps": true'),
            "tracing.chunked_mlps is True; expected an integer",
        ),
        (text.replace('"chunked_mlps": 0', '"chunked_mlps": -1'), "it has a step traced by"),
        (text.replace('"tracing"', '"traced"'), "it is damaged (there is no 'tracing')"),
        (text.replace('"instructions"', '"instruction"'), "has no field 'instruction'"),
        (text.replace('"op": "gather"', '"op": "wait"'), "it is damaged"),
        (text.replace('"op": "gather"', '"op": "get"'), ".op is 'get'; expected one of 'gather'"),
        (with_kept.replace('"kept": [true', '"kept": ["a"'), ".kept[0] is 'a'; expected an integer"),
        (with_kept, ".kept[0] is True; expected an integer"),
        (text.replace('"programs": {', '"programs": {"a": 3, '), "programs.a is 3; expected a mapping"),
        ("[" * 100_000, "it is no JSON (maximum recursion depth"),
    ]:
        path.write_text(broken)
        caplog.clear()
        engine, optimizer = make_planner(mesh, plan=str(path))
        assert reason in caplog.text and "is not used" in caplog.text
        if broken == "{":
            one_step(engine, TOKENS, optimizer)
        engine.close()

    # So is one that the system does not let us look at; one that cannot be written costs nothing but the plan.
    for place, reason in [(tmp_path / ("x" * 300), "File name too long"), (path / "plan.json", "could not be written")]:
        caplog.clear()
        engine, optimizer = make_planner(mesh, plan=str(place))
        one_step(engine, TOKENS, optimizer)
        engine.tuner._save()
        assert reason in caplog.text and str(place) in caplog.text
        one_step(engine, TOKENS, optimizer)
        engine.close()


def test_configured_passes_are_checked_when_the_engine_is_made(mesh: Any) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="there is no pass 'zero4'"):
        make_engine(mesh, schedule=[{"step": 0, "passes": ["zero4"]}])
    for schedule, message in [
        ([{"step": 1, "passes": []}], "must be of step 0"),
        ([{"step": 0}], "should be like"),
        ([{"step": 0, "passes": ["zero3"]}, {"step": 2, "passes": ["zero3"]}], "must be 3 or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            CompileConfig(schedule=schedule)
    assert CompileConfig(plan="auto").in_folder("root").plan == str(Path("root", "deepcompile_plan.json"))
    assert CompileConfig(plan="mine.json").in_folder("root").plan == "mine.json"
    for budget in (0, -1, 1.5, "24 bananas", True, "GiB"):
        with pytest.raises(ValueError, match="memory_budget"):
            CompileConfig(memory_budget=budget)


# Numbers --------------------------------------------------------------------------------------------------------------


def test_what_is_kept_until_the_boundary_travels_once_a_step(mesh: Any) -> None:  # noqa: F811
    losses, gathers, held = [], [], []
    for keep in (False, True):
        engine = make_engine(mesh, schedule=EARLY[:1])
        optimizer = sgd(engine)
        for step in range(3):
            if step == 1 and keep:
                plan = [e.program.schedule for e in engine.capture.frames.executables]
                for group in [i for i in plan[0].instructions if i.op == "gather"]:
                    plan = keep_until_boundary(plan, 0, 1, group)
                engine.capture.scheduling.replan(plan=plan)
            optimizer.zero_grad()
            for last in (False, False, True):
                before = engine.runtime.stats()["gathers"]
                with contextlib.nullcontext() if last else engine.accumulating():
                    loss = engine.run_step("training_step", TOKENS)
                    engine.backward(loss.backward)
                losses.append(float(loss))
                gathers.append(engine.runtime.stats()["gathers"] - before)
            held.append(engine.runtime.stats()["arena_bytes"])
            optimizer.step()
            engine.parameters_changed()
        engine.close()
    half = len(losses) // 2
    assert losses[:half] == losses[half:]
    assert held[:3] == held[3:], "nothing more is left gathered while the optimizer steps"
    parameters = gathers[half + 3]
    assert gathers[half + 3 :] == [parameters, 0, 0] * 2 and min(gathers[:half]) > parameters


# Two ranks ------------------------------------------------------------------------------------------------------------


def _train_on_two() -> dict[str, tuple[Record, ...]]:
    def run(
        name: str, schedule: list[dict[str, Any]], steps: int, callbacks: list[pl.Callback], accumulate: int = 1
    ) -> Record:
        return train(
            CASES[name],
            DeepCompileStrategy(compile=CompileConfig(region_backend="eager", schedule=schedule)),
            world_size=int(os.environ["WORLD_SIZE"]),
            rank=int(os.environ["RANK"]),
            steps=steps,
            accumulate=accumulate,
            callbacks=callbacks,
            inspect=lambda trainer: trainer.strategy.report(),
        )

    name = "graph_break"
    results = {name: tuple(run(name, schedule, ROUND + 1, [], 2) for schedule in (EARLY[:1], EARLY))}
    for accumulate in (3, 1) if "TEST_ALL" in os.environ else (3,):
        plain, shuffled = (run("gpt_tied", EARLY[:1], 6, callbacks, accumulate) for callbacks in ([], [Shuffle()]))
        results[f"shuffled {accumulate}"] = (plain, shuffled)
    return results


@pytest.mark.timeout(400)
def test_no_schedule_changes_a_bit_or_hangs() -> None:
    for results in run_ranks(_train_on_two, 2, timeout=300):
        for name, (plain, planned) in results.items():
            assert plain.losses == planned.losses, name
            assert all(torch.equal(plain.params[key], planned.params[key]) for key in plain.params), name
            assert plain.extra == []
            if not name.startswith("shuffled"):
                (done,) = planned.extra
                assert done.outcome in ("kept", "reverted", "unchanged"), done


def _lengths_that_differ() -> tuple[list[list[float]], list[int]]:
    """Losses without and with a plan that keeps everything for backward, while each rank meets other lengths."""
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,)), int(os.environ["RANK"])
    losses: list[list[float]] = [[], []]
    gathers = []
    for planned in (False, True):
        torch._dynamo.reset()
        engine = make_engine(mesh)
        optimizer = sgd(engine)
        for step, lengths in enumerate([(12, 12), (12, 9), (7, 12), (12, 7), (5, 12), (11, 4)]):
            if step == 2 and planned:
                plan = [e.program.schedule for e in engine.capture.frames.executables[:2]]
                for pair, group in unshard_candidates(plan):
                    plan = keep_gathered(plan, *pair, group.ids)
                engine.capture.scheduling.replan(plan=plan)
            losses[planned].append(one_step(engine, TOKENS[:, : lengths[rank]], optimizer))
        gathers.append(engine.runtime.stats()["gathers"])
        engine.close()
    return losses, gathers


def test_ranks_that_meet_other_shapes_follow_one_plan() -> None:
    for (plain, planned), (before, after) in run_ranks(_lengths_that_differ, 2):
        assert plain == planned
        assert after < before
