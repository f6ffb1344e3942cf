"""Complex parameters, as spectral layers have, train as in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import LENGTH, VOCAB, Base, Record, assert_same_training, train
from multiprocess import run_ranks
from torch import Tensor, nn

from lightning_deepcompile import CompileConfig, DeepCompileStrategy


class Spectral(Base):
    """Mixes positions by products of frequencies with complex weights, in a number of rows that 2 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.frequencies = nn.Parameter(torch.randn(LENGTH // 2 + 1, 6, dtype=torch.complex64) * 0.5)
        self.head = nn.Linear(6, VOCAB)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.frequencies, n=LENGTH, dim=1))


class ByNorms(torch.optim.Optimizer):
    """Steps by the ratio of two norms of each tensor: on owner ranks."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = parameter.norm() / (parameter.grad.norm() + 1e-3)
                parameter.add_(parameter.grad * ratio, alpha=-group["lr"])
        return loss


class SpectralByNorms(Spectral):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ByNorms(self.parameters())


# Module, optimizer, stage and arguments of the Trainer.
RUNS: dict[str, tuple[type[Base], str, int, dict[str, Any]]] = {
    "clipped": (Spectral, "sgd", 3, {"accumulate": 2, "gradient_clip_val": 0.05}),
    "AdamW, stage 1": (Spectral, "adamw", 1, {}),
    "by norms": (SpectralByNorms, "sgd", 3, {}),
}


def _run(run: str, strategy: Any, world_size: int, **options: Any) -> Record:
    module, optimizer, _, arguments = RUNS[run]
    rank = int(os.environ.get("RANK", "0")) if world_size > 1 else 0
    return train(
        module, strategy, world_size=world_size, rank=rank, data_world=2, optimizer=optimizer, steps=3,
        **arguments, **options,
    )  # fmt: skip


def _train_all(device_type: str) -> dict[str, Record]:
    accelerator = "cpu" if device_type == "cpu" else "gpu"
    return {
        run: _run(run, DeepCompileStrategy(stage=stage, compile=CompileConfig(region_backend="eager")), 2,
                  accelerator=accelerator)
        for run, (_, _, stage, _) in RUNS.items()
    }  # fmt: skip


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_complex_parameters_train_as_in_one_process(device_type: str) -> None:
    results = run_ranks(_train_all, 2, device_type)
    for run, (_, optimizer, _, _) in RUNS.items():
        expected = _run(run, "auto", 1)
        for result in results:
            frequencies = result[run].params["frequencies"]
            assert frequencies is not None and frequencies.is_complex()
            assert_same_training(result[run], expected, params=optimizer == "sgd")
