"""What is decided between the compilation of a training step and its first run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import ONLY
from multiprocess import run_ranks
from test_engine import one_step, sgd
from test_losses_in_pieces import ROWS, Net, tokens
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_deepcompile import CompileConfig
from lightning_deepcompile.engine import Engine


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


def _decided() -> list[tuple[int, list[str], dict[str, Any]]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for stage in (3, 2, 1):
        expected, engine = _losses(mesh, stage, **ONLY)
        engine.close()
        # Rank 1's budget alone is too small: all ranks decide alike.
        budget = "1MiB" if dist.get_rank() == 1 else "1TiB"
        losses, engine = _losses(mesh, stage, schedule=None, memory_budget=budget)
        assert losses == pytest.approx(expected, rel=1e-6)
        summary, tracing = engine.summary(), engine.capture.tracing
        counts = {"losses": summary.chunked_losses, "graphs": summary.graphs, "sparing": tracing.sparing}
        moved = engine.runtime.stats()["offloaded_bytes"]
        found.append((stage, [done.reason for done in engine.report()], {**counts, "moved": moved > 0}))
        engine.close()
    return found


def test_all_ranks_and_stages_decide_before_the_first_run() -> None:
    first, second = run_ranks(_decided, 2, timeout=120)
    assert first == second
    for stage, reasons, counts in first:
        assert [reason.endswith("from step 0 on.") for reason in reasons] == [True] * 3, (stage, reasons)
        assert counts == {"losses": 1, "graphs": 1, "sparing": True, "moved": True}, stage


def test_what_fits_is_left_alone(mesh: DeviceMesh, fresh_dynamo: None) -> None:
    plain, engine = _losses(mesh, **ONLY)
    programs = list(engine.programs().values())
    engine.close()
    torch._dynamo.reset()
    losses, engine = _losses(mesh)
    assert losses == plain and engine.report() == []
    assert [text.partition("\n")[2] for text in engine.programs().values()] == [
        text.partition("\n")[2] for text in programs
    ]
    assert engine.timeline.residency is None and engine.runtime.stats()["host_bytes"] == 0
    engine.close()


def test_a_step_that_cannot_fit_is_named_before_it_runs(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, fresh_dynamo: None
) -> None:
    with caplog.at_level(logging.WARNING, "lightning_deepcompile"):
        _, engine = _losses(mesh, steps=1, schedule=None, memory_budget="1MiB", offload="none")
    (text,) = [text for text in caplog.messages if "not expected to fit" in text]
    assert "1.0 MiB may be allocated" in text and "saved tensors" in text and "in all" in text, text
    error = torch.OutOfMemoryError("no memory")
    engine.tuner.explain(error)
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
