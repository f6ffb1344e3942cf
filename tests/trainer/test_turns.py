"""Ranks that run different programs of one step take turns, and train as DDP does that looks for unused parameters."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from cases import Record, assert_close, train
from lightning.pytorch.strategies import DDPStrategy
from multiprocess import run_ranks
from shuffle import KEEPING
from test_handover import Small
from torch import Tensor

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.plan.known_passes import DEFAULT_PASSES


class _Two(Small):
    count = 2


class _RankDependentPath(_Two):
    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.one_row
        for layer in self.layers if os.environ["RANK"] == "0" else list(self.layers)[::-1]:
            x = x + layer(x)
        return self.head(x)


class _RankDependentPlan(_Two):
    """Two steps run alike; then one rank keeps what it gathered for backward, and the other gathers it again."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            passes = KEEPING if os.environ["RANK"] == "0" else DEFAULT_PASSES
            self.trainer.strategy.engine.capture.scheduling.replan(passes=passes)


class _Parting(_Two):
    """Takes one of two layers of one size in turn; in one step its ranks take different ones."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.turn = (batch_idx + (int(os.environ["RANK"]) if batch_idx == 4 else 0)) % 2

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.one_row
        return self.head(x + (self.layers[0](x) if self.turn else self.layers[1](x)))


class _PartingUncompiled(_Parting):
    """Does so in code that is not compiled."""

    logits = torch.compiler.disable(_Parting.logits)


class _OneUncompiled(_Two):
    """One rank keeps its code away from the compiler."""

    def on_train_start(self) -> None:
        if os.environ["RANK"] == "1":
            self.logits = torch.compiler.disable(self.logits)


class _OneTrainsLess(_Parting):
    """One rank has no gradient for what comes first, and no program that would have any."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.one_row
        if os.environ["RANK"] == "1":
            x = x.detach()
        torch._dynamo.graph_break()
        return self.head(x + (self.layers[0](x) if self.turn else self.layers[1](x)))


MODELS = [_RankDependentPath, _RankDependentPlan, _OneUncompiled, _OneTrainsLess]
if "TEST_ALL" in os.environ:  # all are trained in one launch
    MODELS += [_Parting, _PartingUncompiled]


def _train(stage: int, accumulate: int) -> dict[str, tuple[Record, Record, int]]:
    """Returns, by model, its record, that of DDP, and the number of times ranks took turns."""
    results = {}
    for build in MODELS:
        config = CompileConfig(region_backend="eager")
        strategy = DeepCompileStrategy(stage=stage, compile=config)
        settings: dict[str, Any] = {"world_size": 2, "rank": int(os.environ["RANK"]), "steps": 6}
        settings["accumulate"] = accumulate
        ours = train(build, strategy, **settings, inspect=lambda trainer: trainer.strategy.engine.timeline.order.turns)
        if build is _RankDependentPlan:
            build = _Two
        ddp = DDPStrategy(find_unused_parameters=True, process_group_backend="gloo")
        results[build.__name__] = ours, train(build, ddp, **settings), ours.extra
        torch._dynamo.reset()
    return results


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("stage", "accumulate"), [(3, 1), *(pytest.param(*run, marks=pytest.mark.extensive) for run in ((1, 2), (2, 1)))]
)
def test_they_train_as_under_ddp(stage: int, accumulate: int) -> None:
    for results in run_ranks(_train, 2, stage, accumulate, timeout=380):
        assert len(results) == len(MODELS)
        for name, (ours, expected, turns) in results.items():
            assert turns > 0, f"{name}: the case is none"
            assert_close(torch.tensor(ours.losses), torch.tensor(expected.losses), f"{name}: losses")
            for parameter, value in expected.params.items():
                assert_close(ours.params[parameter], value, f"{name}: {parameter}")
