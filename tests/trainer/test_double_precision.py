"""`precision="64-true"` trains as DDP does with it: to 1e-10, resumed from a checkpoint."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import Recorder, assert_same_training, full
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy
from multiprocess import run_ranks
from test_handover import trainer_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.trainer.precision import DeepCompilePrecision

WORLD, BATCHES, ROWS = 2, 4, 3


class Heat(pl.LightningModule):
    """Solves an equation with second derivatives of the network by its inputs, which come in fp32.

    Buffers are of floating-point, complex and integer dtypes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 17), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 5), nn.Tanh(), nn.Linear(5, 1)
        )
        self.weight = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64) * 1j**0.3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, label = batch
        grid = torch.linspace(0, 1, 3) * self.scale
        assert x.dtype == grid.dtype == self.scale.dtype == torch.float64
        assert self.phase.dtype == torch.complex64 and label.dtype == torch.int64
        x = (x + grid * self.phase.real).requires_grad_()
        u = self.net(x) * self.weight
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        loss = (slope.sum(1) - u[:, 0] - label).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        assert batch[0].dtype == torch.float64
        self.log("val", self.net(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Plain(Heat):
    """A module whose step compiles as one graph."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, label = batch
        loss = (self.net(x * self.scale) * self.weight - label[:, None]).square().mean()
        self.log("loss", loss)
        return loss


def _data(rank: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(WORLD, BATCHES * ROWS, 3, generator=generator)
    return DataLoader(TensorDataset(x[rank], torch.arange(BATCHES * ROWS) % 2), batch_size=ROWS)


def _train(model: type[Heat], strategy: Any, path: Path) -> tuple[Any, dict[str, Any]]:
    """Trains for an epoch, saves, and goes on with a new module for another one."""
    rank, recorder = int(os.environ["RANK"]), Recorder()
    for epochs in (1, 2):
        torch.manual_seed(5)
        options: dict[str, Any] = {"max_epochs": epochs, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        trainer = trainer_of(strategy(), recorder, precision="64-true", **options)
        with trainer.init_module():
            module = model()
            assert module.weight.dtype == torch.float64
        trainer.fit(module, _data(rank), _data(rank), ckpt_path=None if epochs == 1 else path)
        trainer.save_checkpoint(path)
        trainer.strategy.barrier()
    recorder.record.extra = float(trainer.callback_metrics["val"])
    saved = torch.load(path, weights_only=True) if rank == 0 else {}
    return recorder.record, saved


def _compare(folder: str) -> None:
    for model in (Plain, Heat):
        reference, theirs = _train(model, DDPStrategy, Path(folder, "ddp.ckpt"))
        assert len(reference.losses) == 2 * BATCHES
        stages = (1, 2, 3) if "TEST_ALL" in os.environ else (1,)
        for stage in stages if model is Plain else (3,):
            compile = CompileConfig(region_backend="eager", schedule=None)
            strategy = functools.partial(DeepCompileStrategy, stage=stage, compile=compile)
            record, ours = _train(model, strategy, Path(folder, f"{stage}.ckpt"))
            assert_same_training(record, reference, params=True, rtol=1e-10)
            assert record.extra == pytest.approx(reference.extra, rel=1e-10)
            assert all(value.dtype == reference.params[name].dtype for name, value in record.params.items())
            for name, value in ours.get("state_dict", {}).items():
                assert value.dtype == theirs["state_dict"][name].dtype, name
            for name, value in record.buffers.items():
                torch.testing.assert_close(value, full(reference.buffers[name]), rtol=1e-10, atol=1e-12)


@pytest.mark.timeout(300)
def test_doubles_train_as_with_ddp_and_resume() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_compare, WORLD, folder, timeout=240)


def test_lightnings_plugin_is_converted() -> None:
    plugin = DeepCompilePrecision.convert(DoublePrecision())
    assert plugin.precision == "64-true" and plugin.mixed_precision_config.param_dtype is torch.float64
    with plugin.forward_context():
        assert torch.ones(1).dtype is torch.float64
