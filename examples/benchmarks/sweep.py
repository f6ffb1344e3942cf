r"""Trains with several settings of `CompileConfig`, one after another in the same processes: one table.

    torchrun --nproc-per-node 8 examples/benchmarks/sweep.py --out results \
        --option memory_budget --values 80GiB 48GiB 32GiB 24GiB --fixed offload=auto
    torchrun --nproc-per-node 8 examples/benchmarks/sweep.py --out results --ablation --fsdp2
    torchrun --nproc-per-node 8 examples/benchmarks/sweep.py --out results --shape llama3-70b --checkpointing \
        --deferred-init --option offload --values auto all --warmup 8 --steps 3

``--ablation`` adds one planning pass after another. ``--fsdp2`` measures FSDP2 with compiled blocks in the end, in the
same processes on the same links: slow ones are had with ``NCCL_P2P_DISABLE=1`` in the environment. Model, batches and
steps are those of ``compare.py``, whose systems do not share processes; here they do, as starting them and compiling
regions would take most of the time. ``sweep.json`` holds all numbers; with matplotlib there is a ``sweep.png``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import plot
import report
import torch
from jobs import SHAPES, Case, Job, System
from meter import Recorder
from runners import run_fsdp2, run_lightning

from lightning_deepcompile.plan.budget import MemoryBudgetError, parse_budget

START = {"step": 0, "passes": ["zero3"]}
ABLATION: dict[str, Any] = {
    "zero3": [START],
    "+ fuse": [START, {"step": 3, "passes": ["zero3", "fuse"]}],
    "+ prefetch": [START, {"step": 3, "passes": ["zero3", "prefetch", "fuse", "proactive_prefetch"]}],
    "+ unshard": "auto",
}
"""The schedules that ``--ablation`` compares."""

Result = dict[str, Any]


def settings(arguments: argparse.Namespace) -> list[System]:
    """Returns the settings that the command line asks for, in its order."""
    schedules = ABLATION if arguments.ablation else {}
    systems = [System(label, "deepcompile", {"schedule": schedule}) for label, schedule in schedules.items()]
    for value in arguments.values:
        system = System.parse(f"deepcompile@{arguments.option}={value}")
        systems.append(replace(system, name=f"{arguments.option}={value}"))
    fixed = System.parse("@".join(["deepcompile", *filter(None, ["+".join(arguments.fixed)])])).options
    systems = [replace(system, options=fixed | system.options) for system in systems]
    return [*systems, System("fsdp2", "fsdp2")] if arguments.fsdp2 else systems


def run(job: Job, rank: int) -> str:
    """Trains once; returns why it could not, "" if it could. Raises what not all ranks raise alike."""
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    runner = run_fsdp2 if job.system.kind.startswith("fsdp2") else run_lightning
    try:
        runner(job, rank, Recorder(job, rank))
    except MemoryBudgetError as error:
        return str(error)
    finally:
        torch._dynamo.reset()
        gc.collect()
    return ""


def collect(job: Job, reason: str) -> Result:
    """Joins the records of all ranks, as soon as they are there."""
    system, case, folder = job.system, job.cases[0], Path(job.folder)
    if reason:
        return report.missing(system, case, "failed", reason)
    paths = [folder / f"{case}.rank{rank}.json" for rank in range(job.world)]
    until = time.time() + 60
    while not all(path.exists() for path in paths) and time.time() < until:
        time.sleep(0.1)
    return report.join_ranks(system, case, job.shape, [json.loads(path.read_text()) for path in paths])


def table(results: list[Result]) -> str:
    """A row for each setting; times are ratios to the first that ran, too.

    What is in host memory are states, activations and parameters; of Adam's states the share is shown, too. What a
    step moves are all copies: of states and activations both ways, of parameters for gathers.
    """
    head = "setting|ms|min|ratio|TFLOP/s/GPU|peak GiB|host GiB|of states|moved GiB a step|first step s|predicted ms|"
    rows = [f"{head}predicted GiB|predicted exposed ms".split("|")]
    base = next((result["ms"] for result in results if result["status"] == "ok"), None)
    for result in results:
        if result["status"] != "ok":
            rows.append([result["system"], report.headline(result["reason"]), *["-"] * 11])
            continue
        away = result.get("summary", {})
        kinds = ("offloaded_bytes", "offloaded_activation_bytes", "offloaded_parameter_bytes")
        host = sum(away.get(kind, 0) for kind in kinds)
        planned = result.get("predicted") or {}
        numbers = [result["ms"], result["min_ms"], result["ms"] / base, result.get("tflops_per_gpu")]
        numbers += [result.get("peak_gib"), host / 2**30]
        share = plot.states_away(result)
        moved = ("offload_moved_bytes", "fetched_parameter_bytes")
        numbers += [share, (sum(away.get(kind, 0) for kind in moved) + 2 * away.get(kinds[1], 0)) / 2**30]
        numbers += [result["first_step_s"], planned.get("ms"), planned.get("peak_gib"), planned.get("exposed_ms")]
        rows.append([result["system"], *("-" if n is None else f"{n:.2f}" for n in numbers)])
    return report.markdown(rows)


def budget_gib(system: System) -> float | None:
    """The memory budget that a setting names, in GiB; None where it names none."""
    chosen = system.options.get("memory_budget")
    if chosen is None:
        return None
    cuda = torch.cuda.is_available()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if cuda else 0
    return parse_budget(chosen, total) / 2**30


def main() -> int:
    """Runs all settings; returns 0 if none failed."""
    arguments = parse_arguments()
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    torch.set_float32_matmul_precision("high")
    cuda = torch.cuda.is_available()
    shape = replace(
        SHAPES[arguments.shape],
        layers=arguments.layers or SHAPES[arguments.shape].layers,
        checkpointing=arguments.checkpointing,
        deferred=arguments.deferred_init,
    )
    results: list[Result] = []
    for number, system in enumerate(settings(arguments)):
        job = Job(
            system=system,
            cases=[arguments.case],
            shape=shape,
            world=world,
            device="cuda" if cuda else "cpu",
            precision="bf16" if cuda else "fp32",
            steps=arguments.steps,
            warmup=arguments.warmup,
            folder=str(arguments.out / f"setting{number}"),
            out=str(arguments.out),
            spawned=time.time(),
            deadline=time.time() + 3600,
        )
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False, fail_on_recompile_limit_hit=True):
            reason = run(job, rank)
        if rank > 0:
            continue
        results.append(collect(job, reason) | {"budget_gib": budget_gib(system)})
        text = table(results)
        print("\n".join([*map(str, results[-1].get("rounds", ())), text]), flush=True)
        report.write(arguments.out / "sweep.md", text)
        content = {"environment": report.environment(), "arguments": sys.argv[1:], "results": results}
        report.write(arguments.out / "sweep.json", content)
        if plot.can_draw():
            plot.draw_sweep(results, arguments.out / "sweep.png")
    return int(any(result["status"] != "ok" for result in results))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--option", help="field of CompileConfig")
    parser.add_argument("--values", nargs="+", default=[], help="its values, JSON or text, one training each")
    parser.add_argument("--fixed", nargs="*", default=[], metavar="NAME=VALUE", help="options that all share")
    parser.add_argument("--ablation", action="store_true", help="add one planning pass after another")
    parser.add_argument("--fsdp2", action="store_true", help="measure FSDP2 with compiled blocks in the end")
    parser.add_argument("--case", type=Case.parse, default=Case(1024, 1, 1), metavar="SEQxBATCHxACCUMULATION")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="layers of the model, if not the shape's own number")
    parser.add_argument("--checkpointing", action="store_true", help="layers keep their inputs alone, and run again")
    parser.add_argument("--deferred-init", action="store_true", help="initialise shards block by block; not for FSDP2")
    parser.add_argument("--steps", type=int, default=10, help="measured optimizer steps")
    parser.add_argument("--warmup", type=int, default=12, help="optimizer steps before, from the compiling one on")
    parser.add_argument("--out", type=Path, required=True, help="folder for sweep.json, sweep.md and profiles")
    arguments = parser.parse_args(argv)
    if bool(arguments.option) != bool(arguments.values):
        parser.error("--option and --values belong together")
    if arguments.fsdp2 and arguments.deferred_init:
        parser.error("--deferred-init is for deepcompile alone; leave --fsdp2 out")
    if not arguments.option and not arguments.ablation and not arguments.fsdp2:
        parser.error("nothing to run: give --option with --values, --ablation or --fsdp2")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
