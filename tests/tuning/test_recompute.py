"""Activation checkpointing only as far as memory asks for it: decisions by hand, and training that does not notice."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from cases import ONLY, VOCAB, Base, Tokens, full, llama
from multiprocess import run_ranks
from test_first_step_fits import Block
from test_oom import FAILS, Regions, Shortages
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.plan import fit_measured
from lightning_deepcompile.plan.budget import MemoryBudgetError
from lightning_deepcompile.plan.costs import Link, Profile, RegionCost
from lightning_deepcompile.plan.fit_measured import Checkpoint, Planned
from lightning_deepcompile.plan.optimize import PassEffect
from lightning_deepcompile.plan.simulate import Prediction
from lightning_deepcompile.program.schedule import Instruction, Schedule
from lightning_deepcompile.tuning.tuner import Tuner

LINK = Link(0.0, 10.0)
FORWARD = Schedule(
    "f", "forward", 0, (Instruction("gather", (0,), (100,)), Instruction("compute", (0,), region="r")), ()
)
PROFILE = Profile(2, "cuda", (FORWARD,), {"f/r": RegionCost(4.0)}, LINK, LINK, budget=100)
BLOCKS = {0: [Checkpoint(10, 20)] * 4}  # each computes for a fifth of 4 s


@pytest.mark.parametrize(
    ("budget", "needs", "gain", "doubles", "kept"),
    [
        (100, 0, 0.0, False, 4),  # all fit beside the 50 bytes of the step
        (100, 0, 0.0, True, 2),  # with room for twice as much
        (80, 0, 0.0, False, 3),
        (59, 0, 0.0, False, 0),
        # A plan that needs 30 bytes is faster by as much as three blocks (2.4 s), and by more.
        (90, 30, 2.0, False, 4),
        (90, 30, 5.0, False, 0),
        (90, 20, 2.0, False, 2),  # both: two blocks and the plan
    ],
)
def test_memory_goes_to_what_it_saves_most(budget: int, needs: int, gain: float, doubles: bool, kept: int) -> None:
    def plan(profile: Profile) -> Planned:
        assert profile.budget is not None
        better = gain and profile.budget - 50 >= needs
        start = Prediction(10.0, 0.0, 0.0, 0.0, 0.0, 50, (), ())
        best = replace(start, seconds=10.0 - gain, peak_bytes=50 + needs) if better else start
        return [], [PassEffect("start", "", start), PassEffect("stub", "", best)]

    profile = replace(PROFILE, budget=budget)
    chosen = fit_measured.fit_measured(profile, plan, blocks=BLOCKS, doubles=doubles).best
    assert chosen.kept == kept
    if chosen.kept:
        before, after = (effect.prediction for effect in chosen.effects)
        assert before.peak_bytes == 50 < after.peak_bytes <= budget and after.seconds < 10.0
        assert chosen.effects[1].changed == f"blocks that keep activations: 0 become {kept}, with {10 * kept} B"


STEPS, ROWS, LAYERS = 12, 4, 4


class Checkpointed(Base):
    """Checkpointed blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.blocks = nn.ModuleList(Block(16, 36, again=True) for _ in range(LAYERS))

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Losses(pl.Callback):
    """Losses, and how many blocks are not computed again in each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.kept: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.kept.append(trainer.strategy.engine.capture.tracing.uncheckpointed)


def _fit(
    steps: int = STEPS,
    shortages: Shortages | None = None,
    fails: int = FAILS,
    passes: Sequence[str] | None = (),
    build: Callable[[], Base] = Checkpointed,
    **settings: Any,
) -> tuple[Losses, list, pl.Trainer]:
    seen = Losses()
    start = ["zero3", "prefetch"]
    if passes is not None:  # else as it is by default
        settings["schedule"] = [{"step": 0, "passes": start}, {"step": 3, "passes": [*start, *passes]}]
    torch.manual_seed(5)
    module = build()
    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager", **{**ONLY, **settings}))
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), max_steps=steps, callbacks=[seen],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    if shortages is not None:
        trainer.callbacks.append(Fails(shortages, fails))
    data = Tokens(steps, ROWS * dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    trainer.fit(module, DataLoader(data, batch_size=ROWS))
    return seen, [full(p) for p in module.parameters()], trainer


class Fails(pl.Callback):
    """Makes a rank run out of memory in one step."""

    def __init__(self, shortages: Shortages, step: int) -> None:
        self.shortages, self.step = shortages, step

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        capture = trainer.strategy.engine.capture
        capture.regions = Regions("eager")
        capture.regions.before = self.shortages

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.shortages.armed = batch_idx == self.step


def keep_plans() -> None:
    """Makes every change that saves time be made, and no plan be reverted, whatever the machine measures."""
    fit_measured._GAIN = 0.0
    fastest = Tuner._fastest
    Tuner._fastest = lambda self, first, last: 1e-6 if first > 0 else fastest(self, first, last)  # type: ignore


def _train(folder: Path) -> None:
    dist.init_process_group("gloo")
    keep_plans()
    plain, expected, trainer = _fit()
    assert plain.kept == [0] * STEPS and trainer.strategy.summary().graphs == 1
    start_peak = trainer.strategy.report()[0].passes[0].peak_bytes
    # There is memory for all.
    path = folder / "plan.json"
    seen, values, trainer = _fit(rounding="any", plan=str(path))
    assert seen.losses == plain.losses and all(map(torch.equal, values, expected))
    anew, done = trainer.strategy.report()
    assert anew.outcome == "retraced" and anew.step == 5 and anew.passes[-1].name == "recompute", str(anew)
    assert anew.passes[-1].changed.startswith(f"blocks that keep activations: 0 become {LAYERS}, with ")
    assert done.outcome in ("kept", "unchanged") and done.step == 10, str(done)
    assert seen.kept == [0] * 5 + [LAYERS] * (STEPS - 5)
    (forward,) = (text for name, text in trainer.strategy.programs().items() if name.endswith("forward"))
    before, after = anew.passes
    block = (after.peak_bytes - before.peak_bytes) // LAYERS
    assert json.loads(path.read_text())["tracing"]["uncheckpointed"] == LAYERS
    # The next run begins with them, and is traced once.
    again, values, trainer = _fit(6, rounding="any", plan=str(path))
    assert again.losses == plain.losses[:6] and again.kept == [LAYERS] * 6 and trainer.strategy.report() == []
    programs = list(trainer.strategy.programs().values())
    assert len(programs) == 2 and programs[0].partition("\n")[2] == forward.partition("\n")[2]
    # A run that is to compute all of them again does, whatever the plan says.
    other, _, _ = _fit(2, plan=str(path))
    assert other.losses == plain.losses[:2] and other.kept == [0] * 2
    # There is memory for two or three of them.
    some, values, trainer = _fit(rounding="any", memory_budget=f"{start_peak + 4 * block}B")
    assert some.losses == plain.losses and all(map(torch.equal, values, expected))
    assert 0 < some.kept[-1] < LAYERS, (trainer.strategy.report(), block)


def test_what_is_kept_changes_no_bit(tmp_path: Path) -> None:
    run_ranks(_train, 2, tmp_path, timeout=290)


def _runs_short() -> None:
    dist.init_process_group("gloo")
    keep_plans()
    plain, expected, _ = _fit(36, passes=["unshard"])
    calls = {2} if os.environ["RANK"] == "1" else set()
    # Before there is a plan for what was traced anew.
    early, _, trainer = _fit(9, Shortages("forward", calls), 7, rounding="any")
    assert early.losses == plain.losses[:9] and early.kept[-1] == LAYERS
    assert "lower -> uncheckpointed -> zero3" in next(iter(trainer.strategy.programs().values()))
    seen, values, trainer = _fit(36, Shortages("forward", calls), passes=["unshard"], rounding="any")
    assert seen.losses == pytest.approx(plain.losses, rel=1e-6)
    # The memory of that moment is too little for any plan: MLPs are chunked at last, which may change last bits.
    assert trainer.strategy.engine.capture.tracing.chunked_mlps
    for value, wanted in zip(values, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-7)
    reports = trainer.strategy.report()
    assert [done.outcome for done in reports[:3]] == ["retraced", reports[1].outcome, "leaner"], reports
    assert "all checkpointed blocks recomputed" in reports[2].reason
    assert seen.kept[FAILS] == LAYERS and seen.kept[-1] == 0 and len(set(seen.kept)) == 2


def test_a_shortage_has_all_computed_again() -> None:
    run_ranks(_runs_short, 2, timeout=290)


def _alone(folder: Path) -> None:
    build = llama(checkpointing=True, layers=LAYERS)
    dist.init_process_group("gloo")
    keep_plans()
    plain, _, trainer = _fit(36, build=build, passes=None)
    assert [done.outcome for done in trainer.strategy.report()] == ["measured"], "it gathers nothing: nothing to plan"
    path = folder / "plan.json"
    seen, _, trainer = _fit(18, build=build, passes=None, rounding="any", plan=str(path))
    assert seen.losses == plain.losses[:18] and seen.kept == [0] * 5 + [LAYERS] * 13
    (anew,) = trainer.strategy.report()
    assert anew.outcome == "retraced" and anew.passes[0].name == "zero3 -> prefetch", str(anew)
    programs = list(trainer.strategy.programs().values())
    assert len(programs) == 2 and all("[lower -> uncheckpointed -> zero3 -> prefetch]" in text for text in programs)
    assert json.loads(path.read_text())["tracing"]["uncheckpointed"] == LAYERS
    # The next run begins with them; when it is short of memory, the one after it does not.
    again, _, trainer = _fit(36, Shortages("forward", {2}), build=build, passes=None, rounding="any", plan=str(path))
    assert again.losses == pytest.approx(plain.losses, rel=1e-6) and again.kept == [LAYERS] * 14 + [0] * 22
    assert trainer.strategy.report()[0].outcome == "leaner"
    assert json.loads(path.read_text())["tracing"]["uncheckpointed"] == 0
    # There is no memory for any: they stay, and what is planned is within the budget.
    budget = 17 * anew.passes[0].peak_bytes // 16
    tight, _, trainer = _fit(8, build=build, passes=None, rounding="any", memory_budget=f"{budget}B")
    assert tight.kept == [0] * 8
    *_, planned = trainer.strategy.report()
    assert planned.passes[-1].peak_bytes <= budget, str(planned)
    assert not any("uncheckpointed" in text for text in trainer.strategy.programs().values())


def _saves_little(folder: Path) -> None:
    whole = llama(layers=LAYERS)
    dist.init_process_group("gloo")
    keep_plans()
    plain, expected, _ = _fit(16, build=whole, passes=None)
    with pytest.raises(MemoryBudgetError, match="needs? [0-9]+") as refused:
        _fit(build=whole, passes=None, memory_budget="100000B")
    # No plan fits into less, but one that saves less does.
    least = int(re.findall(r"needs? (\d+)", str(refused.value))[0])
    budget = 9 * least // 10
    path = folder / "plan.json"
    settings: dict[str, Any] = {"rounding": "any", "memory_budget": f"{budget}B", "plan": str(path)}
    seen, values, trainer = _fit(16, build=whole, passes=None, **settings)
    assert seen.losses == plain.losses and all(map(torch.equal, values, expected))
    anew, done = trainer.strategy.report()
    assert anew.outcome == "retraced" and "cheap operators are recomputed" in anew.reason, str(anew)
    assert done.passes[-1].peak_bytes <= budget, str(done)
    assert json.loads(path.read_text())["tracing"]["sparing"] is True
    # The next run begins with it.
    again, _, trainer = _fit(6, build=whole, passes=None, **settings)
    assert again.losses == plain.losses[:6] and trainer.strategy.report() == []
    assert trainer.strategy.engine.capture.tracing.sparing


@pytest.mark.extensive
def test_what_is_cheap_is_computed_again_where_nothing_else_fits(tmp_path: Path) -> None:
    run_ranks(_saves_little, 2, tmp_path, timeout=290)


@pytest.mark.extensive
def test_one_rank_decides_it_too(tmp_path: Path) -> None:
    run_ranks(_alone, 1, tmp_path, timeout=290)
