"""A rank that runs out of memory under a plan: it finishes its step, and all ranks drop the plan together."""

from __future__ import annotations

import functools
import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import ONLY
from multiprocess import RankError, run_ranks
from test_engine import sgd
from torch import Tensor, fx, nn
from torch._inductor import inductor_prims
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.passes.keep_whole import keep_until_boundary
from lightning_deepcompile.plan.passes.unshard import keep_gathered, unshard_candidates
from lightning_deepcompile.plan.placement import Placement
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.plan.step_pass import step_pass
from lightning_deepcompile.program.extract import ExtractedRegion
from lightning_deepcompile.program.lower import RegionCompiler
from lightning_deepcompile.program.repeatable import is_repeatable
from lightning_deepcompile.program.schedule import ProgramKind, Schedule
from lightning_deepcompile.tuning.shortages import Shortage

STEPS = 36
FAILS = 12  # in which step a rank is short: the plan was made at step 5, and measured by step 8
MICRO_BATCHES = 2


class Deep(nn.Module):
    """Equal blocks, whose parameters take most of the memory."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def training_step(self, rows: Tensor) -> Tensor:
        x = rows
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.mse_loss(x, rows.roll(1, 0))


# Plans that spend all the memory that they are given ------------------------------------------------------------------


def _greedy(schedules: list[Schedule], context: PlanContext, whole: bool) -> list[Schedule]:
    profile = context.require_profile("greedy")
    for pair, group in unshard_candidates(schedules):
        keep = keep_until_boundary(schedules, *pair, group) if whole else keep_gathered(schedules, *pair, group.ids)
        schedules = keep if simulate(keep, profile).peak_bytes <= context.budget else schedules
    return schedules


def _deep(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    for ahead in (100, 2, 1, 0):
        placements = [Placement.of(schedule) for schedule in schedules]
        schedules = [p.at([max(g.need - ahead, 0) for g in p.groups]) for p in placements]
        if simulate(schedules, context.require_profile("deep")).peak_bytes <= context.budget:
            break
    return schedules


PLANS = {
    "kept": step_pass("kept", needs=["gathers", "profile"])(functools.partial(_greedy, whole=False)),
    "whole": step_pass("whole", needs=["gathers", "profile"])(functools.partial(_greedy, whole=True)),
    "deep": step_pass("deep", needs=["gathers", "profile"])(_deep),
}


class Regions(RegionCompiler):
    """Compiles regions that call `before` first, with the kind of program; as Inductor's, they empty their inputs."""

    before: Callable[[ProgramKind], None] = staticmethod(lambda kind: None)

    def __call__(self, extracted: ExtractedRegion, kind: ProgramKind) -> Any:
        run = super().__call__(extracted, kind)

        def region(inputs: list[Any]) -> Any:
            held = list(inputs)
            inputs.clear()
            self.before(kind)
            return run(held)

        return region


def planned_engine(mesh: DeviceMesh, made_by: str | None, module: nn.Module | None = None, **settings: Any) -> Engine:
    """An engine that follows one of `PLANS` from step 5 on, however fast the machine finds it."""
    schedule: list[dict[str, Any]] = [{"step": 0, "passes": ["zero3", "prefetch"]}]
    if made_by is not None:
        schedule.append({"step": 3, "passes": ["zero3", "prefetch", PLANS[made_by]]})
    config = CompileConfig(**{"region_backend": "eager", "schedule": schedule, **ONLY, **settings})
    engine = Engine(module or Deep(32, 6), mesh, config, timeout=timedelta(seconds=60))
    engine.capture.regions = Regions(config.region_backend)
    engine.tuner._fastest = lambda *_: 0.001  # type: ignore[method-assign]
    return engine


def optimizer_step(engine: Engine, rows: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """One optimizer step of `MICRO_BATCHES`; returns the losses."""
    losses = []
    optimizer.zero_grad()
    engine.timeline.drop_stale_gradients()
    for index in range(MICRO_BATCHES):
        loss = engine.run_step("training_step", rows.roll(index, 1))
        if index < MICRO_BATCHES - 1:
            with engine.accumulating():
                engine.backward(loss.backward)
        else:
            engine.backward(loss.backward)
        losses.append(loss.detach())
    optimizer.step()
    engine.parameters_changed()
    return torch.stack(losses)


def batch(rank: int = 0, width: int = 32) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(rank))


class Shortages:
    """Raises out-of-memory errors: from the calls `calls` of regions of `kind` programs, counted once it is armed."""

    def __init__(self, kind: ProgramKind, calls: set[int]) -> None:
        self.kind, self.calls, self.count, self.armed = kind, calls, 0, False

    def __call__(self, kind: ProgramKind) -> None:
        if not self.armed or kind != self.kind:
            return
        self.count += 1
        if self.count in self.calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has none.")


def _losses(engine: Engine, shortages: Shortages | None = None) -> tuple[list[list[float]], list[int], list[int]]:
    """Losses of all steps; the arena's peak, and bytes of parameters that were sent away, in each."""
    optimizer, rows = sgd(engine), batch(dist.get_rank())
    losses, peaks, away = [], [], []
    for step in range(STEPS):
        if shortages is not None:
            engine.capture.regions.before = shortages
            shortages.armed = step == FAILS
        engine.runtime.memory.free_unused()
        engine.runtime.reset_stats()
        losses.append(optimizer_step(engine, rows, optimizer).tolist())
        stats = engine.runtime.stats()
        peaks.append(stats["arena_peak_bytes"])
        away.append(stats["sent_away_bytes"])
    return losses, peaks, away


# One process ----------------------------------------------------------------------------------------------------------


def _node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return fx.Graph().call_function(target, args, kwargs)


def test_only_regions_that_compute_and_nothing_else_are_called_again() -> None:
    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention.default
    computes = [_node(aten.mm.default), _node(flash, 1, 2, 3), _node(flash, 1, 2, 3, 0.0), _node(len)]
    assert is_repeatable(computes)
    for other in (
        _node(aten.copy_.default),
        _node(aten.native_dropout.default, 1, 0.5, True),
        _node(flash, 1, 2, 3, 0.1),
        _node(flash, 1, 2, 3, dropout_p=0.1),
        _node(inductor_prims.seeds, 2),
        _node(torch.ops._c10d_functional.all_reduce.default, 1, "sum", "0"),
        _node(torch.ops.higher_order.cond),
    ):
        assert not is_repeatable([*computes, other]), other


# Two ranks ------------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[str, ProgramKind, set[int]]] = {
    "forward": ("kept", "forward", {2}),
    "exhausted": ("whole", "backward", {1, 2, 3, 4}),
}
GIVING_BACK = ["deep"]
if "TEST_ALL" in os.environ:
    CASES |= {"backward": ("whole", "backward", {3}), "twice": ("deep", "forward", {1, 2})}
    GIVING_BACK = [*PLANS]


def _train_with_shortages(folder: str) -> dict[str, Any]:
    """Everything on two ranks, of which only the second one is short of memory."""
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,)), int(os.environ["RANK"])
    plain = planned_engine(mesh, None)
    expected, _, _ = _losses(plain)
    plain.close()
    results: dict[str, Any] = {}
    for case, (plan, kind, calls) in CASES.items():
        path = Path(folder, f"{case}.json")
        engine = planned_engine(mesh, plan, plan=str(path))
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # noqa: B023
        logging.getLogger("lightning_deepcompile.tuning.tuner").addHandler(handler)
        losses, peaks, away = _losses(engine, Shortages(kind, calls) if rank == 1 else None)
        logging.getLogger("lightning_deepcompile.tuning.tuner").removeHandler(handler)
        dist.barrier()
        results[case] = {
            "equal": losses == expected,
            "rounds": engine.report(),
            "peaks": peaks,
            "away": away,
            "programs": list(engine.programs().values()),
            "file": path.read_text(),
            "warned": [text for text in messages if "ran out of memory" in text],
        }
        engine.close()
    for plan in GIVING_BACK:  # memory may go at any time, on each rank for itself
        engine = planned_engine(mesh, plan)
        engine.capture.regions.before = _give_back(engine, random.Random(rank))
        results[plan] = _losses(engine)[0] == expected
        engine.close()
    return results


def _give_back(engine: Engine, order: random.Random) -> Callable[[ProgramKind], None]:
    def before(kind: ProgramKind) -> None:
        for _ in range(order.choice([0, 0, 1, 10])):
            engine.runtime.memory.give_back()

    return before


@pytest.mark.timeout(300)
def test_a_short_rank_goes_on_and_all_ranks_plan_again_together(tmp_path: Path) -> None:
    first, second = run_ranks(_train_with_shortages, 2, str(tmp_path), timeout=280)
    for plan in GIVING_BACK:
        assert first[plan] and second[plan], plan
    for case in CASES:
        for result in (first[case], second[case]):
            assert result["equal"], case
            made, leaner, again = result["rounds"]
            assert [one.outcome for one in (made, leaner)] == ["kept", "leaner"], case
            assert again.outcome in ("kept", "unchanged"), case
            assert leaner.step == FAILS + 1, "told in the second micro-batch, read in the next step"
            assert max(leaner.budget, again.passes[-1].peak_bytes) < made.passes[-1].peak_bytes
            assert leaner.reason.startswith("Rank 1 ran out of memory in region_"), leaner.reason
            assert "2.00 GiB were asked for" in leaner.reason and f"From step {FAILS + 1} on: " in leaner.reason
            for part in (slice(FAILS + 1, FAILS + 9), slice(-4, None)):
                assert max(result["peaks"][part]) < max(result["peaks"][FAILS - 2 : FAILS]), case
            assert json.loads(result["file"])["programs"], "the plan that failed is not what the next run finds"
        assert not any(first[case]["away"])
        assert first[case]["programs"] == second[case]["programs"]
        assert first[case]["warned"] == [first[case]["rounds"][1].reason] and second[case]["warned"] == []
    gone = second["exhausted"]["away"]
    assert gone[FAILS] == sum(gone) > 0, "kept parameters went to host memory, in one step"


def _train_without_hope() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    engine = planned_engine(init_device_mesh("cpu", (2,)), "kept")
    _losses(engine, Shortages("backward", set(range(1, 1000))) if os.environ["RANK"] == "1" else None)


def test_a_shortage_that_nothing_helps_is_an_error_that_says_what_was_tried() -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(_train_without_hope, 2, timeout=100)
    assert "Tried to allocate 2.00 GiB" in str(failure.value)
    assert "It gave back what it could do without (" in str(failure.value)


def _train_with_states() -> tuple[list[list[float]], list[list[float]], list[int], list[Any]]:
    """Losses without and with a shortage, bytes of states in host memory after each step, and the report."""
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,)), int(os.environ["RANK"])
    results: list[list[list[float]]] = []
    for plan, offload in ((None, "none"), ("kept", "auto")):
        # With more memory, states stay in any case.
        engine = planned_engine(mesh, plan, offload=offload, memory_budget="120kB")
        optimizer = torch.optim.AdamW(engine.module.parameters(), 1e-2)
        engine.attach_optimizer(optimizer)
        losses, away = [], []
        for step in range(STEPS):
            if offload != "none" and rank == 1:
                engine.capture.regions.before = shortages = Shortages("forward", {2})
                shortages.armed = step == FAILS
            losses.append(optimizer_step(engine, batch(rank), optimizer).tolist())
            away.append(engine.summary().offloaded_bytes)
        results.append(losses)
        rounds = engine.report()
        engine.close()
    return *results, away, rounds


def test_the_next_plan_has_optimizer_states_in_host_memory() -> None:
    for expected, losses, away, (made, leaner, again) in run_ranks(_train_with_states, 2, timeout=100):
        assert losses == expected
        assert [one.outcome for one in (made, leaner, again)] == ["kept", "leaner", "kept"]
        states = 2 * 6 * 32 * 32 * 4 // 2  # two of each weight, a half on each rank
        assert away[: again.step] == [0] * again.step and 0 < away[again.step] <= states, away
        assert again.passes[-1].peak_bytes <= leaner.budget


def test_what_no_move_frees_has_the_step_traced_again(mesh: DeviceMesh, fresh_dynamo: None) -> None:
    rows = batch()
    results = []
    for relieved in (0, 1 << 20):
        engine = planned_engine(mesh, "kept", rounding="needed")
        optimizer, losses = sgd(engine), []
        for step in range(16):
            if step == FAILS and relieved:
                engine.tuner._retry._shortages.append(Shortage(0, "frame0.forward", "region_1", "", relieved=relieved))
            losses.append(optimizer_step(engine, rows, optimizer))
        results.append(torch.stack(losses))
        rounds = engine.report()
        engine.close()
    made, leaner = rounds
    assert (made.outcome, leaner.outcome, leaner.step) == ("kept", "leaner", FAILS + 1)
    assert leaner.reason.endswith("cheap operators recomputed."), leaner.reason
    assert engine.capture.tracing.sparing
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=0)


def test_a_plan_out_of_a_file_that_fails_is_replaced_there(mesh: DeviceMesh, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for run in range(3):
        engine = planned_engine(mesh, "kept", plan=str(path))
        optimizer, shortages = sgd(engine), Shortages("forward", {2})
        engine.capture.regions.before = shortages
        for step in range(20):
            shortages.armed = run == 1 and step == 10
            optimizer_step(engine, batch(), optimizer)
        programs = [text.partition("\n")[2] for text in engine.programs().values()]
        if run == 1:
            (done,) = engine.report()
            assert done.outcome == "leaner" and done.step == 11
            lean = programs
        elif run == 2:
            assert engine.report() == [] and programs == lean
        else:
            failed = programs
        engine.close()
    assert lean != failed


def test_reports_say_why_a_plan_was_replaced() -> None:
    from lightning_deepcompile.plan.report import Round

    done = Round(24, (), 7, 0.1, 0.0, outcome="leaner", reason="Rank 1 ran out of memory.")
    assert str(done).startswith("plan at step 24 (leaner)\n  Rank 1 ran out of memory.\n")
    assert "Rank 1" not in str(replace(done, reason=""))
