r"""Compares ways to train a model with sharded parameters: one call, all systems and cases, one table.

    python examples/benchmarks/compare.py --systems deepcompile,fsdp,fsdp2,roofline \
        --cases 512x1x1,1024x1x1,4096x1x1,1024x1x4 --shape llama3-8b --out results

Every system runs in a process group of its own, one after another; its cases share that group and its model. All train
the same model: fp32 parameters, bf16 compute and reduction (fp32 on CPU), fused AdamW, activation checkpointing only
with ``--checkpointing``, random tokens that already sit on the device. A group that fails or stands still is ended as a
whole, its case is reported as failed, and the rest goes on. ``results.json``, ``table.md`` and ``log.txt`` are kept up
to date; with matplotlib there is a ``plot.png`` in the end.

Models are Llamas, or mixtures of experts (``mixtral-8x7b``, ``olmoe-1b-7b``; ``--layers`` makes them fewer), as
Transformers has them. Every system builds the whole model on each device before it shards it, and is skipped where that
cannot fit; with ``--deferred-init`` deepcompile initialises shards block by block. Of experts, TFLOP/s count those that
a token is sent to; memory, communication and the optimizer are of all.

``--systems deepcompile,deepcompile@reduce=boundary+symmetric_memory=false`` compares settings of ``CompileConfig``.
``--systems deepspeed,deepspeed@compile=true,deepspeed-deepcompile`` compares with DeepSpeed, where it is installed;
``deepspeed@offload_optimizer=cpu`` is ZeRO-Offload (``deepspeed_setup.py`` says what is set and how to change it):

    python examples/benchmarks/compare.py --shape llama3-70b --layers 10 --checkpointing --cases 1024x1x1 \
        --systems deepcompile@offload=all,deepcompile@offload=auto,deepspeed@offload_optimizer=cpu --case-limit 500 \
        --out results

FP8 layers of torchao, with weights that travel as FP8 and with weights that do not:

    python examples/benchmarks/compare.py --shape llama3-8b --layers 8 --cases 4096x1x1,8192x1x1,16384x1x1 \
        --systems deepcompile,deepcompile-fp8,deepcompile-fp8-wide,fsdp2,fsdp2-fp8,fsdp2-fp8-wide --out results

Nodes that sockets connect, on the GPUs of one host: FSDP2 over all ranks and as HSDP, and what is chosen by itself:

    NCCL_SOCKET_NTHREADS=4 python examples/benchmarks/compare.py --nodes 2 --shape llama3-1b --cases 2048x1x1,2048x1x8 \
        --systems deepcompile,deepcompile@device_mesh=auto,fsdp2,fsdp2-hsdp --out results

``--optimizer muon`` compares Muon on owner ranks with Muon on FSDP2's DTensors:

    python examples/benchmarks/compare.py --optimizer muon --shape llama3-8b --layers 8 --cases 1024x1x1,4096x1x4 \
        --systems deepcompile,fsdp2,roofline --out results
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import deepspeed_setup
import plot
import report
from groups import WorkerGroup
from jobs import DEEPSPEED, OPTIMIZERS, SHAPES, SYSTEMS, Case, Job, Shape, System

GRACE_S = 45
"""A case begun before the deadline may end this long after it."""


class Comparison:
    """Runs systems one after another and keeps the results on disk up to date."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self._arguments, self._scratch = arguments, scratch
        self._out: Path = arguments.out
        self._out.mkdir(parents=True, exist_ok=True)
        self._log_file = (self._out / "log.txt").open("w")
        self._began = time.time()
        self._deadline = self._began + arguments.time_budget
        self._results: list[report.Result] = []
        self._phases: list[dict[str, Any]] = []
        self._environment = report.environment()

    def run(self) -> bool:
        """Runs everything; returns whether no case failed."""
        try:
            for system in self._arguments.systems:
                reason = self._unable(system)
                if reason:
                    self._miss(system, self._arguments.cases, "skipped", reason)
                    continue
                self._run_system(system)
                if self._arguments.warm and system.kind == "deepcompile":
                    self._run_warm(system)
        finally:
            print("\n" + self._save())
            if plot.can_draw():
                plot.draw(self._results, self._out / "plot.png")
        return all(result["status"] != "failed" for result in self._results)

    def _unable(self, system: System) -> str | None:
        if system.kind in ("fsdp", "fsdp2-graphs", "fsdp2-offload") and self._arguments.device == "cpu":
            return f"{system.kind} needs GPUs"
        if self._arguments.deferred_init:
            return None if system.kind.startswith("deepcompile") else "--deferred-init is for deepcompile alone"
        if self._arguments.device == "cuda" and (
            reason := too_large(system, self._arguments.shape, report.gpu_bytes())
        ):
            return reason
        if self._arguments.optimizer != "adamw" and (system.kind == "fsdp" or system.kind in DEEPSPEED):
            return f"it is not measured with --optimizer {self._arguments.optimizer}"
        if system.kind in DEEPSPEED:
            return deepspeed_setup.unable(system, self._arguments.device)
        return None

    def _run_system(self, system: System) -> None:
        """Runs the cases of a system; a case that ends its group is left out, and the rest starts in a new group."""
        remaining = list(self._arguments.cases)
        while remaining and time.time() < self._deadline:
            cases = remaining[:1] if system.case_by_case else remaining
            group, error = self._run_group(self._job(system, cases), system.name, self._results.append)
            remaining = [case for case in remaining if case not in group.finished]
            if error is None:
                if group.finished:
                    continue
                break
            culprit = group.running()
            failed = [culprit] if culprit else cases
            self._miss(system, failed, "failed", f"{error}\n{group.log_tail()}")
            remaining = [case for case in remaining if case not in failed]
        self._miss(system, remaining, "skipped", f"the time budget of {self._arguments.time_budget:.0f} s was used up")
        self._save()

    def _run_warm(self, system: System) -> None:
        """Measures the first case's start once more, in fresh processes that find the caches of the first run."""
        case = self._arguments.cases[0]
        cold = next((r for r in self._results if (r["system"], r["case"]) == (system.name, str(case))), None)
        if cold is None or cold["status"] != "ok" or time.time() > self._deadline:
            return

        def keep(warm: report.Result) -> None:
            cold["warm_first_step_s"] = warm["first_step_s"]
            cold["warm_compile_s"] = warm["compiled"]["compile_seconds"]

        job = replace(self._job(system, [case]), steps=1, warmup=1, profile=None)
        group, error = self._run_group(job, f"{system.name} (warm)", keep)
        if error:
            self._log(f"{system.name} (warm): {error}\n{group.log_tail()}")

    def _job(self, system: System, cases: list[Case]) -> Job:
        arguments = self._arguments
        folder = self._scratch / f"job{len(self._phases)}"
        folder.mkdir()
        profile = next((case for name, case in arguments.profile if name == system.name and case in cases), None)
        return Job(
            system=system,
            cases=cases,
            shape=arguments.shape,
            world=arguments.world,
            device=arguments.device,
            precision=arguments.precision,
            steps=arguments.steps,
            warmup=arguments.warmup,
            folder=str(folder),
            out=str(self._out),
            spawned=time.time(),
            deadline=self._deadline,
            profile=profile,
            memory=self._arguments.memory,
            optimizer=self._arguments.optimizer,
            nodes=self._arguments.nodes,
        )

    def _run_group(self, job: Job, label: str, keep: Callable[[report.Result], None]) -> tuple[WorkerGroup, str | None]:
        cache = (self._arguments.cache_dir or self._scratch / "cache") / job.system.name.replace("@", "-")
        cache.mkdir(parents=True, exist_ok=True)
        self._log(f"{label}: starting {job.world} workers for {', '.join(map(str, job.cases))}")
        group = WorkerGroup(job, cache)

        def on_case(case: Case) -> None:
            result = report.join_ranks(job.system, case, job.shape, group.records(case))
            self._log(f"{label} {case}: {result['ms']:.1f} ms, first step {result['first_step_s']:.1f} s")
            for text in result.get("rounds", ()):
                self._log(text)
            keep(result)
            self._save()

        error = group.wait(self._arguments.case_limit, self._deadline + GRACE_S, on_case)
        begun = {str(case): seconds for case, seconds in group.begun()}
        seconds = time.time() - job.spawned
        self._phases.append({"system": label, "seconds": seconds, "case_begun_after_s": begun})
        marks = ", ".join(f"{case} at {at:.1f}" for case, at in begun.items())
        self._log(f"{label}: took {seconds:.1f} s ({marks or 'no case begun'})")
        print(group.log_tail(20), file=self._log_file, flush=True)
        described = Path(job.folder, "environment.json")
        if described.exists():
            self._environment |= json.loads(described.read_text())
        return group, error

    def _miss(self, system: System, cases: list[Case], status: str, reason: str) -> None:
        for case in cases:
            self._results.append(report.missing(system, case, status, reason))
            self._log(f"{system.name} {case}: {status}: {report.headline(reason)}")
        if status == "failed":
            self._log(reason)

    def _save(self) -> str:
        arguments = self._arguments
        table = report.tables(self._results, arguments.systems, arguments.cases)
        report.write(self._out / "table.md", table)
        settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "cache_dir")}
        content = {
            "environment": self._environment,
            "settings": json.loads(json.dumps(settings, default=_plain)),
            "phases": self._phases,
            "results": self._results,
        }
        report.write(self._out / "results.json", content)
        return table

    def _log(self, text: str) -> None:
        line = f"[{time.time() - self._began:6.1f}s] {text}"
        print(line, flush=True)
        print(line, file=self._log_file, flush=True)


def too_large(system: System, shape: Shape, memory: int | None) -> str | None:
    """Explains why a model cannot be built in fp32 on a device of `memory` bytes (None: unknown); None if it may fit.

    What is sharded needs the parameters whole at first; under DDP gradients and AdamW's two states are whole, too.
    """
    needed = shape.parameters * (16 if system.kind == "ddp" else 4)
    if memory is None or needed <= memory:
        return None
    what = "with gradients and AdamW's states" if system.kind == "ddp" else "before it is sharded"
    return (
        f"the model has {shape.parameters / 1e9:.1f}e9 parameters, which take {needed / 2**30:.0f} GiB on each device "
        f"{what}; the device has {memory / 2**30:.0f} GiB: give fewer --layers than {shape.layers}"
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line; counts the GPUs where it says nothing about them."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="systems:\n" + "\n".join(f"  {name}: {text}" for name, text in SYSTEMS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--systems", type=_list_of(System.parse), default="deepcompile,fsdp,fsdp2,roofline")
    parser.add_argument("--cases", type=_list_of(Case.parse), default="512x1x1,1024x1x1,4096x1x1,1024x1x4")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=_positive, help="layers of the model, if not the shape's own number")
    parser.add_argument("--checkpointing", action="store_true", help="layers keep their inputs alone, and run again")
    parser.add_argument("--deferred-init", action="store_true", help="initialise shards block by block; not for FSDP2")
    parser.add_argument("--steps", type=_positive, default=10, help="measured optimizer steps")
    parser.add_argument(
        "--warmup", type=_positive, default=12, help="optimizer steps before, from the compiling one on"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json, table.md, log.txt, profiles")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--world", type=_positive, help="ranks (default: all GPUs, 2 on CPU)")
    parser.add_argument(
        "--nodes", type=_positive, default=1, help="let NCCL believe in so many hosts, which sockets connect (of GPUs)"
    )
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 on GPUs, fp32 on CPU")
    parser.add_argument("--time-budget", type=float, default=3600.0, help="seconds after which no case is started")
    parser.add_argument("--case-limit", type=float, default=240.0, help="seconds without progress that end a group")
    parser.add_argument("--cache-dir", type=Path, help="keep Inductor's caches here (default: a temporary folder)")
    parser.add_argument("--warm", action="store_true", help="also measure deepcompile's start with warm caches")
    parser.add_argument("--memory", action="store_true", help="on CPUs, measure memory in place of times")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help=_choices(OPTIMIZERS))
    parser.add_argument("--profile", action="append", default=[], metavar="SYSTEM:CASE", help="trace a step on rank 0")
    arguments = parser.parse_args(argv)
    gpus = report.count_gpus()
    arguments.device = arguments.device or ("cuda" if gpus else "cpu")
    on_gpu = arguments.device == "cuda"
    arguments.world = arguments.world or (gpus if on_gpu else 2)
    arguments.precision = arguments.precision or ("bf16" if on_gpu else "fp32")
    if on_gpu and not 0 < arguments.world <= gpus:
        parser.error(f"--world {arguments.world}: this machine shows {gpus} GPUs; lower it or use --device cpu")
    shape = SHAPES[arguments.shape]
    arguments.shape = replace(
        shape,
        layers=arguments.layers or shape.layers,
        checkpointing=arguments.checkpointing,
        deferred=arguments.deferred_init,
    )
    if arguments.world % arguments.nodes:
        parser.error(f"--nodes {arguments.nodes}: {arguments.world} ranks are no multiple of it")
    try:
        arguments.profile = [_profiled(text, arguments) for text in arguments.profile]
    except ValueError as error:
        parser.error(f"--profile: {error}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison; returns 0 if no case failed."""
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    scratch = Path(tempfile.mkdtemp(prefix="compare-"))
    try:
        return 0 if Comparison(arguments, scratch).run() else 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # unwinds through the group's own clean-up


def _profiled(text: str, arguments: argparse.Namespace) -> tuple[str, Case]:
    name, _, case_text = text.rpartition(":")
    case = Case.parse(case_text)
    if name not in [system.name for system in arguments.systems] or case not in arguments.cases:
        raise ValueError(f"{text!r} is not SYSTEM:CASE with one of the --systems and one of the --cases")
    return name, case


def _list_of(parse: Any) -> Any:
    def read(text: str) -> list[Any]:
        try:
            items = [parse(item) for item in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        if len({str(item) for item in items}) != len(items):
            raise argparse.ArgumentTypeError(f"{text!r} names one of its items twice")
        return items

    return read


def _choices(described: dict[str, str]) -> str:
    return "; ".join(f"{name}: {text}" for name, text in described.items())


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Case | Path) else vars(value)


if __name__ == "__main__":
    sys.exit(main())
