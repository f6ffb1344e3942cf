"""One process: what sharding costs where there is nothing to share, beside plain ``torch.compile``.

    python examples/benchmarks/alone.py --model resnet18 mobilenet_v2 --image 96 --rounds 2

Both train the same module through Lightning's Trainer, in turn, in processes of their own, in fp32 with SGD; the median
of the measured steps is printed, and the ratio of the best rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from typing import Any

SYSTEMS = ("torch.compile", "deepcompile")


def build(name: str, classes: int = 10) -> Any:
    """A vision model of Hugging Face's without weights to download."""
    from transformers import (  # fmt: skip
        MobileNetV2Config,
        MobileNetV2ForImageClassification,
        ResNetConfig,
        ResNetForImageClassification,
    )

    if name == "resnet18":
        config = ResNetConfig(
            layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], num_labels=classes
        )
        return ResNetForImageClassification(config)
    return MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=classes))


def train(system: str, name: str, image: int, batch: int, steps: int) -> list[float]:
    """Milliseconds of each measured step."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(name)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            images, labels = batch
            return torch.nn.functional.cross_entropy(self.model(pixel_values=images).logits, labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    class Clock(pl.Callback):
        marks: list[float] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

    torch.manual_seed(0)
    warmup, clock, module = 12, Clock(), Classifier()
    strategy = "deepcompile"
    if system == "torch.compile":
        strategy, module = "auto", torch.compile(module)
    count = (warmup + steps) * batch
    data = TensorDataset(torch.randn(count, 3, image, image), torch.randint(10, (count,)))
    trainer = pl.Trainer(
        strategy=strategy, devices=1, max_epochs=1, callbacks=[clock], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=batch))
    marks = clock.marks[warmup:]
    return [1e3 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]


def main() -> None:
    """Runs all, prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=("resnet18", "mobilenet_v2"), default=["resnet18"])
    parser.add_argument("--image", type=int, default=96, help="pixels of a side")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--rounds", type=int, default=2, help="times that each system runs, in turn")
    arguments = parser.parse_args()
    shape = arguments.image, arguments.batch, arguments.steps
    context = multiprocessing.get_context("spawn")
    for name in arguments.model:
        best: dict[str, float] = {}
        for _ in range(arguments.rounds):
            for system in SYSTEMS:
                with context.Pool(1) as pool:
                    times = pool.apply(train, (system, name, *shape))
                median = statistics.median(times)
                best[system] = min(best.get(system, median), median)
                print(f"{name} {system}: {median:.1f} ms (best step {min(times):.1f})", flush=True)
        print(f"{name}: {best[SYSTEMS[1]] / best[SYSTEMS[0]]:.2f} of torch.compile", flush=True)


if __name__ == "__main__":
    main()
