"""Models and a training recorder for the equality tests: the same code runs sharded, and alone as the reference."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from multiprocess import devices
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_deepcompile import compat
from lightning_deepcompile.plan.plan_file import Setting, write_plan
from lightning_deepcompile.plan.tracing import Tracing

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

VOCAB, LENGTH, ROWS = 61, 12, 2  # ROWS per rank and micro-batch

ONLY: dict[str, Any] = {"offload": "none", "rounding": "same"}
"""Settings with which memory is kept by what a test asks for alone."""


def traced_as(
    tracing: Tracing, world_size: int, stage: int = 3, device_type: str = "cpu", memory_budget: str | None = None
) -> dict[str, Any]:
    """Settings of a run that starts with a plan file that has no schedules, but says how the step is traced."""
    path = Path(tempfile.mkdtemp()) / "plan.json"
    setting = Setting(world_size, stage, device_type, memory_budget, "needed")
    path.write_text(write_plan([], setting, None, tracing))
    return {"rounding": "needed", "plan": str(path)}


class Tokens(Dataset[Tensor]):
    """Random token rows. A rank reads its part of every global batch; the reference (world 1) reads all of it."""

    def __init__(self, batches: int, global_rows: int, rank: int, world_size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        data = torch.randint(0, VOCAB, (batches, global_rows, LENGTH + 1), generator=generator)
        self.data = data.chunk(world_size, dim=1)[rank].flatten(0, 1)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


class Base(pl.LightningModule):
    """Next-token training; subclasses build ``self.net`` or override `logits`."""

    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD

    def logits(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.logits(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log(
            "val", F.cross_entropy(self.logits(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()), sync_dist=True
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer_class is torch.optim.SGD:
            return torch.optim.SGD(trainable, lr=0.1)
        return torch.optim.AdamW(trainable, lr=1e-3)


class Mlp(Base):
    """Sizes that no world size divides; a scalar, a parameter with fewer rows than ranks, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 13)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 13)) for _ in range(3))
        self.head = nn.Linear(13, VOCAB)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.one_row = nn.Parameter(torch.full((1, 13), 0.3))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(3, 3)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.one_row
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Frozen(Mlp):
    """The first layer and the embedding are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layers[0].requires_grad_(False)


class GraphBreak(Mlp):
    """Two graph breaks: between layers, and between the model and the loss."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.one_row
        x = x + self.layers[0](x)
        torch._dynamo.graph_break()
        x = x + self.layers[1](x)
        x = x + self.layers[2](x)
        logits = self.head(x)
        torch._dynamo.graph_break()
        return logits


class Skipped(Mlp):
    """A layer runs in code that Dynamo is told to leave alone: its parameters are gathered eagerly."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.one_row
        x = x + self.layers[0](x)
        x = x + torch.compiler.disable(self.layers[1].forward)(x)
        x = x + self.layers[2](x)
        return self.head(x)


class Recurrent(Base):
    """An LSTM keeps a list of its weights beside the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 10)
        self.rnn = nn.LSTM(10, 14, batch_first=True)
        self.head = nn.Linear(14, VOCAB)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


class Normed(Base):
    """Batch norm has buffers that the step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, VOCAB)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = F.gelu(layer(x))
        self.norm(x.transpose(1, 2))  # its statistics are updated; its output would differ with the batch
        return self.head(x)


def gpt(tied: bool = False, layers: int = 2) -> Callable[[], Base]:
    """The demo's byte GPT, small."""

    def build() -> Base:
        from gpt import GPT

        class Small(Base):
            def __init__(self) -> None:
                super().__init__()
                self.net = GPT(layers=layers, width=24, heads=2, vocabulary=VOCAB, tied=tied)

        return Small()

    return build


def llama(tied: bool = False, checkpointing: bool = False, layers: int = 3) -> Callable[[], Base]:
    """A Hugging Face Llama, small."""

    def build() -> Base:
        from transformers import LlamaConfig, LlamaForCausalLM

        class Llama(Base):
            def __init__(self) -> None:
                super().__init__()
                config = LlamaConfig(
                    vocab_size=VOCAB,
                    hidden_size=16,
                    intermediate_size=36,
                    num_hidden_layers=layers,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    tie_word_embeddings=tied,
                    use_cache=False,
                )
                self.net = LlamaForCausalLM(config)
                if checkpointing:
                    self.net.gradient_checkpointing_enable()

            def logits(self, tokens: Tensor) -> Tensor:
                return self.net(input_ids=tokens).logits

        return Llama()

    return build


CASES: dict[str, Callable[[], Base]] = {
    "mlp": Mlp,
    "frozen": Frozen,
    "graph_break": GraphBreak,
    "skipped": Skipped,
    "recurrent": Recurrent,
    "normed": Normed,
    "gpt": gpt(),
    "gpt_tied": gpt(tied=True),
    "llama": llama(),
    "llama_tied": llama(tied=True),
    "llama_checkpointing": llama(checkpointing=True),
}


@dataclass
class Record:
    """The record of a training run.

    Args:
        losses: Mean loss over ranks of every micro-batch.
        grads: Per optimizer step, full gradients by name (None where there is none).
        params: Full parameters at the end, by name.
        buffers: Buffers at the end.
        extra: What `inspect` returned.
    """

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    extra: Any = None


def same_bits_every_time() -> None:
    """Makes GPUs add in the same order every time; call before the first use of one."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)  # else gradients of embeddings are added by atomics
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its gradient in fp32 has no other way than atomics


def full(tensor: Tensor | None) -> Tensor | None:
    """A tensor's global value as a CPU copy."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (compat.full_tensor(tensor) if isinstance(tensor, DTensor) else tensor).cpu().clone()


class Recorder(pl.Callback):
    """Fills a `Record`."""

    def __init__(self) -> None:
        self.record = Record()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.record.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone())))

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.record.grads.append({name: full(p.grad) for name, p in module.named_parameters()})

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.record.params = {name: full(p) for name, p in module.named_parameters()}
        self.record.buffers = {name: full(b) for name, b in module.named_buffers()}


def train(
    build: Callable[[], Base],
    strategy: Any,
    *,
    world_size: int,
    rank: int,
    optimizer: str = "sgd",
    steps: int = 5,
    accumulate: int = 1,
    inspect: Callable[[pl.Trainer], Any] | None = None,
    data_world: int | None = None,
    data: Callable[[int, int, int, int], Dataset[Any]] = Tokens,
    **trainer_kwargs: Any,
) -> Record:
    """Trains a model for `steps` optimizer steps and records losses, gradients and parameters.

    Args:
        build: Makes the module, seeded here.
        strategy: Lightning strategy.
        world_size: Ranks that share each global batch.
        rank: This rank.
        optimizer: ``"sgd"`` or ``"adamw"``.
        steps: Optimizer steps.
        accumulate: Micro-batches per step.
        inspect: Called with the trainer after training.
        data_world: Ranks whose batches make the global batch; by default `world_size`.
        data: Makes a rank's batches as `Tokens` does, with its arguments.
        **trainer_kwargs: For the Trainer.
    """
    torch.manual_seed(3)
    module = build()
    module.optimizer_class = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
    rows = ROWS * (data_world or world_size)
    batches = data(steps * accumulate, rows, rank, world_size)
    recorder = Recorder()
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "32-true", **devices(world_size), **trainer_kwargs}
    callbacks = [recorder, *options.pop("callbacks", [])]
    trainer = pl.Trainer(
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(module, DataLoader(batches, batch_size=rows // world_size))
    if inspect is not None:
        recorder.record.extra = inspect(trainer)
    return recorder.record


def assert_close(actual: Tensor | None, expected: Tensor | None, name: str, rtol: float = 1e-5) -> None:
    """Elementwise with `rtol`; elements far below the tensor's own size are measured against that size.

    A sum of many terms that cancel carries the rounding of its terms: such an element says nothing relative to itself.
    """
    assert (actual is None) == (expected is None), f"{name}: {actual} against {expected}"
    if actual is not None and expected is not None:
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * scale, msg=lambda m: f"{name}: {m}")


def assert_same_training(actual: Record, expected: Record, *, params: bool, rtol: float = 1e-5) -> None:
    """Compares two records: losses, gradients, buffers, and parameters if asked."""
    assert len(actual.losses) == len(expected.losses) > 0
    assert_close(torch.tensor(actual.losses), torch.tensor(expected.losses), "losses", rtol)
    assert len(actual.grads) == len(expected.grads) > 0
    for step, (ours, theirs) in enumerate(zip(actual.grads, expected.grads, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_close(ours[name], theirs[name], f"step {step} gradient of {name}", rtol)
    if params:
        for name in expected.params:
            assert_close(actual.params[name], expected.params[name], name, rtol)
