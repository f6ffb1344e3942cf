"""Feed-forward layers are whole as long as there is memory for that, then in pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from multiprocess import run_ranks
from test_losses_in_pieces import BLOCKS, CLASSES, LENGTH, ROWS, Net, _fit, _least
from test_recompute import keep_plans
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_deepcompile.plan.tracing import Tracing

WIDTH, WIDE = 8, 2048
SPARING = Tracing(sparing=True, chunked_mlps=8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Wide(Net):
    """Blocks so wide that most of the memory is theirs."""

    def __init__(self, head: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        if not head:
            self.head = nn.Linear(WIDTH, 64, bias=False)
        self.classes = CLASSES if head else 64

    def training_step(self, tokens: Tensor, batch_idx: int = 0) -> Tensor:
        return super().training_step(tokens % self.classes, batch_idx)


def _trains(folder: Path, backend: str) -> None:
    dist.init_process_group("gloo")
    keep_plans()
    plain, expected, _ = _fit(module=Wide(), region_backend=backend)
    pieces, _, strategy = _fit(6, Wide(), SPARING, region_backend=backend)
    assert strategy.summary().chunked_mlps == BLOCKS and pieces == pytest.approx(plain[:6], rel=1e-6)
    # There is memory for whole layers.
    losses, values, strategy = _fit(module=Wide(), region_backend=backend, rounding="needed")
    assert losses == plain and all(map(torch.equal, values, expected))
    assert strategy.summary().chunked_mlps == 0 and strategy.engine.capture.frames.whole("mlps") == BLOCKS
    # No plan fits into less, but one with layers in pieces does.
    tracings = Tracing(), Tracing(sparing=True), SPARING
    whole, cheap, least = (_least(Wide(), tracing, region_backend=backend) for tracing in tracings)
    assert whole > cheap and cheap - least > 4 * ROWS * LENGTH * WIDE, "saved activations of a layer at least"
    budget, path = (cheap + least) // 2, folder / "plan.json"
    settings: dict[str, Any] = {"region_backend": backend, "rounding": "needed", "plan": str(path)}
    settings["memory_budget"] = f"{budget}B"
    losses, values, strategy = _fit(module=Wide(), **settings)
    assert losses == pytest.approx(plain, rel=1e-6)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(values, expected, strict=True))
    first, anew, done = strategy.report()
    assert "cheap operators" in first.reason
    assert anew.outcome == "retraced" and anew.reason.endswith("so MLPs are computed in 8 chunks from step 0 on.")
    assert done.outcome in ("kept", "unchanged") and done.passes[-1].peak_bytes <= budget, str(done)
    assert (strategy.summary().chunked_mlps, strategy.engine.capture.frames.whole("mlps")) == (BLOCKS, 0)
    assert json.loads(path.read_text())["tracing"]["chunked_mlps"] == 8
    # The next run begins with it, and is traced once.
    again, _, strategy = _fit(6, Wide(), **settings)
    assert again == pieces and strategy.report() == [] and strategy.summary().chunked_mlps == BLOCKS


@pytest.mark.extensive
def test_layers_are_whole_until_no_plan_fits(tmp_path: Path) -> None:
    run_ranks(_trains, 2, tmp_path, "eager", timeout=290)


@pytest.mark.extensive
def test_one_rank_decides_it_too(tmp_path: Path) -> None:
    run_ranks(_trains, 1, tmp_path, "inductor", timeout=290)


def _in_order() -> None:
    dist.init_process_group("gloo")
    keep_plans()
    plain, _, _ = _fit(16, Wide(head=True))
    budget = _least(Wide(head=True), Tracing(sparing=True, chunked_losses=8, chunked_mlps=8))
    losses, _, strategy = _fit(16, Wide(head=True), memory_budget=f"{budget}B", rounding="any")
    *anew, done = strategy.report()
    done_so = [one.reason.partition(" so ")[2] for one in anew]
    assert done_so == [
        "losses are computed in 8 chunks from step 0 on.",
        "cheap operators are recomputed from step 0 on.",
        "MLPs are computed in 8 chunks from step 0 on.",
    ]
    assert done.passes[-1].peak_bytes <= budget, str(done)
    assert losses == pytest.approx(plain, rel=1e-6)
    assert (strategy.summary().chunked_losses, strategy.summary().chunked_mlps) == (1, BLOCKS)


def test_what_takes_the_least_time_comes_first() -> None:
    run_ranks(_in_order, 2, timeout=290)
