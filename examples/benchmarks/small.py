"""Small models, whose hosts are slower than their devices: Lightning's Trainer with and without this strategy.

    python examples/benchmarks/small.py --models gpt2,llama-160m --systems compile,compile-graphs,stage3,stage3-graphs

Every system trains the same Hugging Face module, in bf16-mixed with fused AdamW, in a process of its own on one GPU.
``compile-graphs`` is ``torch.compile(mode="reduce-overhead")``; ``stage1-graphs`` is `CompileConfig(cuda_graphs=True)`,
``stage1-auto`` is ``"auto"``. All systems of a model compile at the same time; then one at a time is measured, in turn.
Prints milliseconds a step (the median of the rounds), the host's part of it, and what device memory grew by while it
was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHAPES = {
    "gpt2": ("gpt2", 4, 256),
    "gpt2-long": ("gpt2", 8, 1024),
    "llama-160m": ("llama", 4, 512),
    "bert": ("bert", 16, 128),
    "vit": ("vit", 32, 0),
    "vit-large": ("vit-large", 32, 0),
    "unet": ("unet", 16, 0),  # needs diffusers
}
"""Model, rows, tokens."""

LIMIT_S = 150
"""How long processes wait for each other."""

SYSTEMS = ("compile", "compile-graphs", "stage1", "stage1-graphs", "stage3", "stage3-graphs", "stage3-auto")


@dataclass
class Turns:
    """Lets one process at a time use the GPU."""

    ready: Any  # a barrier
    one: Any  # a lock

    def wait(self) -> None:
        """Until all processes have warmed up, or have taken too long."""
        with contextlib.suppress(threading.BrokenBarrierError):
            self.ready.wait(LIMIT_S)


def build(kind: str) -> Any:
    """A model without weights to download."""
    import transformers as t

    if kind == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(use_cache=False))
    if kind == "bert":
        return t.BertForMaskedLM(t.BertConfig())
    if kind == "vit":
        return t.ViTForImageClassification(t.ViTConfig(num_labels=1000))
    if kind == "vit-large":
        large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        return t.ViTForImageClassification(t.ViTConfig(num_labels=1000, **large))
    if kind == "unet":
        from diffusers import UNet2DModel

        return UNet2DModel(sample_size=64)
    config = t.LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        use_cache=False,
    )  # fmt: skip
    return t.LlamaForCausalLM(config)


def loss_of(net: Any, batch: dict[str, Any]) -> Any:
    """The loss of a step: the model's own, or for a diffusion model the error of the noise that it finds."""
    from torch.nn import functional as F

    if "noise" not in batch:
        return net(**batch).loss
    return F.mse_loss(net(batch["sample"], batch["timestep"]).sample, batch["noise"])


def batches(kind: str, rows: int, tokens: int, count: int) -> list[dict[str, Any]]:
    """Random ones that are on the device."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    random: Callable[..., Any] = lambda high, *size: torch.randint(high, size, generator=generator, device="cuda")  # noqa: E731
    if kind == "unet":
        images = lambda: torch.randn(rows, 3, 64, 64, device="cuda")  # noqa: E731
        return [{"sample": images(), "noise": images(), "timestep": random(1000, rows)} for _ in range(count)]
    if kind.startswith("vit"):
        return [
            {"pixel_values": torch.randn(rows, 3, 224, 224, device="cuda"), "labels": random(1000, rows)}
            for _ in range(count)
        ]
    return [(lambda ids: {"input_ids": ids, "labels": ids})(random(30000, rows, tokens)) for _ in range(count)]


def train(system: str, shape: str, steps: int, warmup: int, rounds: int, turns: Turns) -> dict[str, Any]:
    """Times of the steps of one system."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    kind, rows, tokens = SHAPES[shape]

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = build(kind)

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.busy = 0.0
            self.losses: list[Any] = []
            self.allocated = self.grown = 0
            self._since = self._begun = 0.0

        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            step = batch_idx - warmup
            if step >= 0 and step % steps == 0:
                torch.cuda.synchronize()
                if step == 0:
                    turns.wait()
                    self.allocated = torch.cuda.memory_allocated()
                turns.one.acquire()
                self._since = time.perf_counter()
            self._begun = time.perf_counter()

        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
            step = batch_idx - warmup
            if step < 0:
                return
            self.busy += time.perf_counter() - self._begun
            if (step + 1) % steps == 0:
                torch.cuda.synchronize()
                self.times.append(1e3 * (time.perf_counter() - self._since) / steps)
                turns.one.release()
                self.losses.append(out["loss"].item())
                self.grown = torch.cuda.memory_allocated() - self.allocated

    clock, module = Clock(), Model()
    if system.startswith("stage"):
        config = CompileConfig(cuda_graphs="auto" if system.endswith("-auto") else system.endswith("-graphs"))
        strategy: Any = DeepCompileStrategy(stage=int(system[5]), compile=config)
    else:
        strategy = "auto"
        mode = "reduce-overhead" if system.endswith("-graphs") else "default"
        module.net = torch.compile(module.net, mode=mode)
    count = warmup + rounds * steps
    few = batches(kind, rows, tokens, 8)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="gpu", devices=1, precision="bf16-mixed", max_epochs=1, callbacks=[clock],
        use_distributed_sampler=False,  # all systems see the batches in one order
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    trainer.fit(module, DataLoader([few[i % 8] for i in range(count)], batch_size=None))
    summary = trainer.strategy.summary() if system.startswith("stage") else None
    return {
        "shape": shape,
        "system": system,
        "ms": statistics.median(clock.times),
        "least": min(clock.times),
        "host_ms": 1e3 * clock.busy / (rounds * steps),
        "grown_mib": clock.grown / 2**20,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "losses": clock.losses,
        "replayed": summary and [summary.replayed, *summary.not_replayed],
    }


def main() -> None:
    """Runs all, prints a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="gpt2", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=30, help="steps before the first round")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for shape in arguments.models.split(","):
        systems = arguments.systems.split(",")
        turns, results = Turns(context.Barrier(len(systems)), context.Lock()), context.Queue()
        settings = arguments.steps, arguments.warmup, arguments.rounds, turns
        processes = [
            context.Process(target=_measure, args=(results, system, shape, *settings), daemon=True)
            for system in systems
        ]
        for process in processes:
            process.start()
        for _ in systems:
            print(json.dumps(results.get(timeout=2 * LIMIT_S)), flush=True)
        for process in processes:
            process.join()


def _measure(results: Any, system: str, shape: str, *arguments: Any) -> None:
    try:
        results.put(train(system, shape, *arguments))
    except Exception as error:
        arguments[-1].ready.abort()  # the others go on without
        results.put({"shape": shape, "system": system, "error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
