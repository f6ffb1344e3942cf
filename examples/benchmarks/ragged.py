"""Batches of random rows and lengths, another in every step and on every rank: this strategy beside FSDP2.

    torchrun --nproc-per-node 2 examples/benchmarks/ragged.py --shape 1b --steps 500 --system deepcompile
    torchrun --nproc-per-node 2 examples/benchmarks/ragged.py --shape 1b --steps 500 --system fsdp2

``fsdp2`` shards every block with ``fully_shard`` and compiles it with ``torch.compile(dynamic=True)``. Prints, of the
last half of the steps, milliseconds per 1000 tokens of all ranks, on CPUs also those of the processes' CPU time, which
other processes of a busy machine disturb less; the time of the steps before; and, of this strategy, graphs, compile
time, rounds of planning, rank skew, and the peak that was predicted and measured.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from models import shard_with_fsdp2
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {"tiny": (64, 192, 4, 4, 512), "small": (256, 768, 6, 8, 4096), "1b": (2048, 8192, 16, 32, 32_000)}
"""Hidden size, intermediate size, layers, heads, vocabulary."""


class End(NamedTuple):
    """The end of a step: the time, CPU seconds of the process until then, and the step's tokens."""

    time: float
    cpu: float
    tokens: int


class Ragged(IterableDataset[Tensor]):
    """Batches of 1 to `rows` rows of `shortest` to `longest` tokens."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.rank = options, rank

    def __iter__(self) -> Iterator[Tensor]:
        options, draw = self.options, random.Random(self.rank)
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(options.steps):
            size = draw.randint(1, options.rows), draw.randint(options.shortest, options.longest)
            yield torch.randint(0, SHAPES[options.shape][-1], size, generator=generator)


class Model(pl.LightningModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        hidden, intermediate, layers, heads, vocab = SHAPES[options.shape]
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            vocab_size=vocab,
            max_position_embeddings=max(options.longest, 2048),
            use_cache=False,
        )
        self.net = LlamaForCausalLM(config)
        self.ends: list[End] = []
        self.began, self.seconds = time.perf_counter(), options.seconds

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.trainer.should_stop = self.took(batch)

    def took(self, batch: Tensor) -> bool:
        """Notes the end of a step; returns whether it is the last one, for want of time."""
        if batch.is_cuda:
            torch.cuda.synchronize()
        self.ends.append(End(time.perf_counter(), time.process_time(), batch.numel()))
        if len(self.ends) % 20:
            return False
        spent = torch.tensor(self.ends[-1].time - self.began, device=batch.device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)  # all ranks stop after the same step
        if dist.get_rank() == 0:
            print(f"{len(self.ends)} steps, {float(spent):.0f} s", flush=True)
        return float(spent) > self.seconds

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=torch.cuda.is_available())


def run_deepcompile(options: argparse.Namespace, rank: int, world: int) -> tuple[list[End], list[str]]:
    """Trains with this strategy; returns the ends of steps, and what it says of them."""
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend=options.backend))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=world,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        max_steps=options.steps,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    model = Model(options)
    trainer.fit(model, DataLoader(Ragged(options, rank), batch_size=None))
    return model.ends, [str(strategy.summary()), *map(str, strategy.report())]


def run_fsdp2(options: argparse.Namespace, rank: int, world: int) -> tuple[list[End], list[str]]:
    """Trains with FSDP2 in a plain loop."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    model = Model(options).to(device)
    mesh = dist.init_device_mesh(device.type, (world,))
    shard_with_fsdp2(
        model.net,
        model.net.model.layers,
        mesh,
        torch.bfloat16 if on_gpu else None,
        compiled=options.backend == "inductor",
        dynamic=True,
    )
    optimizer = model.configure_optimizers()
    for batch in Ragged(options, rank):
        batch = batch.to(device)
        optimizer.zero_grad()
        model.training_step(batch).backward()
        optimizer.step()
        if model.took(batch):
            break
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if on_gpu else "not counted"
    return model.ends, [f"peak {peak}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=["deepcompile", "fsdp2"], default="deepcompile")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor", help="eager: nothing is fused")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=math.inf, help="ends training early, after so many seconds")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--shortest", type=int, default=5)
    parser.add_argument("--longest", type=int, default=2000)
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run = run_deepcompile if options.system == "deepcompile" else run_fsdp2
    ends, texts = run(options, rank, world)
    half = len(ends) // 2
    first, last = ends[half - 1], ends[-1]
    sums = torch.tensor([float(sum(end.tokens for end in ends[half:])), last.cpu - first.cpu])
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.all_reduce(sums := sums.to("cuda" if dist.get_backend() == "nccl" else "cpu"))
    if rank == 0:
        tokens, cpu = sums.tolist()
        on_cpu = "" if torch.cuda.is_available() else f" ({cpu * 1e6 / tokens:.3f} ms of CPU time)"
        print(*texts, sep="\n")
        print(
            f"{options.system} {options.shape} ({options.backend}), {world} ranks, {len(ends)} steps: "
            f"{(last.time - first.time) * 1e6 / tokens:.3f} ms per 1000 tokens{on_cpu}; "
            f"{first.time - ends[0].time:.0f} s before"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
