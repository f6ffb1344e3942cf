"""Batches of other sizes: the graphs that they cost, what is said of them, and what comes after the last."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import Record, Recorder, assert_same_training
from test_handover import trainer_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy

VOCAB = 41


class Llama(pl.LightningModule):
    """A small Llama of Transformers; `sizes` are rows and lengths of the batches, or of those of validation."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=1, use_cache=False)  # fmt: skip
        self.net = LlamaForCausalLM(config)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(**batch).loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(sizes: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
    def one(step: int, rows: int, length: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (rows, length), generator=generator)
        mask = torch.ones_like(tokens)
        mask[0, length // 2 :] = 0
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}

    return [one(step, *size) for step, size in enumerate(sizes)]


class PerDocument(pl.LightningModule):
    """A batch is a list of documents: another number of them is another program."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = torch.cat(batch)
        return F.cross_entropy(self.head(self.embed(tokens)), tokens.roll(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lists(counts: list[int]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randint(0, VOCAB, (3,), generator=generator) for _ in range(count)] for count in counts]


def train(build: Any, strategy: Any, *data: list[Any]) -> tuple[Record, pl.Trainer]:
    """Trains, and validates if there is data for it."""
    torch.manual_seed(3)
    module, recorder = build(), Recorder()
    trainer = trainer_of(strategy, recorder, num_sanity_val_steps=0)
    trainer.fit(module, *(DataLoader(one, batch_size=None) for one in data))
    return recorder.record, trainer


def compiled() -> DeepCompileStrategy:
    return DeepCompileStrategy(compile=CompileConfig(region_backend="eager", schedule=None))


FIXED, RAGGED = [(4, 8)] * 5, [(4, 8), (4, 11), (4, 6), (4, 9), (4, 13)]
# Sizes of training and of validation, graphs, and what the summary says of them.
SIZES: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]], int, list[str]]] = {
    "all the same": (FIXED, FIXED[:2], 2, []),
    "a smaller last batch": (
        [*FIXED, (3, 8)], FIXED[:2], 3, ["batch['input_ids'], dimension 0 and 2 others (3, 4): 1 graph"],
    ),
    "a last batch of one": (
        [*FIXED, (1, 8)], FIXED[:2], 3, ["batch['input_ids'], dimension 0 and 2 others (1, 4): 1 graph"],
    ),
    "ragged, and validation": (  # whose first graph is of any length
        RAGGED, RAGGED[::-1], 3, ["batch['input_ids'], dimension 1 and 2 others (5 sizes from 6 to 13): 1 graph"],
    ),
}  # fmt: skip
COUNTS = list(range(2, 21))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.extensive] if name in ("all the same", "a last batch of one") else [])
        for name in SIZES
    ],
)
def test_graphs_of_sizes(name: str) -> None:
    training, validation, graphs, said = SIZES[name]
    record, trainer = train(Llama, compiled(), batches(training), batches(validation))
    assert_same_training(record, train(Llama, "auto", batches(training))[0], params=True)
    summary = trainer.strategy.summary()
    assert (summary.graphs, list(summary.size_graphs)) == (graphs, said)
    assert not summary.uncompiled and all(text in str(summary) for text in said)


def test_after_sixteen_graphs_the_step_is_python() -> None:
    record, trainer = train(PerDocument, compiled(), lists(COUNTS))
    assert_same_training(record, train(PerDocument, "auto", lists(COUNTS))[0], params=True)
    summary = trainer.strategy.summary()
    assert (summary.graphs, summary.size_graphs) == (16, ("len(batch) (19 sizes from 2 to 20): 15 graphs",))
    (function,) = summary.uncompiled
    assert "training_step" in function and "compiled more than 16 times" in function and "len(batch)" in function
    assert summary.compile_seconds > 0 and summary.uncompiled_share == 1
