"""Reports of trainings: of one rank, of two, and of one that was too short to measure anything."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import Mlp, Tokens
from lightning.pytorch import Trainer
from multiprocess import run_ranks
from test_handover import trainer_of
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.__main__ import main
from lightning_deepcompile.plan.costs import Profile

ELSEWHERE = ("--world", "64", "--bandwidth", "50", "--rounding", "any")


def _train(steps: int, accumulated: int = 1) -> Trainer:
    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    trainer = trainer_of(strategy, accumulate_grad_batches=accumulated)
    trainer.fit(Mlp(), DataLoader(Tokens(steps * accumulated, 4, 0, 1), batch_size=4))
    return trainer


def _short(folder: Path) -> None:
    strategy = _train(2).strategy
    assert strategy.profile() is None and strategy.report() == []
    with pytest.raises(ValueError, match="no step was measured"):
        strategy.save_trace(folder / "trace.json")
    assert strategy.save_report(folder / "report.html") == folder / "report.html"


def _blocks(name: str) -> Iterator[str]:
    """Yields the blocks that an event is named after; neighbours are a range, ``layers.0-2``."""
    for part in name.split(", "):
        if (found := re.fullmatch(r"(.*\.)(\d+)-(\d+)", part)) is None:
            yield part
        else:
            yield from (f"{found[1]}{index}" for index in range(int(found[2]), int(found[3]) + 1))


def _long(folder: Path) -> list[str]:
    """Returns the names of the files that this rank has written."""
    ranks = int(os.environ["WORLD_SIZE"])
    accumulated = 2 if ranks > 1 else 1
    trainer = _train(9, accumulated)
    strategy, profile = trainer.strategy, trainer.strategy.profile()
    assert strategy.report() and profile is not None, "a step was measured"
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.micro_batches == accumulated
    assert profile.resident.shards >= strategy.summary().sharded_bytes_per_rank > 0
    summary, parameters = strategy.summary(), len(list(trainer.lightning_module.parameters()))
    if ranks > 1:
        assert summary.reductions_per_step > parameters, "each micro-batch reduces"
        assert summary.gathers_per_step > 0
    _exports(trainer)
    written = [strategy.save_report(folder / "report.html"), strategy.save_trace(folder / "trace.json")]
    if trainer.is_global_zero:
        (folder / "profile.json").write_text(profile.to_json())
        blocks = set(profile.labels.parameters.values())
        names = {row["name"] for row in json.loads((folder / "trace.json").read_text())["traceEvents"]}
        assert blocks and blocks <= {block for name in names for block in _blocks(name)}, (blocks, names)
        sys.argv = ["", "simulate", str(folder / "profile.json"), *ELSEWHERE]
        main()  # ends the process if something is missing
    return [path.name for path in written if path is not None]


def _exports(trainer: Trainer) -> None:
    """`torch.export` writes whole parameters down, or says how it can."""
    head = trainer.lightning_module.head
    inputs = (torch.randn(2, head.in_features),)
    for strict in (False, True):
        with pytest.raises(Exception, match="full_parameters"):
            torch.export.export(head, inputs, strict=strict)
        with trainer.strategy.full_parameters():
            exported, expected = torch.export.export(head, inputs, strict=strict), head(*inputs)
        assert set(exported.graph_signature.inputs_to_parameters.values()) == set(dict(head.named_parameters()))
        assert torch.equal(exported.module()(*inputs), expected)


def test_a_training_that_measured_nothing_says_so(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    run_ranks(_short, 1, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "No step was measured" in text and "regions compiled/total" in text


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.extensive), 2])
def test_a_default_trainings_report_trace_and_profile(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    written = run_ranks(_long, ranks, tmp_path)
    assert written == [["report.html", "trace.json"], *[[]] * (ranks - 1)]
    text = (tmp_path / "report.html").read_text()
    assert "step-figure" in text and "frame0.backward" in text and "No step was measured" not in text
    rows = [f"<tr><td class=n>{rank}</td>" for rank in range(ranks)]
    assert all(row in text.partition('id="ranks"')[2].partition("</table>")[0] for row in rows), "each rank has a row"
    assert "This step is limited by" in text and "Step after step" in text
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [row["args"]["name"] for row in events if row["name"] == "process_name"]
    # A plan that measured slower is reverted, and the step before it is shown.
    when = "under the plan" if ranks > 1 and "Step 5: kept" in text else "before planning"
    assert names[1:] == [f"measured step {when}, rank {rank}" for rank in range(ranks)]
    assert ("there was nothing to plan" in text) == (ranks == 1) and ("proactive_prefetch" in text) == (ranks > 1)
