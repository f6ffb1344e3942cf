"""Trains a Hugging Face Llama from scratch with LightningCLI, and prints loss and tokens a second.

    python examples/train_llama.py fit --config examples/train_llama.yaml
    python examples/train_llama.py fit --config examples/train_llama.yaml --model.size 8b --data.length 1024
    python examples/train_llama.py fit --config examples/train_llama.yaml --trainer.accelerator cpu --trainer.devices 2
    python examples/train_llama.py fit --config examples/train_llama_70b.yaml

Nothing is downloaded. `--trainer.strategy fsdp` (or ddp, ...) trains the same model with another strategy.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from text_data import VOCABULARY, StdlibText, Windows
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "1b": {  # the shape of Llama 3.2 1B
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8b": {  # the shape of Llama 3 8B
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "13b": {  # the shape of Llama 2 13B, with Llama 3's vocabulary
        "vocab_size": 128_256,
        "hidden_size": 5120,
        "intermediate_size": 13_824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    "70b": {  # the shape of Llama 3 70B
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
Size = Literal["tiny", "1b", "8b", "13b", "70b"]


def llama_config(size: Size, layers: int | None = None) -> LlamaConfig:
    """The configuration of a size, for training: no cache of keys and values."""
    config = LlamaConfig(**SIZES[size], rope_theta=500_000.0, max_position_embeddings=8192, use_cache=False)
    config.num_hidden_layers = layers or config.num_hidden_layers
    return config


class Llama(LightningModule):
    """A Llama that learns to predict the next token.

    Args:
        size: Shape of the model.
        layers: Number of layers; as the size says if not given.
        lr: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        checkpointing: Whether layers keep only their inputs, and run again in backward.
        deferred_init: Build the model without memory; each rank initialises one block at a time and keeps its shard.
            For strategies that can do that.
    """

    def __init__(
        self,
        size: Size = "tiny",
        layers: int | None = None,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        checkpointing: bool = False,
        deferred_init: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: LlamaForCausalLM | None = None

    def configure_model(self) -> None:
        if self.model is None:
            with self.trainer.init_module(empty_init=True) if self.hparams.deferred_init else nullcontext():
                self.model = LlamaForCausalLM(llama_config(self.hparams.size, self.hparams.layers))
            if self.hparams.checkpointing:
                self.model.gradient_checkpointing_enable()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        h = self.hparams
        return torch.optim.AdamW(self.parameters(), lr=h.lr, betas=(0.9, 0.95), weight_decay=h.weight_decay, fused=True)


class Tokens(StdlibText):
    """Windows of tokens.

    Args:
        source: "stdlib": bytes of the Python standard library's sources; "synthetic": random tokens of the whole
            vocabulary, which cannot be learnt and are meant for measuring speed.
        length: Tokens in a window.
        batch_size: Windows in a batch, per process.
        validation_windows: How many windows validation reads.
        vocabulary: Number of distinct synthetic tokens; LightningCLI takes it from the model.
        seed: Chooses the text's validation files and crops, or the synthetic tokens.
    """

    def __init__(
        self,
        source: Literal["stdlib", "synthetic"] = "stdlib",
        length: int = 256,
        batch_size: int = 4,
        validation_windows: int = 64,
        vocabulary: int = VOCABULARY,
        seed: int = 0,
    ) -> None:
        super().__init__(length, batch_size, validation_windows, seed)
        self.source, self.vocabulary = source, vocabulary

    def setup(self, stage: str) -> None:
        if self.source == "stdlib":
            super().setup(stage)
        elif self.train is None:
            tokens = torch.randint(self.vocabulary, (2**22,), generator=torch.Generator().manual_seed(self.seed))
            self.train = Windows.random_crops(tokens, self.length, self.seed)
            self.validation = Windows.in_order(tokens, self.length, self.validation_windows)


class Throughput(Callback):
    """Prints the loss and the tokens per second of all processes, every few optimizer steps.

    Args:
        every: Optimizer steps between two lines. The first line counts the time of compiling as well.
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self.step = self.tokens = 0
        self.since = 0.0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._start(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        self.tokens += batch.numel() * trainer.world_size
        if trainer.global_step < self.step + self.every:
            return
        loss = float(outputs["loss"])  # waits for the device, so that the clock below is right
        if trainer.is_global_zero:
            rate = self.tokens / (time.perf_counter() - self.since)
            print(f"step {trainer.global_step:5d}  loss {loss:.3f}  {rate:,.0f} tokens/s", flush=True)
        self._start(trainer.global_step)

    def _start(self, step: int) -> None:
        self.step, self.tokens, self.since = step, 0, time.perf_counter()


class CLI(LightningCLI):
    """LightningCLI that tells the data how many tokens the model knows."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("model.size", "data.vocabulary", compute_fn=lambda size: SIZES[size]["vocab_size"])


if __name__ == "__main__":
    CLI(Llama, Tokens, seed_everything_default=1, save_config_callback=None)
