"""Decisions between the compilation of a training step and its first run."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import ONLY, traced_as
from multiprocess import run_ranks
from test_engine import one_step, sgd
from test_losses_in_pieces import ROWS, Net, tokens
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_deepcompile import CompileConfig
from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.plan.budget import MemoryBudgetError
from lightning_deepcompile.plan.tracing import Tracing
from lightning_deepcompile.profile import peak_memory


class Catches(Net):
    """Takes every exception for a reason to skip its batch."""

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        try:
            return super().training_step(batch)
        except Exception:
            return self.head.weight.sum() * 0


def _losses(mesh: DeviceMesh, stage: int = 3, steps: int = 3, **settings: Any) -> tuple[list[float], Engine]:
    engine = Engine(Catches(), mesh, CompileConfig(region_backend="eager", **settings), stage=stage)
    optimizer = sgd(engine)
    return [one_step(engine, tokens(ROWS), optimizer) for _ in range(steps)], engine


def _least(mesh: DeviceMesh, stage: int, tracing: dict[str, Any]) -> int:
    """Returns what a step that is traced so needs at least."""
    _, engine = _losses(mesh, stage, 1, schedule=None, **tracing)
    plan = engine.tuner._foresight.plan
    engine.close()
    assert plan is not None and plan.fits
    return plan.least


def _decided() -> list[tuple[int, list[str], dict[str, Any]]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for stage in (3, 1, 2) if "TEST_ALL" in os.environ else (3, 1):
        expected, engine = _losses(mesh, stage, **ONLY)
        engine.close()
        # Rank 1's budget alone is too small: all ranks decide alike.
        least = _least(mesh, stage, traced_as(Tracing(chunked_losses=8), 2, stage))
        budget = f"{least}B" if dist.get_rank() == 1 else "1TiB"
        losses, engine = _losses(mesh, stage, schedule=None, memory_budget=budget)
        assert losses == pytest.approx(expected, rel=1e-6)
        summary, tracing = engine.summary(), engine.capture.tracing
        counts = {"losses": summary.chunked_losses, "graphs": summary.graphs, "sparing": tracing.sparing}
        moved = engine.runtime.stats()["offloaded_bytes"]
        assert "saved tensors in host memory (" in summary.memory_plan and summary.memory_plan in str(summary)
        found.append((stage, [done.reason for done in engine.report()], {**counts, "moved": moved > 0}))
        engine.close()
    return found


def test_all_ranks_and_stages_decide_before_the_first_run() -> None:
    first, second = run_ranks(_decided, 2, timeout=120)
    assert first == second
    for stage, reasons, counts in first:
        assert [reason.endswith("from step 0 on.") for reason in reasons] == [True], (stage, reasons)
        assert counts == {"losses": 1, "graphs": 1, "sparing": False, "moved": True}, stage


def test_what_fits_is_left_alone(mesh: DeviceMesh, fresh_dynamo: None) -> None:
    plain, engine = _losses(mesh, **ONLY)
    programs = list(engine.programs().values())
    engine.close()
    torch._dynamo.reset()
    losses, engine = _losses(mesh)
    assert losses == plain and engine.report() == [] and engine.summary().memory_plan == ""
    assert engine.summary().chunked_losses == 0 and engine.capture.frames.whole("losses") == 1
    assert [text.partition("\n")[2] for text in engine.programs().values()] == [
        text.partition("\n")[2] for text in programs
    ]
    assert engine.timeline.residency is None and engine.runtime.stats()["host_bytes"] == 0
    engine.close()


def test_a_step_that_cannot_fit_is_named_before_it_runs(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        _losses(mesh, steps=1, schedule=None, memory_budget="8MiB", offload="none", rounding="same")
    text = str(refused.value)
    assert "memory_budget='8MiB') allows 8388608 bytes (8.0 MiB). " in text, text
    assert "saved tensors" in text and "in all" in text, text
    assert "offload='auto', rounding='needed'" in text and "% of this batch" in text, text
    least = int(text.partition("still needs ")[2].split()[0])
    torch._dynamo.reset()
    _, engine = _losses(mesh, steps=1, schedule=None, memory_budget=f"{least}B", offload="none", rounding="same")
    engine.close()
    # Nobody is sure of the default: training goes on, and what was expected is said again where memory runs out.
    torch._dynamo.reset()
    monkeypatch.setattr(peak_memory, "memory_limit", lambda *_: 1 << 20)
    with caplog.at_level(logging.WARNING, "lightning_deepcompile"):
        _, engine = _losses(mesh, steps=1, schedule=None, offload="none", rounding="same")
    (text,) = [text for text in caplog.messages if "not expected to fit" in text]
    assert "1.0 MiB may be allocated" in text and "saved tensors" in text and "in all" in text, text
    error = torch.OutOfMemoryError("no memory")
    engine.tuner.note_memory(error)
    assert any("not expected to fit" in note for note in error.__notes__)
    engine.close()


class Reads(Net):
    """Runs Python before its first graph: what it takes must not be taken twice."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    @torch.compiler.disable
    def take(self, batch: Tensor) -> Tensor:
        self.taken.append(len(batch))
        return batch

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return super().training_step(self.take(batch))


def test_no_code_of_the_user_runs_twice(mesh: DeviceMesh, fresh_dynamo: None) -> None:
    """The step goes on, with its saved tensors in host memory, and is traced once more when it was measured."""
    module = Reads()
    engine = Engine(module, mesh, CompileConfig(region_backend="eager", schedule=None, memory_budget="1MiB"))
    optimizer = sgd(engine)
    for _ in range(3):
        one_step(engine, tokens(ROWS), optimizer)
    assert module.taken == [ROWS] * 3
    assert engine.runtime.stats()["offloaded_bytes"] > 0 and engine.report() == []
    engine.close()
