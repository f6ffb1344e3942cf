"""A tiny model on many CPU ranks of one machine: it trains, is saved, resumes on another number of ranks, and agrees.

    python examples/benchmarks/many_ranks.py --ranks 8,32,64

Every number of ranks trains the same batches as one process without sharding, saves a sharded checkpoint half-way, and
the next number of ranks resumes from there. Losses are compared with those of the one process; the exit status is 1
where they differ by more than rounding does. The table has the time that a rank computes for a step: its main thread,
which does all but communication, and its process, of which most are gloo's threads. Ranks share the machine's cores, so
the duration of a step says little.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, BLOCKS, VOCABULARY, LENGTH = 48, 4, 96, 8
WIDTHS = (6, 16, 12, 10, 9, 10, 11)  # of the table's columns
AGREES = 1e-5
PRELOADED = ["torch._inductor.compile_fx", "lightning_deepcompile.trainer.strategy", "lightning.pytorch"]


class Task(NamedTuple):
    """The task of the ranks: train from `first` to `last`, from the checkpoint `resume` on, and save `save` at the end.

    Args:
        ranks: How many; 0 is one process without this package.
        rows: Of a global batch.
    """

    ranks: int
    rows: int
    first: int
    last: int
    resume: str | None
    save: str | None
    port: int
    out: str


def work(task: Task, rank: int) -> None:
    """Writes this rank's losses, host seconds of steps, and seconds until the first step was over."""
    begin = time.perf_counter(), time.process_time(), time.thread_time()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task.ranks), LOCAL_WORLD_SIZE=str(task.ranks),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task.port), TORCHELASTIC_RUN_ID="many",
        TORCHELASTIC_RESTART_COUNT="0", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # rank 0 speaks for all
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, IterableDataset

    torch.set_num_threads(1)
    losses: list[float] = []
    marks: list[tuple[float, ...]] = []

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
                for _ in range(BLOCKS)
            )
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def training_step(self, tokens: Any, index: int) -> Any:
            x = self.embed(tokens[:, :-1])
            for block in self.blocks:
                x = x + block(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    class Batches(IterableDataset):
        """This rank's parts of batches, without a length: Lightning resumes an epoch that has one otherwise."""

        def __iter__(self) -> Any:
            batches = torch.randint(
                0, VOCABULARY, (task.last, task.rows, LENGTH), generator=torch.Generator().manual_seed(1)
            )
            for batch in batches[task.first :]:
                yield batch.chunk(world)[rank]

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))
            marks.append((time.perf_counter(), time.process_time(), time.thread_time()))

    world = max(task.ranks, 1)
    options: dict[str, Any] = {"devices": world}
    if task.ranks:
        from lightning_deepcompile import CompileConfig, DeepCompileStrategy

        compile = CompileConfig(region_backend="eager")
        options["strategy"] = DeepCompileStrategy(compile=compile, state_dict_type="sharded")
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=task.last, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, callbacks=[Watch()], **options,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(Batches(), batch_size=None), ckpt_path=task.resume)
    if task.save is not None:
        trainer.save_checkpoint(task.save)
    steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(marks, marks[1:], strict=False)]
    wall, host, main = (statistics.median(column) for column in zip(*steps[len(steps) // 2 :], strict=True))
    start, start_host, _ = (b - a for a, b in zip(begin, marks[0], strict=True))
    result = {"losses": losses, "wall": wall, "host": host, "main": main, "start": start, "start_host": start_host}
    Path(task.out, f"{rank}.json").write_text(json.dumps(result))
    os._exit(0)  # threads of communication may wait for ranks that have ended


def run(context: Any, task: Task, minutes: float) -> list[dict[str, Any]]:
    """Returns the results that every rank wrote."""
    Path(task.out).mkdir()
    ranks = [context.Process(target=work, args=(task, rank)) for rank in range(max(task.ranks, 1))]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 60 * minutes
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0))
    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
    failed = [rank for rank in range(len(ranks)) if not Path(task.out, f"{rank}.json").exists()]
    if late or failed:
        raise SystemExit(f"{task.ranks} ranks: {failed} wrote nothing, and {late} were killed after {minutes} minutes.")
    return [json.loads(Path(task.out, f"{rank}.json").read_text()) for rank in range(len(ranks))]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def mean_losses(results: list[dict[str, Any]]) -> list[float]:
    """Of a global batch, step by step: ranks have equally many rows."""
    return [statistics.fmean(row) for row in zip(*(one["losses"] for one in results), strict=True)]


def worst(losses: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,32,64", help="numbers of ranks, each after the other")
    parser.add_argument("--steps", type=int, default=16, help="of each half")
    parser.add_argument("--minutes", type=float, default=20, help="after which a run is given up")
    options = parser.parse_args()
    counts = [int(text) for text in options.ranks.split(",")]
    rows, half, steps = max(counts), options.steps, 2 * options.steps
    if any(rows % count for count in counts):
        raise SystemExit(f"--ranks {options.ranks}: each has to divide the largest, so that ranks have equal batches.")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:

        def task(
            name: str, ranks: int, first: int, last: int, resume: str | None = None, save: str | None = None
        ) -> Task:
            return Task(ranks, rows, first, last, resume, save, free_port(), os.path.join(folder, name))

        expected = mean_losses(run(context, task("one", 0, 0, steps), options.minutes))
        print(f"one process: loss {expected[0]:.6f} to {expected[-1]:.6f} in {steps} steps of {rows} rows")
        heads = ("ranks", "main thread, ms", "process, ms", "step, ms", "start, s", "computing", "differs by")
        print(" ".join(f"{head:>{width}}" for head, width in zip(heads, WIDTHS, strict=True)))
        saved: dict[int, str] = {}
        differences: list[float] = []
        for count in counts:
            saved[count] = os.path.join(folder, f"{count}.ckpt")
            results = run(context, task(f"{count}", count, 0, half, save=saved[count]), options.minutes)
            names = ("main", "host", "wall", "start", "start_host")
            own, host, wall, start, start_host = (statistics.fmean(one[name] for one in results) for name in names)
            differences.append(worst(mean_losses(results), expected[:half]))
            cells = [f"{count}", *(f"{1e3 * seconds:.1f}" for seconds in (own, host, wall)), f"{start:.1f}"]
            cells += [f"{start_host:.2f}", f"{differences[-1]:.1e}"]
            print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)), flush=True)
        for before, after in zip(counts, [*counts[1:], counts[0]], strict=True):
            resumed = task(f"{before}to{after}", after, half, steps, resume=saved[before])
            differences.append(worst(mean_losses(run(context, resumed, options.minutes)), expected[half:]))
            print(f"saved by {before} ranks, resumed by {after}: losses differ by {differences[-1]:.1e}", flush=True)
    if max(differences) > AGREES:
        raise SystemExit(f"Losses differ by {max(differences):.1e} from those of one process, more than {AGREES:.0e}.")


if __name__ == "__main__":
    main()
