"""A resumed training plans anew, counted from where it resumed, or starts with its plan."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from cases import Mlp, Tokens
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.tuning.tuner import Tuner

SAVED = 7  # steps before the checkpoint: a schedule that counted them would be over when training resumes
ROUND = 10  # steps until a round that profiles step 3 is over


def _fit(steps: int, plan: Path | None = None, resume: Path | None = None) -> pl.Trainer:
    schedule = [{"step": 0, "passes": ["zero3", "prefetch"]}, {"step": 3, "passes": ["zero3", "prefetch", "unshard"]}]
    config = CompileConfig(region_backend="eager", schedule=schedule, plan=None if plan is None else str(plan))
    trainer = pl.Trainer(
        strategy=DeepCompileStrategy(compile=config), accelerator="cpu", devices=1, max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(Mlp(), DataLoader(Tokens(SAVED + ROUND, 2, 0, 1), batch_size=2), ckpt_path=resume)
    assert trainer.global_step == steps
    return trainer


def test_a_resumed_training_plans_anew_or_loads_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuner, "_fastest", lambda *_: 0.001)  # no plan is taken back
    plan, checkpoint = tmp_path / "plan.json", tmp_path / "checkpoint"
    first = _fit(SAVED)
    first.save_checkpoint(checkpoint)
    assert [done.step for done in first.strategy.report()] == [5]
    resumed = _fit(SAVED + ROUND, plan, checkpoint)
    assert [done.step for done in resumed.strategy.report()] == [5], "steps since it resumed"
    assert "plan" in resumed.strategy.programs()["frame0.forward"].splitlines()[0] and plan.exists()
    again = _fit(SAVED + 3, plan, checkpoint)
    assert again.strategy.report() == [], "nothing is measured"
    assert again.strategy.programs() == resumed.strategy.programs()
