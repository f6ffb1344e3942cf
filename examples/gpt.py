"""A byte-level GPT as a plain LightningModule. Nothing in this file knows that parameters may be sharded."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F


def rotations(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles by which rotary embeddings turn the features of each position."""
    frequencies = 10_000.0 ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / -width)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of features (one of the first half, one of the second) by the angle of its position."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width={width} must be a multiple of 2 * heads={2 * heads}: features come in pairs.")
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(LightningModule):
    """Predicts each byte of a text from those before it.

    Args:
        layers: Number of blocks.
        width: Features per position.
        heads: Attention heads; twice their number divides `width`.
        vocabulary: Number of distinct tokens.
        tied: Let the output layer share the embedding's weight.
        lr: Learning rate of AdamW, reached after `warmup` steps.
        warmup: Steps over which the learning rate rises.
        weight_decay: Weight decay of AdamW.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        vocabulary: int = 256,
        tied: bool = False,
        lr: float = 2e-3,
        warmup: int = 20,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            # Small enough that the first prediction is close to uniform; layers that add to the residual stream
            # start smaller the more of them there are.
            if parameter.dim() > 1:
                depth = math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the token after each position."""
        x = self.tokens(tokens)
        cos, sin = rotations(tokens.shape[1], x.shape[-1] // self.hparams.heads, x.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        """Returns the mean cross entropy, in nats, of predicting each token of `batch` but the first."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.log("train_bits_per_byte", loss / math.log(2), prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_bits_per_byte", loss / math.log(2), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        h = self.hparams
        optimizer = torch.optim.AdamW(self.parameters(), lr=h.lr, betas=(0.9, 0.95), weight_decay=h.weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, h.warmup)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
