"""A training on two ranks that fails in a step: on all of them, or on one. Run as a script, as users do."""

from __future__ import annotations

import sys

import lightning.pytorch as pl
from cases import Mlp, Tokens
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy


class Failing(Mlp):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1 and str(self.global_rank) in sys.argv[1]:
            raise ValueError("mine")
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    trainer = pl.Trainer(
        strategy=DeepCompileStrategy(compile=CompileConfig(region_backend="eager")), accelerator="cpu", devices=2,
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Failing(), DataLoader(Tokens(4, 4, 0, 1), batch_size=4))
