"""The host's work for each parameter in a step: a count of calls, which does not depend on the machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_deepcompile
from lightning_deepcompile import CompileConfig, DeepCompileStrategy

PACKAGE = str(Path(lightning_deepcompile.__file__).parent)
STEPS = 8


class Layers(pl.LightningModule):
    """A chain of linear layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=True)


class Calls(pl.Callback):
    """Counts calls of the package's functions in the last step."""

    count = 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            sys.setprofile(self._note)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        self.count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_calls_few_functions_for_each_parameter(stage: int) -> None:
    counts = []
    for layers in (4, 8):
        calls = Calls()
        config = CompileConfig(region_backend="eager", schedule=None)
        trainer = pl.Trainer(
            strategy=DeepCompileStrategy(stage=stage, compile=config), accelerator="cpu", devices=1, max_epochs=1,
            callbacks=[calls], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Layers(layers), DataLoader(torch.randn(STEPS, 2, 4), batch_size=None))
        counts.append(calls.count)
    for_each = (counts[1] - counts[0]) / 8  # a weight and a bias more for each of four layers
    assert 0 < for_each <= 15, counts
