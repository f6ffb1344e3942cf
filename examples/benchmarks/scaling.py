"""Predicted beside measured: a step that was measured on two ranks, on more of them and over slow links.

    python examples/benchmarks/scaling.py --node-bandwidth 0.025 --runs 2,4,8
    python examples/benchmarks/scaling.py --node-bandwidth 0.025 --runs 2,4,8,2x2,4x2 --ranks-per-node 2

Ranks are CPU processes that talk through gloo. Nodes are network namespaces, and what leaves one is limited, so links
are slow enough for communication to be most of a step even where more ranks than cores share the machine. The first run
is the one that is measured; ``4x2`` are four replicas of two ranks. Predictions use the profile of the first run, and
the bandwidth out of a node as it is given, if that run was inside of one node.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import slow_links

WIDTH, BLOCKS, ROWS = 512, 8, 4


class Run(NamedTuple):
    replicas: int
    shards: int

    @classmethod
    def parse(cls, text: str) -> Run:
        """Reads ``8``, or ``4x2``."""
        numbers = [int(part) for part in text.split("x")]
        return cls(*numbers) if len(numbers) == 2 else cls(1, *numbers)

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards

    def __str__(self) -> str:
        return f"{self.replicas}x{self.shards}" if self.replicas > 1 else f"{self.shards}"


def worker(run: Run, steps: int, out: Path) -> None:
    """Trains on this rank; rank 0 writes the profile, the rounds and the durations of the last half of the steps."""
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    torch.set_num_threads(1)

    class Stack(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (x,) = batch
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Clock(pl.Callback):
        marks: list[float] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.marks.append(time.perf_counter())

    strategy = DeepCompileStrategy(
        device_mesh=(run.replicas, run.shards) if run.replicas > 1 else None,
        compile=CompileConfig(region_backend="eager"),
    )
    clock = Clock()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
    )  # fmt: skip
    data = TensorDataset(torch.randn(ROWS * steps * run.ranks, WIDTH))
    trainer.fit(Stack(), DataLoader(data, batch_size=ROWS))
    if trainer.is_global_zero:
        profile = strategy.profile()
        seconds = [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)][steps // 2 :]
        first = strategy.report()[0]
        result = {
            "profile": None if profile is None else profile.to_json(),
            "before": first.before_seconds,
            "after": statistics.median(seconds),
            "outcome": first.outcome,
        }
        out.write_text(json.dumps(result))


def measure(run: Run, per_node: int, steps: int, folder: Path, port: int) -> dict[str, Any]:
    """Starts the ranks of a run, each on its node, and returns what rank 0 wrote."""
    nodes = -(-run.ranks // per_node)
    out = folder / f"{run}.json"
    processes = []
    for rank in range(run.ranks):
        node = rank // per_node
        environment = {
            "RANK": rank, "WORLD_SIZE": run.ranks, "LOCAL_RANK": rank % per_node,
            "LOCAL_WORLD_SIZE": min(per_node, run.ranks), "GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes,
            "MASTER_ADDR": slow_links.address(0), "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": slow_links.INTERFACE,
            "TORCHELASTIC_RUN_ID": "scaling", "TORCHELASTIC_RESTART_COUNT": 0, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        arguments = [sys.executable, __file__, "--worker", str(run), "--steps", str(steps), "--out", str(out)]
        processes.append(
            subprocess.Popen(
                [*slow_links.node_command(node), *arguments],
                env=os.environ | {name: str(value) for name, value in environment.items()},
                stdout=subprocess.DEVNULL,
                stderr=None if rank == 0 else subprocess.DEVNULL,
            )
        )
    if any([process.wait() for process in processes]):
        raise SystemExit(f"A rank of the run {run} failed.")
    return json.loads(out.read_text())


def predict(text: str, run: Run, options: argparse.Namespace, measured_inside: bool) -> tuple[float, float]:
    """Seconds of a step before planning and after it, from the profile of another run."""
    from lightning_deepcompile.plan.context import PlanContext
    from lightning_deepcompile.plan.costs import Profile
    from lightning_deepcompile.plan.known_passes import DEFAULT_SCHEDULE, resolve_passes
    from lightning_deepcompile.plan.optimize import optimize
    from lightning_deepcompile.plan.settings import PlanSettings
    from lightning_deepcompile.plan.topology import Topology

    profile = Profile.from_json(text)
    per_node = options.ranks_per_node if measured_inside else run.ranks  # else the profile's links are those of nodes
    step = options.step_latency * 1e-6
    topology = Topology(per_node, options.node_bandwidth * 1e9, step, step, run.replicas)
    there = profile.for_ranks(run.shards, topology)
    passes = resolve_passes(DEFAULT_SCHEDULE[-1]["passes"], profiled=True)
    _, effects = optimize(there.schedules, passes, PlanContext(PlanSettings(), there))
    return effects[0].prediction.seconds, effects[-1].prediction.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="2,4,8", help="ranks, or replicas x ranks; the first run is measured")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--node-bandwidth", type=float, default=0.025, help="GB/s that leave a node (0.025)")
    parser.add_argument("--step-latency", type=float, default=0.0, help="microseconds of a step, for predictions")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--worker", type=Run.parse, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="keep profiles and durations in this folder")
    options = parser.parse_args()
    if options.worker is not None:
        return worker(options.worker, options.steps, options.out)
    runs = [Run.parse(text) for text in options.runs.split(",")]
    slow_links.enter()
    slow_links.make_nodes(max(-(-run.ranks // options.ranks_per_node) for run in runs), options.node_bandwidth * 8e3)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{options.ranks_per_node} ranks a node, {options.node_bandwidth} GB/s out of it, {os.cpu_count()} cores")
        print(f"{'ranks':>6} {'unplanned, ms':>24} {'':>7} {'planned, ms':>24}")
        print(f"{'':>6} {'predicted':>12} {'measured':>11} {'':>7} {'predicted':>12} {'measured':>11}", flush=True)
        text = ""
        for number, run in enumerate(runs):
            result = measure(run, options.ranks_per_node, options.steps, folder, 29500 + number)
            text = text or result["profile"]
            inside = runs[0].ranks <= options.ranks_per_node
            cells = []
            for predicted, name in zip(predict(text, run, options, inside), ("before", "after"), strict=True):
                measured = result[name]
                cells.append(f"{predicted * 1e3:12.1f} {measured * 1e3:11.1f} {predicted / measured - 1:+7.1%}")
            print(f"{run!s:>6} {' '.join(cells)}  {result['outcome']}", flush=True)


if __name__ == "__main__":
    main()
