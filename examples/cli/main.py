"""Pretrains, finetunes and resumes a byte-level GPT with LightningCLI, and shows its loss in a progress bar.

    python examples/cli/main.py fit --config examples/cli/pretrain.yaml
    python examples/cli/main.py fit --config examples/cli/pretrain.yaml --config examples/cli/resume.yaml
    python examples/cli/main.py fit --config examples/cli/finetune.yaml
    python examples/cli/main.py validate --config examples/cli/pretrain.yaml --ckpt_path last

The settings are in the YAML files beside this one. Any can be given on the command line as well: `--trainer.devices 2`,
`--model.layers 8`. `--print_config` shows all of them, and
`fit --trainer.strategy.help lightning_deepcompile.DeepCompileStrategy` explains the strategy's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.cli import LightningCLI

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other examples have the model and the data
from gpt import GPT  # noqa: E402
from text_data import StdlibText  # noqa: E402


class Model(GPT):
    """The demo's GPT.

    Args:
        pretrained: A full checkpoint whose weights to start from; its optimizer and its step count are not used.
        **kwargs: Settings of the GPT.
    """

    def __init__(self, pretrained: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if pretrained is not None:
            self.load_state_dict(torch.load(pretrained, map_location="cpu", weights_only=True, mmap=True)["state_dict"])


class FreezeFirstBlocks(BaseFinetuning):
    """Freezes the embedding and the first blocks: for the whole training, or until an epoch begins.

    Args:
        blocks: How many blocks.
        until_epoch: The first epoch in which they are trained; None: never.
    """

    def __init__(self, blocks: int, until_epoch: int | None = None) -> None:
        super().__init__()
        self.blocks, self.until_epoch = blocks, until_epoch

    def freeze_before_training(self, module: LightningModule) -> None:
        self.freeze([module.tokens, *module.blocks[: self.blocks]])

    def finetune_function(self, module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        # The optimizer has held them from the start, and passes over what has no gradient.
        if epoch == self.until_epoch:
            self.make_trainable([module.tokens, *module.blocks[: self.blocks]])


if __name__ == "__main__":
    LightningCLI(Model, StdlibText, seed_everything_default=1, save_config_kwargs={"overwrite": True})
