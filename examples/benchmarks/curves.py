r"""Losses of a long run on real text: the same model, data and seeds under each system, and their difference.

    torchrun --nproc-per-node 2 examples/benchmarks/curves.py --steps 2000 --out results/curves \
        --systems fsdp2,deepcompile,deepcompile@stage=2,deepcompile@stage=1,deepcompile-fp8
    python examples/benchmarks/curves.py --plot results/curves

The model is a Llama whose tokens are bytes, the text is the source of Python's standard library, and a rank's batches
follow from the step and the rank. ``curves.json`` has the loss of every step, the mean over all ranks. The first system
is what others are compared with. With ``--deterministic`` a system's losses repeat bit by bit: what differs then is
neither the order in which attention adds up nor the data.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from jobs import SHAPES, Shape, System
from models import adamw, build_model, convert_to_fp8, shard_with_fsdp2
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))
from text_data import VOCABULARY, read_bytes, source_files, split_files  # noqa: E402

SYSTEMS = ("fsdp2", "deepcompile", "deepcompile-fp8")
CHART = "curves.png"
RESULTS = "curves.json"
_LAST = 100
"""Steps whose mean loss is printed, at the end."""


class Text(IterableDataset[Tensor]):
    """A rank's batches, one for each step."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self._options, self._rank = options, rank
        self._text = read_bytes(split_files(source_files(), seed=0)[0])

    def __iter__(self) -> Iterator[Tensor]:
        options = self._options
        for step in range(options.steps):
            generator = torch.Generator().manual_seed(step * 1000 + self._rank)
            starts = torch.randint(len(self._text) - options.length, (options.rows,), generator=generator)
            yield torch.stack([self._text[start : start + options.length].long() for start in starts.tolist()])


class Module(pl.LightningModule):
    """The model, as its user writes it."""

    def __init__(self, shape: Shape, device: str, recipe: str | None) -> None:
        super().__init__()
        self.model = build_model(shape, device)
        if recipe:
            convert_to_fp8(self.model, recipe, device)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


def _train_deepcompile(module: Module, system: System, options: argparse.Namespace, rank: int, world: int) -> None:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    settings = {key: value for key, value in system.options.items() if key not in ("stage", "recipe")}
    stage = system.options.get("stage", 3)
    trainer = pl.Trainer(
        accelerator=options.device,
        devices=world,
        strategy=DeepCompileStrategy(stage=stage, compile=CompileConfig(**settings)),
        precision="bf16-mixed" if options.device == "cuda" else "32-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(Text(options, rank), batch_size=None))


def _train_fsdp2(module: Module, options: argparse.Namespace, rank: int, world: int) -> None:
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    module.to(device)
    mesh = dist.init_device_mesh(options.device, (world,))
    shard_with_fsdp2(
        module.model, module.model.model.layers, mesh, torch.bfloat16 if options.device == "cuda" else None
    )
    optimizer = module.configure_optimizers()
    for batch in Text(options, rank):
        batch = batch.to(device)
        loss = module.training_step(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        module.on_train_batch_end({"loss": loss}, batch, 0)


def train(system: System, options: argparse.Namespace, rank: int, world: int) -> dict[str, Any]:
    """Trains with one system; returns the losses, means over all ranks, and the seconds that it took."""
    began = time.perf_counter()
    shape = SHAPES[options.shape]
    shape = replace(shape, vocab=VOCABULARY, layers=options.layers or shape.layers)
    module = Module(shape, f"cuda:{rank}" if options.device == "cuda" else "cpu", system.recipe)
    if system.kind == "fsdp2":
        _train_fsdp2(module, options, rank, world)
    else:
        _train_deepcompile(module, system, options, rank, world)
    losses = torch.stack(module.losses).float().to(f"cuda:{rank}" if options.device == "cuda" else "cpu")
    dist.all_reduce(losses)
    return {"losses": (losses / world).tolist(), "seconds": time.perf_counter() - began}


def summary(curves: dict[str, dict[str, Any]]) -> list[str]:
    """Compares every curve with the first one, a line each."""
    (first, base), *_ = curves.items()
    lines = []
    for name, curve in curves.items():
        pairs = list(zip(curve["losses"], base["losses"], strict=True))
        mean, apart = fmean(curve["losses"][-_LAST:]), max(abs(mine - other) for mine, other in pairs)
        same = next((step for step, (mine, other) in enumerate(pairs) if mine != other), len(pairs))
        equal = next((step for step, (mine, other) in enumerate(pairs) if abs(mine - other) > 1e-5 * other), len(pairs))
        compared = f"; {same} steps equal to {first}'s, {equal} to 1e-5, at most {apart:.4f} apart"
        lines.append(
            f"{name}: mean loss of the last {min(_LAST, len(pairs))} steps {mean:.4f}"
            + ("" if name == first else compared)
            + f"; {curve['seconds']:.0f} s"
        )
    return lines


def draw(curves: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws all curves, and below them their differences from the first one; both as means of 20 steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained"
    )
    (first, base), *_ = curves.items()
    for number, (name, curve) in enumerate(curves.items()):
        style = {"color": f"C{number}", "linewidth": 1}
        upper.plot(*zip(*_means(curve["losses"]), strict=True), label=name, **style)
        if name != first:
            apart = _means([mine - other for mine, other in zip(curve["losses"], base["losses"], strict=True)])
            lower.plot(*zip(*apart, strict=True), **style)
    upper.set_ylabel("loss")
    lower.set_ylabel(f"difference from {first}")
    lower.set_xlabel("step")
    upper.legend()
    figure.savefig(path, dpi=120)


def _means(values: list[float], width: int = 20) -> list[tuple[int, float]]:
    starts = range(0, len(values), width)
    return [(start + width // 2, fmean(values[start : start + width])) for start in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw what is in this folder, and train nothing")
    parser.add_argument("--systems", default="fsdp2,deepcompile", help=f"of {', '.join(SYSTEMS)}; options follow an @")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, help="layers of the model, if not the shape's own number")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--deterministic", action="store_true", help="only kernels that always add up in one order")
    parser.add_argument("--out", type=Path, default=Path("results/curves"))
    options = parser.parse_args()
    if options.plot:
        curves = json.loads((options.plot / RESULTS).read_text())
        draw(curves, options.plot / CHART)
        print(*summary(curves), sep="\n")
        return
    systems = [System.parse(text) for text in options.systems.split(",")]
    if unknown := [system.name for system in systems if system.kind not in SYSTEMS]:
        parser.error(f"--systems {', '.join(unknown)}: choose from {', '.join(SYSTEMS)}")
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    curves = {}
    for system in systems:
        curves[system.name] = train(system, options, rank, world)
        torch._dynamo.reset()
        if rank == 0:  # what has run is kept, whatever happens to the rest
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / RESULTS).write_text(json.dumps(curves))
            print(summary(curves)[-1], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
