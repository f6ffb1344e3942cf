"""The cases of docs/open_in_lightning.md train on two CPU ranks as under DDP, in one launch of ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from multiprocess import run_ranks
from pages import ROOT
from test_handover import trainer_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WORLD, STEPS, WIDTH = 2, 4, 7
"""No dimension is a multiple of two."""


class Base(pl.LightningModule):
    """Two layers of odd sizes, and the losses of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.seen: list[float] = []

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.encode(batch[0])), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SeveralForwards(Base):
    """Both views go through the encoder before a backward pass."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        first, second = self.encode(x), self.encode(x + 0.1)
        return F.mse_loss(first, second.detach()) + F.mse_loss(self.head(second), y)


class Alternates(Base):
    """Two optimizers train two parts in turns; the other part gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        optimizer = self.optimizers()[batch_idx % 2]
        self.toggle_optimizer(optimizer)
        loss = F.mse_loss(self.encode(x), x) if batch_idx % 2 == 0 else F.mse_loss(self.head(x), y)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.blocks, self.head)]


class Validates(Base):
    """Rank 1 has one batch more to validate than rank 0."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", F.mse_loss(self.head(self.encode(batch[0])), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["val"]))


CASES: dict[str, tuple[type[Base], Callable[[], dict[str, Any]]]] = {
    "on CPUs": (Base, dict),
    "clipping by norm": (Base, lambda: {"gradient_clip_val": 0.05}),
    "several forward passes": (SeveralForwards, dict),
    "optimizers in turns": (Alternates, dict),
    "averaged weights": (Validates, lambda: {"callbacks": [EMAWeightAveraging(decay=0.5)]}),
    "uneven validation": (Validates, dict),
}


def _loader(batches: int, rank: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3 * batches, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=3)


def _losses(strategy: Any, name: str) -> list[float]:
    kind, arguments = CASES[name]
    rank = int(os.environ["RANK"])
    torch.manual_seed(2)
    module = kind()
    options = arguments()
    callbacks = options.pop("callbacks", [])
    trainer = trainer_of(strategy, *callbacks, max_steps=STEPS, num_sanity_val_steps=0, **options)
    validation = {"averaged weights": 2, "uneven validation": 1 + rank}.get(name)
    trainer.fit(module, _loader(STEPS, rank), None if validation is None else _loader(validation, rank))
    return module.seen


def _both() -> dict[str, tuple[list[float], list[float]]]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    config = CompileConfig(region_backend="eager", schedule=None)
    return {
        name: (
            _losses(DeepCompileStrategy(compile=config), name),
            _losses(DDPStrategy(find_unused_parameters=True), name),
        )
        for name in CASES
    }


def test_what_is_open_in_lightning_trains_as_under_ddp() -> None:
    for results in run_ranks(_both, WORLD, timeout=200):
        for name, (ours, expected) in results.items():
            assert len(ours) >= STEPS and ours == pytest.approx(expected, rel=1e-5), name
        plain, clipped = results["on CPUs"][0], results["clipping by norm"][0]
        assert plain[0] == clipped[0] and plain[1] != clipped[1], "clipping does something"


def test_the_page_has_a_row_for_each_case_and_names_tests_that_exist() -> None:
    page = (ROOT / "docs/open_in_lightning.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ") and "---" not in line][1:]
    named = re.findall(r"`(tests/\S+?\.py)`", page)
    assert len(rows) >= len(CASES) and {f"case `{name}`" for name in CASES} <= {row[-2].strip() for row in rows}
    assert named and all((ROOT / path).is_file() for path in named)
