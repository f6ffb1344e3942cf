r"""Finds the longest sequence that trains within a memory budget, with activations offloaded, run again, or both.

    torchrun --nproc-per-node 2 --max-restarts 20 examples/benchmarks/longest.py --out results --memory-budget 64GiB \
        --layers 16 --first 8192 --step 2048 --minutes 9 --fixed host_memory_budget=200GiB

With ``--fsdp2`` the same is done with FSDP2, blocks compiled, and a loss that the model computes in ``--pieces`` of
tokens by its own code, with layers as they are and under checkpointing.

Each setting trains one sequence per rank: lengths are doubled from ``--first`` on until one fails, then bisected to a
multiple of ``--step``. A length fits if its plan, and the peak that was measured under it, are within the budget (of
FSDP2 there is the peak alone; on CPUs it is that of all steps, with what the model took before it was sharded); one
that runs out of the device's memory does not. Trials share processes, and compile anew. After a shortage of memory the
ranks are at different places of a step: they end, and torchrun starts them again (``--max-restarts``), to go on with
the next trial. Settings share the time (``--minutes``); no trial begins after it. The table is printed after each.

``longest.json`` holds every trial, ``longest.md`` the table. Model and steps are those of ``compare.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import report
import torch
import torch.distributed as dist
from jobs import SHAPES, Case, Job, System
from runners import TIMEOUT
from sweep import collect, run

from lightning_deepcompile.plan.budget import parse_budget

SETTINGS: dict[str, tuple[dict[str, str], bool]] = {
    "neither": ({"offload": "none"}, False),
    "offload": ({"offload": "auto"}, False),
    "checkpointing": ({"offload": "none"}, True),
    "both": ({"offload": "auto"}, True),
}
"""Options of `CompileConfig` and whether layers run again."""
FSDP2 = {"fsdp2": False, "fsdp2-checkpointing": True}
"""Settings of FSDP2, and whether layers run again."""

_SHORTAGES = ("out of memory", "no host memory", "alloc_failed")

Result = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Search:
    """The lengths that are tried with one setting.

    Attributes:
        first: The one to begin with.
        step: All are multiples of it.
        most: None is longer.
    """

    first: int
    step: int
    most: int

    def next(self, fits: dict[int, bool]) -> int | None:
        """The length to try next; None when the longest is known.

        Args:
            fits: What was tried, and whether it fitted.
        """
        best = max((length for length, good in fits.items() if good), default=0)
        worst = min((length for length, good in fits.items() if not good and length > best), default=None)
        if worst is None:
            wanted = 2 * best or max(self.first, self.step)
        else:
            wanted = (best + worst) // 2
        length = min(wanted, self.most) // self.step * self.step
        return length if length > best and length not in fits else None


@dataclass
class State:
    """The known results; rank 0 keeps them in a file, which restarted processes read.

    Attributes:
        began: When the first processes began.
        trials: Results, each with its ``setting``, ``seq`` and ``reason`` ("" if it fitted).
        running: Setting and length of the trial under way.
        broken: Settings that failed otherwise than by memory, and why.
    """

    began: float
    trials: list[Result] = field(default_factory=list)
    running: tuple[str, int] | None = None
    broken: dict[str, str] = field(default_factory=dict)

    def fits(self, setting: str) -> dict[int, bool]:
        """The lengths tried with a setting, and whether they fitted."""
        return {trial["seq"]: not trial["reason"] for trial in self.trials if trial["setting"] == setting}

    def add(self, setting: str, length: int, result: Result) -> None:
        """Takes the end of the trial under way."""
        self.trials.append({"setting": setting, "seq": length, "reason": "", **result})
        self.running = None

    def blame(self, shortage: str | None) -> None:
        """Takes the end of processes during a trial: a `shortage` of memory, or something else."""
        if self.running is None:
            return
        setting, length = self.running
        if shortage is None:
            self.broken[setting] = f"processes ended at {length}"
            self.running = None
        else:
            self.add(setting, length, {"reason": shortage})


def table(state: State) -> str:
    """A row for each setting."""
    rows = [
        "setting|longest|ms|tokens/s/GPU|peak GiB|activations in host memory GiB|first step s|next longer".split("|")
    ]
    for setting in (*SETTINGS, *FSDP2):
        trials = [trial for trial in state.trials if trial["setting"] == setting]
        good = max((trial for trial in trials if not trial["reason"]), key=lambda trial: trial["seq"], default=None)
        bad = [trial for trial in trials if trial["reason"] and (good is None or trial["seq"] > good["seq"])]
        if not trials and setting not in state.broken:
            continue
        numbers: list[Any] = [None] * 6
        if good is not None:
            away = good.get("summary", {}).get("offloaded_activation_bytes", 0) / 2**30
            numbers = [good["ms"], good["tokens_per_s_per_gpu"], good.get("peak_gib"), away, good["first_step_s"]]
            numbers = [good["seq"], *numbers]
        cells = ["-" if n is None else f"{n:.{digits}f}" for n, digits in zip(numbers, (0, 1, 0, 2, 2, 1), strict=True)]
        nearest = min(bad, key=lambda trial: trial["seq"], default=None)
        why = "not tried" if nearest is None else f"{nearest['seq']}: {_short(nearest['reason'])}"
        rows.append([setting, *cells, state.broken.get(setting, why)])
    return report.markdown(rows)


def main(argv: list[str] | None = None) -> int:
    """Searches with all settings; returns 0, as torchrun would start failed processes again."""
    arguments = parse_arguments(argv)
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    torch.set_float32_matmul_precision("high")
    state = _begin(arguments.out, rank)
    _join(rank, world)
    for number, setting in enumerate(arguments.settings):
        now, end = time.time(), state.began + 60 * arguments.minutes
        until = now + (end - now) / (len(arguments.settings) - number)
        search = Search(_of(arguments.first, number), arguments.step, arguments.most)
        while setting not in state.broken and (length := search.next(state.fits(setting))):
            if any(_gather(time.time() > until)):
                break
            state.running = setting, length
            _save(state, arguments.out, rank)
            result = _try(_job(arguments, setting, length, world), rank, arguments.budget)
            state.add(setting, length, result)
            _save(state, arguments.out, rank)
            if rank == 0:
                print(f"{setting} {length}: {_short(result['reason']) or 'fits'}\n{table(state)}", flush=True)
    _save(state, arguments.out, rank)
    dist.destroy_process_group()
    return 0


def _try(job: Job, rank: int, budget: int) -> Result:
    """Trains once; all ranks return the same reason, rank 0 the numbers, too."""
    began = time.time()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False, fail_on_recompile_limit_hit=True):
            reason = run(job, rank)
    except Exception as error:
        _end(job, rank, error)
    peak = None
    if not reason:
        peak = json.loads(Path(job.folder, f"{job.cases[0]}.rank{rank}.json").read_text()).get("peak_gib")
    left, most = (
        (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else (0, 0)
    )
    everybody = _gather((reason, peak, left, most))
    reason = next((reason for reason, *_ in everybody if reason), "")
    numbers: Result = {} if reason or rank else collect(job, "")
    left, most = (max(column) / 2**30 for column in list(zip(*everybody, strict=True))[2:])
    # Of all steps, those before there was a plan included, and of trials that were refused.
    numbers |= {"reason": reason, "seconds": time.time() - began, "left_gib": left, "most_gib": most}
    highest = max((peak for _, peak, *_ in everybody if peak is not None), default=0)
    if not reason and highest > budget / 2**30:
        numbers["reason"] = f"a peak of {highest:.2f} GiB was measured"
    return numbers


def _end(job: Job, rank: int, error: Exception) -> NoReturn:
    """Ends this process: the others may wait for it inside of a collective, and torchrun ends them."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError) or any(part in text.lower() for part in _SHORTAGES):
        Path(job.folder).mkdir(parents=True, exist_ok=True)
        Path(job.folder, f"shortage.rank{rank}").write_text(text)
        print(f"rank {rank}: {_short(text)}", file=sys.stderr, flush=True)
        os._exit(1)  # without waiting for devices and groups
    raise error


def _begin(out: Path, rank: int) -> State:
    """The state of processes that were started again; else an empty one."""
    path = out / "longest.json"
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0 or not path.exists():
        if rank == 0:
            shutil.rmtree(out / "trials", ignore_errors=True)
        return State(time.time())
    content = json.loads(path.read_text())
    state = State(**{name: content[name] for name in ("began", "trials", "running", "broken")})
    if state.running is not None:
        notes = sorted(_folder(out, *state.running).glob("shortage.rank*"))
        state.blame(notes[0].read_text() if notes else None)
    return state


def _save(state: State, out: Path, rank: int) -> None:
    if rank > 0:
        return
    out.mkdir(parents=True, exist_ok=True)
    content = {"environment": report.environment(), "arguments": sys.argv[1:], **vars(state)}
    report.write(out / "longest.json", content)
    report.write(out / "longest.md", table(state))


def _folder(out: Path, setting: str, length: int) -> Path:
    return out / "trials" / f"{setting}-{length}"


def _job(arguments: argparse.Namespace, setting: str, length: int, world: int) -> Job:
    shape = SHAPES[arguments.shape]
    cuda = torch.cuda.is_available()
    if setting in FSDP2:
        checkpointing = FSDP2[setting]
        system = System(setting, "fsdp2-pieces", {"pieces": arguments.pieces})
    else:
        options, checkpointing = SETTINGS[setting]
        fixed = System.parse("@".join(["deepcompile", *filter(None, ["+".join(arguments.fixed)])])).options
        system = System(setting, "deepcompile", fixed | options | {"memory_budget": f"{arguments.budget}B"})
    return Job(
        system=system,
        cases=[Case(length, 1, 1)],
        shape=replace(shape, layers=arguments.layers or shape.layers, checkpointing=checkpointing),
        world=world,
        device="cuda" if cuda else "cpu",
        precision="bf16" if cuda else "fp32",
        steps=arguments.steps,
        warmup=arguments.warmup,
        folder=str(_folder(arguments.out, setting, length)),
        out=str(arguments.out),
        spawned=time.time(),
        deadline=time.time() + 3600,
        memory=setting in FSDP2,
    )


def _join(rank: int, world: int) -> None:
    """Joins the process group, by a file of each start: by torchrun's store gloo fails after the first one."""
    # Files stay, and one process may start ranks several times.
    start = [str(os.getppid()), *(os.environ.get(name, "0") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))]
    device = torch.device("cuda", rank) if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device is None else "nccl",
        init_method=f"file://{tempfile.gettempdir()}/longest-{'-'.join(start)}",
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
        device_id=device,
    )


def _gather(mine: T) -> list[T]:
    everybody = [mine] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def _of(values: list[int], number: int) -> int:
    return values[min(number, len(values) - 1)]


def _short(reason: str) -> str:
    return " ".join(reason.split())[:150]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory-budget", required=True, help="of each device: bytes or a text like 64GiB")
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--fsdp2", action="store_true", help="search with FSDP2 in the end, its loss in pieces by hand")
    parser.add_argument("--pieces", type=int, default=8, help="pieces of FSDP2's loss")
    parser.add_argument("--first", nargs="+", type=int, default=[4096], help="first length, of all or of each setting")
    parser.add_argument("--step", type=int, default=1024, help="lengths are multiples of it")
    parser.add_argument("--most", type=int, default=1 << 20, help="longest length to try")
    parser.add_argument("--minutes", type=float, default=60.0, help="no trial begins later")
    parser.add_argument("--fixed", nargs="*", default=[], metavar="NAME=VALUE", help="options that all settings share")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="layers of the model, if not the shape's own number")
    parser.add_argument("--steps", type=int, default=3, help="measured optimizer steps")
    parser.add_argument("--warmup", type=int, default=12, help="optimizer steps before, among them those of planning")
    parser.add_argument("--out", type=Path, required=True, help="folder for longest.json, longest.md and trials")
    arguments = parser.parse_args(argv)
    try:
        text = arguments.memory_budget
        arguments.budget = parse_budget(int(text) if text.isdecimal() else text, total=1)
    except ValueError as error:
        parser.error(f"--memory-budget: {error}")
    if min(arguments.step, arguments.pieces, *arguments.first) < 1:
        parser.error("--first, --step and --pieces must be positive")
    if arguments.fsdp2:
        arguments.settings += FSDP2
    if not arguments.settings:
        parser.error("nothing to run: give --settings or --fsdp2")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
