"""Programs as CUDA graphs: in every bit what they are without."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import CASES, VOCAB, Base, Record, same_bits_every_time, train
from multiprocess import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]


class Dropped(Base):
    """Draws random numbers, and writes to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, VOCAB)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.2, self.training)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Scheduled(Dropped):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TwoPasses(Dropped):
    """The same program runs twice before its backward pass: the second run must not touch what the first one saved."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses = [self._loss(batch[:, shift : shift + 8]) for shift in (0, 2)]
        self.log("loss", losses[0])
        return losses[0] + losses[1] * 2

    def _loss(self, tokens: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        loss = F.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        torch._dynamo.graph_break()
        return loss


@torch.library.custom_op("deepcompile_tests::largest", mutates_args=())
def largest(x: Tensor) -> Tensor:
    """Nothing says so, but the host waits in it."""
    return x.new_tensor(float(x.abs().max()))


@largest.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(())


class ReadsOnHost(Dropped):
    """Cannot be recorded."""

    def logits(self, tokens: Tensor) -> Tensor:
        logits = super().logits(tokens)
        return logits + 0.01 * largest(logits.detach())


class Evaluates(pl.Callback):
    """Runs the model for itself between two training steps, as a callback that samples does."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 13:
            module.eval()
            with torch.no_grad():
                trainer.strategy.validation_step(batch, 0)
            module.train()


class Meanwhile(pl.Callback):
    """Between steps: a graph of the user's own, other programs, and memory that is given back."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                x.add_(1)
            graph.replay()
            assert x.eq(1).all()
        elif batch_idx == 7:
            trainer.strategy.engine.capture.replan()
        elif batch_idx == 13:
            torch.cuda.empty_cache()


MODELS = {**CASES, "dropped": Dropped, "scheduled": Scheduled, "two_passes": TwoPasses, "reads": ReadsOnHost}

RUNS: list[tuple[str, int, dict[str, Any]]] = [
    ("scheduled", 3, {"accumulate": 1, "gradient_clip_val": 0.5}),
    ("dropped", 3, {"accumulate": 3, "gradient_clip_val": 0.5, "callbacks": [Evaluates()]}),
    ("dropped", 2, {"accumulate": 3}),
    ("dropped", 1, {"accumulate": 3}),
    ("gpt_tied", 1, {"optimizer": "adamw"}),
    ("dropped", 3, {"steps": 16, "callbacks": [Meanwhile()]}),
    ("frozen", 3, {}),
    ("graph_break", 3, {}),
    ("two_passes", 3, {}),
    ("reads", 3, {}),
    ("llama_checkpointing", 3, {"precision": "bf16-mixed"}),
]


def _run(number: int, graphs: bool, world: int) -> Record:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    name, stage, options = RUNS[number]
    config = CompileConfig(region_backend="inductor" if number == 0 else "eager", cuda_graphs=graphs, schedule=None)
    torch._dynamo.reset()
    return train(
        MODELS[name],
        DeepCompileStrategy(stage=stage, compile=config, timeout=timedelta(seconds=60)),
        world_size=world,
        rank=int(os.environ["RANK"]),
        inspect=lambda trainer: trainer.strategy.summary(),
        accelerator="gpu",
        **{"steps": 7, **options},
    )


def _train_all(world: int) -> list[tuple[Record, Record]]:
    same_bits_every_time()
    return [(_run(number, False, world), _run(number, True, world)) for number in range(len(RUNS))]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_bit_changes(world: int) -> None:
    for pairs in run_ranks(_train_all, world, world, timeout=450):
        for (name, stage, options), (plain, replayed) in zip(RUNS, pairs, strict=True):
            case = f"{name} at stage {stage} with {options}: {replayed.extra}"
            assert replayed.losses == plain.losses, case
            for step, (left, right) in enumerate(zip(plain.grads, replayed.grads, strict=True)):
                for key, grad in left.items():
                    other = right[key]
                    assert (grad is None) == (other is None), f"step {step}, {key}: {case}"
                    assert grad is None or torch.equal(grad, other), f"step {step}, {key}: {case}"
            for key, value in plain.params.items():
                assert torch.equal(value, replayed.params[key]), f"{key}: {case}"
            for key, value in plain.buffers.items():
                assert torch.equal(value, replayed.buffers[key]), f"{key}: {case}"
            assert plain.extra.replayed == 0, case
            if name == "reads":
                assert replayed.extra.replayed == 0 and len(replayed.extra.not_replayed) == 1, case
            else:
                assert replayed.extra.replayed > 0 and replayed.extra.not_replayed == (), case


def _auto() -> Any:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    config = CompileConfig(cuda_graphs="auto", schedule=None)
    strategy = DeepCompileStrategy(compile=config, timeout=timedelta(seconds=60))
    outcomes: list[str] = []

    def inspect(trainer: pl.Trainer) -> Any:
        outcomes.append(trainer.strategy.engine.capture.replays.outcome)
        return trainer.strategy.summary()

    record = train(
        CASES["llama"],
        strategy,
        world_size=1,
        rank=0,
        steps=110,
        inspect=inspect,
        accelerator="gpu",
        precision="bf16-mixed",
    )
    return record.extra.replayed, outcomes[0]


def test_auto_finds_a_host_that_is_late() -> None:
    ((replayed, outcome),) = run_ranks(_auto, 1)
    assert replayed == 2 and "CUDA graphs are kept" in outcome, (replayed, outcome)
