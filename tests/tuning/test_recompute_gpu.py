"""Activation checkpointing only as far as memory asks for it, on GPUs: the same losses, within the budget."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import VOCAB, same_bits_every_time
from multiprocess import GPU_RANKS, run_ranks
from test_gpu import LIMIT, Curve, _fit
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS, LAYERS = 20, 12
TRACED, PLANNED = 5, 10  # the first steps of what is traced anew, and of its plan


class Peaks(pl.Callback):
    """The most memory of every step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, *args: Any) -> None:
        self.bytes.append(torch.cuda.max_memory_allocated())


def _batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randint(0, VOCAB, (STEPS, 32, 257), generator=generator).cuda(int(os.environ["LOCAL_RANK"])))


def _train(modes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    from gpt import Block

    from lightning_deepcompile import CompileConfig, DeepCompileStrategy
    from lightning_deepcompile.plan import fit_measured

    fit_measured._GAIN = 0.0  # ranks that share a GPU wait for each other most of the time
    same_bits_every_time()
    results = {}
    for mode, options in modes.items():
        torch.manual_seed(0)
        module, peaks = Curve(layers=LAYERS), Peaks()
        config = CompileConfig(**options)
        strategy = DeepCompileStrategy(timeout=LIMIT, compile=config, activation_checkpointing_policy={Block})
        _fit(module, strategy, _batches(int(os.environ["RANK"])), [peaks])
        results[mode] = {
            "losses": torch.stack(module.losses).tolist(),
            "peaks": peaks.bytes,
            "kept": strategy.engine.capture.tracing.uncheckpointed,
            "rounds": strategy.report(),
        }
    return results


def test_as_many_blocks_keep_their_activations_as_the_budget_admits() -> None:
    fixed = run_ranks(_train, GPU_RANKS, {"always": {"schedule": None}, "auto": {"rounding": "any"}}, timeout=280)
    for result in fixed:
        always, auto = result["always"], result["auto"]
        assert auto["kept"] == LAYERS and auto["rounds"][0].outcome == "retraced", auto["rounds"]
        assert auto["losses"] == pytest.approx(always["losses"], rel=1e-3)  # other operators are fused, in bf16
        assert auto["peaks"][-1] > always["peaks"][-1]
    least, most = (max(result[mode]["peaks"][-1] for result in fixed) for mode in ("always", "auto"))
    budget = (least + most) // 2
    some = {"some": {"rounding": "any", "memory_budget": budget}}
    for result, before in zip(run_ranks(_train, GPU_RANKS, some, timeout=280), fixed, strict=True):
        assert 0 < result["some"]["kept"] < LAYERS, result["some"]["rounds"]
        assert result["some"]["losses"] == pytest.approx(before["always"]["losses"], rel=1e-3)
        peaks = result["some"]["peaks"]
        assert max(peaks[TRACED:PLANNED]) <= budget and max(peaks[PLANNED:]) <= budget, result["some"]["rounds"]
