"""The training of each module of the corpus, and the registry of all modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Generator
from torch.utils import _pytree as pytree

__all__ = ["CASES", "Case", "Small", "case"]


@dataclass(frozen=True)
class Case:
    """A module and how it is trained.

    Args:
        build: Makes the module.
        batch: Draws one rank's batch of one step.
        reference: What it must train like: ``"single"``, one process on the ranks' batches, concatenated; ``"ddp"``, as
            many ranks with whole parameters, where a batch's rows are not independent or random numbers are drawn.
        steps: Batches of an epoch.
        epochs: Epochs.
        same: Whether all ranks have the same batches.
        buffers: Whether buffers are compared, too; only with a single process.
        trainer: Arguments of the Trainer.
    """

    build: Callable[[], pl.LightningModule]
    batch: Callable[[Generator], Any]
    reference: Literal["single", "ddp"] = "single"
    steps: int = 4
    epochs: int = 1
    same: bool = False
    buffers: bool = True
    trainer: dict[str, Any] = field(default_factory=dict)

    def batches(self, rank: int, world_size: int) -> list[Any]:
        """Returns the batches that a rank of two reads; a single process reads both ranks' batches, concatenated."""

        def draw(step: int, rank: int) -> Any:
            return self.batch(torch.Generator().manual_seed(1000 * step + (0 if self.same else rank)))

        if world_size == 2:
            return [draw(step, rank) for step in range(self.steps)]
        both = [(draw(step, 0), draw(step, 1)) for step in range(self.steps)]
        return [pytree.tree_map(lambda *parts: torch.cat(parts), *pair) for pair in both]


CASES: dict[str, Case] = {}


def case(name: str, batch: Callable[[Generator], Any], **options: Any) -> Callable[[Any], Any]:
    """Registers the decorated class under `name`; `options` are those of `Case`."""

    def register(build: Any) -> Any:
        assert name not in CASES
        CASES[name] = Case(build, batch, **options)
        return build

    return register


class Small(pl.LightningModule):
    """SGD on all that is trained."""

    lr = 0.05

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)
