"""Losses are whole as long as there is memory for that, then in pieces, on all ranks alike."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from cases import ONLY, full, traced_as
from multiprocess import run_ranks
from test_engine import one_step, sgd
from test_recompute import Losses, keep_plans
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.plan.tracing import Tracing
from lightning_deepcompile.tuning.tuner import Tuner

CLASSES, WIDTH, LENGTH = 32_768, 8, 64  # the fewest that count as many
STEPS, ROWS = 16, 2
BLOCKS = 2
CHUNKED = Tracing(chunked_losses=8)
START = [{"step": 0, "passes": ["zero3", "prefetch"]}]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(pl.LightningModule):
    """Blocks, and a head of so many classes that most of the memory is logits."""

    def __init__(self, whole: bool = False, blocks: int = BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.whole = whole

    def training_step(self, tokens: Tensor, batch_idx: int = 0) -> Tensor:
        x = self.embed(tokens % 64)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens.flatten())
        return loss * (1 + (logits.argmax(-1) == 0).float().mean()) if self.whole else loss

    def validation_step(self, tokens: Tensor, batch_idx: int = 0) -> Tensor:
        return self.training_step(tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tokens(number: int) -> Tensor:
    """Batches of one rank."""
    return torch.randint(0, CLASSES, (number, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))


def _fit(
    steps: int = STEPS, module: Net | None = None, tracing: Tracing | None = None, **settings: Any
) -> tuple[list[float], list[Tensor], Any]:
    seen, module = Losses(), module or Net()
    if tracing is not None:
        settings |= traced_as(tracing, dist.get_world_size(), memory_budget=settings.get("memory_budget"))
    strategy = DeepCompileStrategy(compile=CompileConfig(**{"region_backend": "eager", **ONLY, **settings}))
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), max_steps=steps, callbacks=[seen],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(tokens(ROWS * steps), batch_size=ROWS))
    return seen.losses, [full(p) for p in module.parameters()], trainer.strategy


def _least(module: Net | None = None, tracing: Tracing | None = None, **settings: Any) -> int:
    """Returns what a step that is traced so needs at least, as known before it runs."""
    _, _, strategy = _fit(1, module, tracing, **settings)
    return int(strategy.engine.tuner._foresight.plan.least)


def _trains(folder: Path, backend: str) -> None:
    dist.init_process_group("gloo")
    keep_plans()
    plain, expected, _ = _fit(region_backend=backend)
    # No plan fits into less, but one with the loss in pieces does.
    least, logits = _least(region_backend=backend), 4 * ROWS * LENGTH * CLASSES
    budget, path = least - logits // 2, folder / "plan.json"
    settings: dict[str, Any] = {"region_backend": backend, "rounding": "needed", "plan": str(path)}
    settings["memory_budget"] = f"{budget}B"
    losses, values, strategy = _fit(**settings)
    assert losses == pytest.approx(plain, rel=1e-6)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(values, expected, strict=True))
    anew, done = strategy.report()
    assert anew.outcome == "retraced" and anew.step == 0 and anew.reason.startswith("The leanest plan needs ")
    assert anew.reason.endswith(" too much memory, so losses are computed in 8 chunks from step 0 on."), anew.reason
    assert done.outcome in ("kept", "unchanged") and done.passes[-1].peak_bytes <= budget, str(done)
    summary = strategy.summary()
    assert (summary.chunked_losses, summary.graphs, strategy.engine.capture.frames.whole("losses")) == (1, 1, 0)
    tracing = json.loads(path.read_text())["tracing"]
    assert tracing == {"uncheckpointed": 0, "sparing": False, "chunked_losses": 8, "chunked_mlps": 0}
    # The next run begins with it, and is traced once.
    again, _, strategy = _fit(6, **settings)
    assert again == losses[:6] and strategy.report() == [] and strategy.summary().chunked_losses == 1


def test_losses_are_whole_until_no_plan_fits(tmp_path: Path) -> None:
    run_ranks(_trains, 2, tmp_path, "eager", timeout=290)


@pytest.mark.extensive
def test_one_rank_decides_it_too(tmp_path: Path) -> None:
    run_ranks(_trains, 1, tmp_path, "inductor", timeout=290)


def _saves_more() -> None:
    dist.init_process_group("gloo")
    keep_plans()
    plain, _, _ = _fit(20, Net(blocks=3))  # of fewer, cheap operators save too little
    least = _least(Net(blocks=3), CHUNKED)
    budget = least - (least >> 6)
    losses, _, strategy = _fit(20, Net(blocks=3), rounding="any", memory_budget=f"{budget}B")
    first, second, done = strategy.report()
    assert "losses are computed in 8 chunks from step 0 on" in first.reason, first
    assert "cheap operators are recomputed from step 0 on" in second.reason, second
    assert done.passes[-1].peak_bytes <= budget, str(done)
    assert strategy.engine.capture.tracing.chunked_losses and strategy.engine.capture.tracing.sparing
    assert losses == pytest.approx(plain, rel=1e-6) and strategy.summary().chunked_losses == 1
    # What needs its logits whole is left so, and what is cheap is computed again at once.
    least = _least(Net(whole=True, blocks=3))
    _, _, strategy = _fit(module=Net(whole=True, blocks=3), memory_budget=f"{least - 10_000}B", rounding="any")
    assert [done.outcome for done in strategy.report()][0] == "retraced", strategy.report()
    assert "cheap operators are recomputed from step 0 on" in strategy.report()[0].reason
    assert strategy.summary().chunked_losses == 0 and not strategy.engine.capture.tracing.chunked_losses


@pytest.mark.extensive
def test_what_is_cheap_is_computed_again_only_if_that_is_not_enough() -> None:
    run_ranks(_saves_more, 2, timeout=290)


def test_without_a_budget_both_are_decided_on_one_rank(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fresh_dynamo: None
) -> None:
    """One rank plans nothing, but a step is measured, and again after it was retraced."""
    monkeypatch.setattr(Tuner, "_fastest", lambda *_: 0.001)
    engine = Engine(Net(), mesh, CompileConfig(region_backend="eager", **{**ONLY, "rounding": "any"}))
    optimizer, batch, error = sgd(engine), tokens(ROWS), torch.OutOfMemoryError("no memory")
    with caplog.at_level(logging.INFO, "lightning_deepcompile"):
        for step in range(14):
            one_step(engine, batch, optimizer)
            engine.run_step("validation_step", batch)
            if step == 0:
                engine.tuner._foresight.limit = 1000
                engine.tuner.note_memory(error)
                assert "fits with losses and MLPs unchunked" in error.__notes__[0]
    first, second, *_ = engine.report()
    assert "losses are computed in 8 chunks from step 5 on" in first.reason and "cheap operators" in second.reason
    assert [text for text in caplog.messages if "losses are computed in 8 chunks" in text] == [first.reason], "once"
    engine.close()
