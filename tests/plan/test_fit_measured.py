"""Optimizer states compete with plans for memory: decisions computed by hand, and training that does not notice."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import ONLY, Tokens, full
from multiprocess import run_ranks
from test_offload_states import CASES, ROWS, WORLD, Model
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.plan.costs import Contention, Link, Profile, RegionCost, StatesInHost
from lightning_deepcompile.plan.fit import Move
from lightning_deepcompile.plan.fit_measured import Planned, fit_measured
from lightning_deepcompile.plan.optimize import PassEffect
from lightning_deepcompile.plan.simulate import Prediction
from lightning_deepcompile.plan.state_memory import StateMemory, with_away
from lightning_deepcompile.program.schedule import Instruction, Schedule

LINK = Link(0.0, 10.0)  # bytes a second, each way
STATES = StateMemory(sizes=(10,) * 6, away=0, stepping=10, buffers=5, host=1000)
PROFILE = Profile(
    2, "cuda", (), {"f/r": RegionCost(2.0, 0.0, 20, 60, 30)}, LINK, LINK,
    optimizer_seconds=5.0, budget=100, copy_out=LINK, copy_in=LINK,
)  # fmt: skip


def plan(profile: Profile, room: int = 20, gain: float = 3.0) -> Planned:
    """A plan that saves `gain` seconds where `room` bytes are free: a step otherwise takes 2 s and the optimizer."""
    peak = profile.regions["f/r"].peak
    assert profile.budget is not None
    saves = profile.budget - peak >= room
    seconds = 2.0 + profile.optimizer_seconds - (gain if saves else 0.0)
    return [], [PassEffect("stub", "", Prediction(seconds, 0.0, 0.0, 0.0, 0.0, peak + room * saves, (), ()))]


def test_a_profile_with_states_elsewhere() -> None:
    moved = with_away(PROFILE, STATES, 30)
    assert moved.regions["f/r"] == RegionCost(2.0, 0.0, 0, 30, 0)  # 20 - 30: never below nothing
    assert moved.optimizer_seconds == 8.0  # 30 bytes out, and in at the same time
    assert with_away(with_away(PROFILE, STATES, 10), STATES, 30) == with_away(PROFILE, STATES, 30)
    shared = replace(PROFILE, contention=Contention(duplex=1.5))
    assert with_away(shared, STATES, 30).optimizer_seconds == 9.5  # half as long again as one way
    back = with_away(replace(PROFILE, host_budget=50), replace(STATES, away=40), 10)
    assert back.regions["f/r"].peak == 90 and back.optimizer_seconds == 2.0 and back.host_budget == 80
    # A host that computes copies one way after the other, and has measured no states.
    host = with_away(replace(PROFILE, device_type="cpu"), replace(STATES, away=20), 10)
    assert host.regions["f/r"].peak == 60 + 10 + 50 and host.optimizer_seconds == 3.0
    assert with_away(host, replace(STATES, away=10), 10) == host, "states are counted once"
    assert STATES.at_least(11) == 20 and STATES.at_least(0) == 0 and STATES.at_least(999) == 60
    assert replace(STATES, host=29).at_least(999) == 20


@pytest.mark.parametrize(
    ("states", "profile", "stub", "away", "seconds", "over"),
    [
        # Nothing is away, and memory could save nothing: 7 s.
        ({}, {}, {"room": 1000}, 0, 7.0, -30),
        # 10 bytes are free, and 20 would save 3 s: 10 bytes of states cost 1 s, and 20 bytes 2 s.
        ({}, {"budget": 70}, {}, 10, 5.0, 0),
        # What is saved is less than a second: less than 10 bytes cost.
        ({}, {"budget": 70}, {"gain": 0.9}, 0, 7.0, 0),
        # It would take 40 bytes, thus 3 s to have room for what saves 3 s.
        ({}, {"budget": 70}, {"room": 40}, 0, 7.0, 0),
        # All of 40 can come back, and save 4 s.
        ({"away": 40}, {}, {"room": 1000}, 0, 3.0, 0),
        # 30 can: the peak is 60 of 90.
        ({"away": 40}, {"budget": 90}, {"room": 1000}, 10, 4.0, 0),
        # They stay, as the plan has a better use for the memory: 3 s for 20 bytes.
        ({"away": 40}, {"budget": 80}, {}, 40, 4.0, 0),
        # 25 too many: 30 leave, though that is slower.
        ({"stepping": 0}, {"budget": 35}, {"room": 1000}, 30, 10.0, 0),
        # Host memory has room for 20 of them; the optimizer still needs 40, and 5 for buffers.
        ({"stepping": 0, "host": 29}, {"budget": 35}, {"room": 1000}, 20, 9.0, 10),
        # The optimizer's step is what exceeds the budget: by 10, and by 5 for buffers once anything leaves.
        ({"stepping": 50}, {}, {"room": 1000}, 20, 9.0, -5),
    ],
)
def test_states_go_where_a_step_fits_and_is_fastest(
    states: dict[str, int], profile: dict[str, int], stub: dict[str, Any], away: int, seconds: float, over: int
) -> None:
    memory = replace(STATES, **states)
    decided = fit_measured(replace(PROFILE, **profile), lambda p: plan(p, **stub), memory)
    now, best = decided.now, decided.best
    assert now.away == memory.away
    assert (best.away, best.seconds, best.over) == (away, pytest.approx(seconds), over)


def test_the_gathers_that_open_a_step_find_memory_beside_states_that_leave() -> None:
    unit = 1 << 16
    first = Instruction("gather", (0,), (16 * unit,))
    rest = [Instruction(op, (0,), (16 * unit,)) for op in ("wait", "release")]
    forward = Schedule("f", "forward", 0, (first, rest[0], Instruction("compute", (0,), region="r"), rest[1]), ())
    states = replace(
        STATES, sizes=(10 * unit,) * 6, away=60 * unit, stepping=10 * unit, host=1 << 30, chunk=10 * unit, movable=False
    )

    def planned(profile: Profile) -> Planned:
        return [forward], plan(profile, room=0)[1]

    best = fit_measured(replace(PROFILE, budget=80 * unit), planned, states).best
    # All six chunks would fit beside what is there while the optimizer steps, and five beside a group of 16 units, too.
    assert best.slots == 5
    assert best.over == (10 + 5 * 10 + 16.25 - 80) * unit  # a slot has a 64th to spare


@pytest.mark.parametrize(
    ("seconds", "peak", "tried"),
    [(6.1, 5, [6, 3]), (5.9, 5, [6]), (5.9, 100, [6, 4, 3])],
)
def test_the_fewest_slots_are_tried_where_they_may_help(seconds: float, peak: int, tried: list[int]) -> None:
    """Six chunks that come when backward has ended take six seconds; a plan that exceeds the budget needs memory.

    It is tried with fewer slots by as much as it exceeds the budget by, too.
    """
    states = replace(STATES, sizes=(10,) * 6, away=60, chunk=10, movable=False)
    slots = []

    def planned(profile: Profile) -> Planned:
        slots.append(profile.states.slots)
        return [], [PassEffect("stub", "", Prediction(seconds, 0.0, seconds, 0.0, 0.0, peak, (), ()))]

    fit_measured(replace(PROFILE, budget=80), planned, states)
    assert slots == tried


@pytest.mark.parametrize(("budget", "away"), [(140, 0), (139, 40), (112, 60), (100, 70)])
def test_states_come_back_as_far_as_the_step_in_which_they_do_has_memory(budget: int, away: int) -> None:
    """A step with 30 or fewer away holds 110 bytes, and 30 more in the buffers through which the last states come."""
    states = replace(STATES, sizes=(10,) * 10, away=100, stepping=10, buffers=30, chunk=10)
    assert [states.while_stepping(100, slots) for slots in (0, 1, 3)] == [10, 20, 40]
    mixed = replace(states, sizes=(30, 10, 10, 10), away=60)  # a slot has room for the largest that shares it
    assert [mixed.while_stepping(60, slots) for slots in (0, 1, 2, 3)] == [10, 40, 50, 60]

    def planned(profile: Profile) -> Planned:  # the fewer are away, the faster
        seconds = 7.0 + sum(profile.states.chunks)
        return [], [PassEffect("stub", "", Prediction(seconds, 0.0, 0.0, 0.0, 0.0, 5, (), ()))]

    profile = replace(PROFILE, budget=budget, states=StatesInHost(states.chunks(100), away=100))
    decided = fit_measured(profile, planned, states)
    assert (decided.now.away, decided.best.away) == (100, away)


def test_where_no_plan_fits_the_step_is_traced_again_or_planned_all_the_same() -> None:
    forward = Schedule("f", "forward", 0, (Instruction("compute", (0,), region="r"),), ())
    profile, losses = replace(PROFILE, schedules=(forward,), budget=59), (Move("losses", rounds=True),)
    tried: list[int] = []

    def planned(profile: Profile) -> Planned:
        tried.append(profile.states.away or 0)
        return [forward], plan(profile, room=1000)[1]

    decided = fit_measured(profile, planned, traces=losses, rounding="needed")
    assert (decided.retrace, decided.least, decided.fits, tried) == ("losses", 60, False, [])
    decided = fit_measured(profile, planned, traces=losses, rounding="same")
    assert (decided.retrace, decided.peak, decided.fits, tried) == (None, 60, False, [0])
    # As many states as a byte too much asks for would be away: the leanest plan is one with all of them there.
    decided = fit_measured(profile, planned, replace(STATES, stepping=0), traces=losses, rounding="needed")
    assert (decided.retrace, decided.best.away, decided.bytes("states")) == (None, 10, 10)
    assert decided.describe("states").startswith(
        "10 B of 60 B of optimizer states in host memory: a planned step takes"
    )
    assert decided.stay().moved == () and decided.stay().reason == ""


class Watch(pl.Callback):
    """Losses, and what is in host memory after each step; may give the plan's placement up after step 11."""

    def __init__(self, gives_up: bool) -> None:
        self.gives_up = gives_up
        self.losses: list[float] = []
        self.away: list[int] = []  # of states
        self.held: list[int] = []  # by the runtime

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        engine = trainer.strategy.engine
        self.away.append(engine.summary().offloaded_bytes)
        self.held.append(engine.runtime.stats()["host_bytes"])
        if batch_idx == 10 and self.gives_up and engine.residency is not None:
            engine.residency.undo()


def _fit(*, gives_up: bool = True, **settings: Any) -> tuple[Watch, dict[str, Any], pl.Trainer]:
    torch.manual_seed(3)
    module, watch = Model(CASES["adamw_foreach"][0]), Watch(gives_up)
    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager", **{**ONLY, **settings}))
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=WORLD, max_steps=14, callbacks=[watch], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    data = Tokens(14, ROWS * WORLD, int(os.environ["RANK"]), WORLD)
    trainer.fit(module, DataLoader(data, batch_size=ROWS))
    states = trainer.optimizers[0].state
    values = [full(p) for p in module.parameters()] + [full(states[p]["exp_avg_sq"]) for p in states]
    return watch, dict(enumerate(values)), trainer


def _moves(folder: Path) -> None:
    plain, expected, trainer = _fit()
    shards = trainer.strategy.summary().sharded_bytes_per_rank
    assert plain.away == [0] * 14
    # Parameters, gradients and states are 4 times the shards; only planning knows of activations and whole blocks.
    watch, values, trainer = _fit(offload="auto", memory_budget=f"{int(6.2 * shards)}B", plan=str(folder / "plan"))
    assert watch.losses == plain.losses
    assert all(torch.equal(values[key], value) for key, value in expected.items())
    assert watch.away[:5] == [0] * 5 and min(watch.away[5:11]) > 0 and watch.away[11:] == [0] * 3, watch.away
    assert watch.held[4] == 0 < watch.held[5] and watch.held[-1] == 0, watch.held
    assert trainer.strategy.engine.tuner._decided.required, "what ran before did not fit: nothing to go back to"
    (done,) = trainer.strategy.report()
    before, offload = done.passes[:2]
    assert offload.name == "offload" and "with 0 B there, would need" in offload.changed, str(done)
    assert before.peak_bytes > 6.2 * shards >= done.passes[-1].peak_bytes, str(done)
    # The next run has them there from its first step on, though what that showed would not have made them leave.
    settings = {"offload": "auto", "memory_budget": f"{int(6.2 * shards)}B", "plan": str(folder / "plan")}
    again, _, trainer = _fit(gives_up=False, **settings)
    assert again.losses == plain.losses and trainer.strategy.report() == []
    assert again.away == [watch.away[6]] * 14, again.away
    assert trainer.strategy.summary().offload_reason == "as in the plan that was read"
    # Where what the first step shows leaves no memory for the plan's places, as many leave as must.
    if os.environ["RANK"] == "0":
        file = json.loads((folder / "plan").read_text())
        file["setting"]["memory_budget"] = f"{int(3.85 * shards)}B"  # as of a run that had needed less
        (folder / "plan").write_text(json.dumps({**file, "states": {"away": 0, "slots": 3}}))
    tight, _, trainer = _fit(gives_up=False, **{**settings, "memory_budget": f"{int(3.85 * shards)}B"})
    # The plan may have sent away no more than had to leave, by the times that were measured.
    assert tight.losses == plain.losses and 0 < tight.away[0] <= again.away[0], (tight.away, again.away)
    assert "may be allocated" in trainer.strategy.summary().offload_reason


def test_a_plan_moves_states_and_training_does_not_notice(tmp_path: Path) -> None:
    run_ranks(_moves, WORLD, tmp_path, timeout=160)
