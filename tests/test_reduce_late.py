"""Gradients of accumulated micro-batches that travel once per optimizer step (``CompileConfig(reduce="boundary")``)."""

from __future__ import annotations

import os
from typing import Any

import pytest
from cases import CASES, Record, assert_same_training, train
from multiprocess import run_ranks

ACCUMULATE, STEPS = 3, 11  # a round of planning, that profiles step 3, and two steps more


def _inspect(trainer: Any) -> dict[str, Any]:
    strategy = trainer.strategy
    return {
        "stats": strategy.engine.runtime.stats(),
        "profile": strategy.profile(),
        "rounds": strategy.report(),
    }


def _train_all(runs: list[tuple[int, str | None]]) -> dict[Any, Record]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    return {
        (stage, reduce): train(
            CASES["gpt_tied"],
            DeepCompileStrategy(stage=stage, compile=CompileConfig(region_backend="eager", reduce=reduce)),
            world_size=2,
            rank=int(os.environ["RANK"]),
            accumulate=ACCUMULATE,
            steps=STEPS,
            inspect=_inspect,
        )
        for stage, reduce in runs
    }


@pytest.mark.timeout(300)
def test_it_changes_how_often_gradients_travel_and_nothing_else() -> None:
    runs = [(3, None), (3, "boundary"), (2, "boundary"), (1, "every")]
    expected = train(CASES["gpt_tied"], "auto", world_size=1, rank=0, data_world=2, accumulate=ACCUMULATE, steps=STEPS)
    for results in run_ranks(_train_all, 2, runs, timeout=250):
        often = results[3, None].extra["stats"]["reductions"]
        for (stage, reduce), record in results.items():
            assert_same_training(record, expected, params=True)
            times = ACCUMULATE if reduce == "boundary" else 1
            assert record.extra["stats"]["reductions"] * times == often, (stage, reduce)
        assert results[3, None].extra["profile"].hold_seconds is None
        late = results[3, "boundary"].extra
        assert late["profile"].hold_seconds > 0 and late["profile"].reduce.bandwidth > 0
        assert len(late["rounds"]) == 1 and late["rounds"][0].after_seconds is not None
