"""A batch that is larger than all before: memory is decided on all ranks alike before it runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from multiprocess import run_ranks
from test_engine import one_step, sgd
from test_first_step_fits import Block, Counting
from test_profile import EARLY
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from lightning_deepcompile import CompileConfig
from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.ranks.exchange import maxima
from lightning_deepcompile.step.batch_sizes import LargestBatch, sizes_of
from lightning_deepcompile.tuning.tuner import Tuner

SMALL, LARGE = 8, 160


class Deep(nn.Module):
    """Saved tensors take most of its memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(Block(32, 128, False) for _ in range(3))

    def training_step(self, tokens: Tensor, batch_idx: int = 0) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _train(mesh: DeviceMesh, lengths: list[int], **settings: Any) -> tuple[list[float], list[int], Engine]:
    """Returns the losses, and the most bytes that were there in each step, by what the runtime and its regions hold."""
    torch._dynamo.reset()
    config: dict[str, Any] = {"region_backend": "eager", "schedule": None, "rounding": "same", **settings}
    engine = Engine(Deep(), mesh, CompileConfig(**config))
    engine.capture.regions = regions = Counting(engine)
    optimizer, losses, peaks = sgd(engine), [], []
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    for length in lengths:
        regions.peak = 0
        losses.append(one_step(engine, torch.randint(0, 64, (2, length), generator=generator), optimizer))
        peaks.append(regions.peak)
    return losses, peaks, engine


def test_memory_for_a_larger_batch_is_decided_before_it_runs(mesh: DeviceMesh, fresh_dynamo: None) -> None:
    lengths = [SMALL, SMALL + 1, SMALL + 2, LARGE, SMALL, LARGE]
    plain, peaks, engine = _train(mesh, lengths, memory_budget="1TiB")
    assert engine.runtime.stats()["offloaded_bytes"] == 0
    engine.close()
    *_, engine = _train(mesh, [LARGE], memory_budget="1TiB")
    plan = engine.tuner._foresight.plan
    engine.close()
    assert plan is not None and plan.least < peaks[3] <= plan.needed
    budget = (plan.least + peaks[3]) // 2
    assert max(peaks[:3]) < budget // 2, "batches before need nothing"
    losses, found, engine = _train(mesh, lengths, memory_budget=f"{budget}B")
    assert losses == plain
    assert max(found) <= budget, "nothing is given back behind it: there may be more of them"
    assert engine.runtime.stats()["offloaded_bytes"] > 0
    assert engine.tuner._foresight.plan is not None and engine.tuner._foresight.plan.fits
    engine.close()


def test_a_larger_batch_that_cannot_fit_is_named_before_it_runs(
    mesh: DeviceMesh, fresh_dynamo: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on: the step runs in as little memory as it can, and its need is told."""
    lengths = [SMALL, SMALL + 1, SMALL + 2, LARGE, SMALL]
    plain, peaks, engine = _train(mesh, lengths, memory_budget="1TiB")
    engine.close()
    budget = 2 * max(peaks[:3])
    with caplog.at_level(logging.WARNING, "lightning_deepcompile"):
        losses, found, engine = _train(mesh, lengths, memory_budget=f"{budget}B")
    plan = engine.tuner._foresight.plan
    engine.close()
    assert losses == plain
    assert plan is not None and not plan.fits
    assert found[3] <= plan.least < peaks[3] and budget < plan.least
    (text,) = [text for text in caplog.messages if "not expected to fit" in text]
    assert f"{format_bytes(plan.least)} at least" in text and "% of this batch" in text, text


def test_a_plan_from_a_file_knows_the_batches_that_it_was_made_for(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> None:
    monkeypatch.setattr(Tuner, "_fastest", lambda *_: 0.001)
    same = [EARLY[0], {**EARLY[1], "passes": ["zero3", "prefetch", "keep_whole"]}]  # changes no single micro-batch
    settings: dict[str, Any] = {"schedule": same, "plan": str(tmp_path / "plan.json"), "memory_budget": "1TiB"}
    few, many = [SMALL, SMALL + 1] * 6, [LARGE, LARGE + 1] * 6
    *_, engine = _train(mesh, few, **settings)
    engine.close()
    *_, engine = _train(mesh, few, **settings)
    assert engine.report() == [] and engine.tuner._foresight.plan is None, "the plan holds"
    engine.close()
    looked: list[int] = []
    before = Tuner.before_larger
    monkeypatch.setattr(Tuner, "before_larger", lambda self, frame: (looked.append(self._step), before(self, frame)))
    *_, engine = _train(mesh, many, **settings)
    assert looked[0] == 0, "before the first step runs"
    assert engine.report(), "a plan for such batches follows"
    engine.close()


def _on_one_rank() -> tuple[list[float], list[float], list[str], bool, int, int]:
    """Rank 1 alone meets a batch for which the plan in use leaves no room: all ranks leave the plan alike."""
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,)), int(os.environ["RANK"])
    Tuner._fastest = lambda *_: 0.001  # type: ignore[method-assign]
    lengths = [SMALL + step % 2 for step in range(26)]
    at = 20
    if rank == 1:
        lengths[at] = LARGE
    unshard = [{**EARLY[1], "passes": ["zero3", "prefetch", "unshard"]}]
    plain, peaks, engine = _train(mesh, lengths, memory_budget="1TiB", schedule=EARLY[:1])
    engine.close()
    *_, engine = _train(mesh, [LARGE], memory_budget="1TiB", schedule=EARLY[:1])
    least = engine.tuner._foresight.plan.least  # type: ignore[union-attr]
    engine.close()
    most = int(maxima([max(peaks[at], least)], dist.group.WORLD)[0])
    asked: list[int] = []
    before = Tuner.before_larger

    def counted(self: Tuner, frame: int) -> None:
        asked.append(self._step)
        before(self, frame)

    Tuner.before_larger = counted  # type: ignore[method-assign]
    losses, found, engine = _train(mesh, lengths, memory_budget=f"{most}B", schedule=EARLY[:1] + unshard)
    Tuner.before_larger = before  # type: ignore[method-assign]
    # Each rank offloads what its own batch needs: of these copies the others know nothing.
    lines = [text.partition(" ")[2].splitlines() for text in engine.programs().values() if ".forward" in text]
    texts = ["\n".join(line for line in text[1:] if " saved " not in line) for text in lines]
    planned = bool(engine.tuner._current.planned)
    engine.close()
    return plain, losses, texts, planned, max(found) - most, asked.count(at)


def test_a_larger_batch_on_one_rank_is_a_decision_of_all() -> None:
    results = run_ranks(_on_one_rank, 2, timeout=300)
    for plain, losses, texts, planned, excess, asked in results:
        assert losses == pytest.approx(plain, rel=1e-6)
        assert texts == results[0][2] and not planned, "all ranks have left the plan"
        assert excess <= 0 and asked == 1


def test_a_batch_is_larger_by_its_elements_or_its_length() -> None:
    largest = LargestBatch()
    shapes = [(4, 10), (4, 10), (8, 5), (1, 20), (2, 20), (4, 20), (1, 5)]
    grown = [largest.grows(sizes_of(({"ids": torch.zeros(shape)}, 0))) for shape in shapes]
    assert grown == [False, False, False, True, False, True, False]
