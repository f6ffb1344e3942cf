"""Checkpoints on GPUs: exact resuming, and how little of the model is ever whole on a device."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from multiprocess import GPU_RANKS, devices, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

WIDTH, LAYERS = 2048, 8


class Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.square().mean()

    def on_train_batch_end(self, outputs: Tensor, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def _run(folder: Path, form: str) -> None:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    def trainer(steps: int, **kwargs: object) -> pl.Trainer:
        return pl.Trainer(
            strategy=DeepCompileStrategy(state_dict_type=form, compile=CompileConfig(region_backend="eager")),
            accelerator="gpu",
            **devices(GPU_RANKS),
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **kwargs,
        )

    def peak_of(action: object) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        return torch.cuda.max_memory_allocated() - before

    torch.manual_seed(0)
    # Each step gets the same batch, so that a resumed run need not know where in the epoch it was.
    data = DataLoader(torch.randn(1, WIDTH).expand(8, WIDTH) * (1 + int(os.environ["RANK"])), batch_size=2)
    whole, path = WIDTH * WIDTH * 4, folder / form
    first = trainer(2, precision="16-mixed")
    first.fit(Wide(), data)
    scale = first.precision_plugin.state_dict()
    saving = peak_of(lambda: first.save_checkpoint(path))
    assert saving <= (1.1 * whole if form == "full" else 0.1 * whole)
    strategy = first.strategy
    checkpoint = strategy.load_checkpoint(path)
    loading = peak_of(lambda: strategy.load_model_state_dict(checkpoint))
    assert loading <= 0.1 * whole
    assert checkpoint["DeepCompilePrecision"] == checkpoint["MixedPrecision"] == scale

    torch.manual_seed(0)
    uninterrupted = Wide()
    trainer(4).fit(uninterrupted, data)
    torch.manual_seed(0)
    half = trainer(2)
    half.fit(Wide(), data)
    half.save_checkpoint(folder / f"half_{form}")
    resumed = Wide()  # other values: they come from the checkpoint
    trainer(4).fit(resumed, data, ckpt_path=folder / f"half_{form}")
    assert resumed.losses == uninterrupted.losses[2:]


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_saving_and_loading_stream(tmp_path: Path, form: str) -> None:
    run_ranks(_run, GPU_RANKS, tmp_path, form)
