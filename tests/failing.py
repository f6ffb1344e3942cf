"""A training on two ranks that fails in a step: on all of them, or on one. Run as a script, as users do.

Behind a comma, a rank that takes its time to print an error.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning.pytorch as pl
from cases import Mlp, Tokens
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy


class Failing(Mlp):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1 and str(self.global_rank) in sys.argv[1].partition(",")[0]:
            raise ValueError("mine")
        return super().training_step(batch, batch_idx)


def _print_late(*error: Any) -> None:
    time.sleep(7)  # Lightning looks every five seconds for processes that have ended
    sys.__excepthook__(*error)


if __name__ == "__main__":
    if os.environ.get("LOCAL_RANK", "0") in sys.argv[1].partition(",")[2]:
        sys.excepthook = _print_late
    trainer = pl.Trainer(
        strategy=DeepCompileStrategy(compile=CompileConfig(region_backend="eager")), accelerator="cpu", devices=2,
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Failing(), DataLoader(Tokens(4, 4, 0, 1), batch_size=4))
