"""Joins the numbers of all ranks, and writes them as tables and JSON; imports no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jobs import SYSTEMS, Case, Shape, System

Result = dict[str, Any]
_PARTS = ("forward_backward_ms", "gather_ms", "reduce_ms", "optimizer_ms")
_VARIABLES = ("NCCL_", "TORCH", "PYTORCH_", "CUDA_", "OMP_", "TRITON_", "DS_")
_PACKAGES = ("torch", "triton", "lightning", "pytorch-lightning", "transformers", "lightning-deepcompile", "deepspeed")


def join_ranks(system: System, case: Case, shape: Shape, ranks: Sequence[dict[str, Any]]) -> Result:
    """Makes one result of the records of all ranks.

    A step counts with its mean over the ranks (they run in lockstep, their clocks differ by the order of the last
    collective); memory, the cold step and the roofline's parts count on the rank that has most of them.
    """
    result: Result = {"system": system.name, "case": str(case), "status": "ok", "ranks": list(ranks)}
    result["losses"] = [fmean(losses) for losses in zip(*(r["losses"] for r in ranks), strict=True)]
    for key in ("first_step_s", "wall_s", "peak_gib", "reserved_gib", "device_gib", "dynamo_graphs"):
        if key in ranks[0]:
            result[key] = max(r[key] for r in ranks)
    for key in ("summary", "compiled", "profile", "rounds", "predicted"):
        if key in ranks[0]:
            result[key] = ranks[0][key]
    for key in ("states_gib", "states_allocated_gib"):
        if key in ranks[0]:
            result[key] = max(r[key] for r in ranks)
    if ranks[0].get("optimizer_step_ms"):
        result["optimizer_step_ms"] = max(median(r["optimizer_step_ms"]) for r in ranks)
    result["host_ms"] = max(median(r["host_ms"]) for r in ranks)
    if system.kind == "roofline":
        result |= {key: max(r[key] for r in ranks) for key in _PARTS}
        result |= {key: min(r[key] for r in ranks) for key in ("gather_busbw_gbs", "reduce_busbw_gbs")}
        result["ms"] = roofline_ms(case, result)
    else:
        steps = [fmean(step) for step in zip(*(r["ms"] for r in ranks), strict=True)]
        result |= {"ms": median(steps), "min_ms": min(steps), "max_ms": max(steps)}
    result["tokens_per_s_per_gpu"] = case.tokens / result["ms"] * 1e3
    result["tflops_per_gpu"] = case.tokens * shape.flops_per_token(case.seq) / result["ms"] / 1e9
    return result


def roofline_ms(case: Case, parts: dict[str, Any]) -> float:
    """The formula that roofline.py explains."""
    compute = case.accumulation * parts["forward_backward_ms"]
    return max(compute, parts["gather_ms"] + parts["reduce_ms"]) + parts["optimizer_ms"]


def missing(system: System, case: Case, status: str, reason: str) -> Result:
    """A result without numbers: ``status`` is ``failed`` or ``skipped``."""
    return {"system": system.name, "case": str(case), "status": status, "reason": reason}


def tables(results: Sequence[Result], systems: Sequence[System], cases: Sequence[Case]) -> str:
    """Renders the results as Markdown: speed by case and system, details, and what did not run."""
    found = {(r["case"], r["system"]): r for r in results if r["status"] == "ok"}
    timed = [s.name for s in systems if s.kind != "roofline"]
    product = next((s.name for s in systems if s.kind == "deepcompile"), None)
    bounds = {case: r["ms"] for (case, name), r in found.items() if name == "roofline"}
    speed = [["ms per optimizer step", *timed, "roofline"]]
    details = [
        "case|system|ms|min|max|of roofline|optimizer ms|states GiB|tokens/s/GPU|TFLOP/s/GPU|peak GiB|reserved|host ms|"
        "first step s|regions|compile s|losses".split("|")
    ]
    for case in map(str, cases):
        base = found.get((case, product), {}).get("ms")
        speed.append([case, *(_speed_cell(found.get((case, name)), base, name != product) for name in timed)])
        speed[-1].append(f"{bounds[case]:.1f}" if case in bounds else "-")
        details += [_detail_row(found[case, s], bounds.get(case)) for s in timed if (case, s) in found]
    parts = [markdown(speed)]
    if product and len(timed) > 1:
        parts.append(f"Cells are median (minimum); 1.50x = {product} takes 1/1.50 of that system's time.\n")
    parts.append(markdown(details))
    roofline = [r for r in results if r["system"] == "roofline" and r["status"] == "ok"]
    if roofline:
        keys = ("case", *_PARTS, "gather_busbw_gbs", "reduce_busbw_gbs", "ms")
        parts.append(markdown([["roofline", *keys[1:]], *([_number(r[key], 1) for key in keys] for r in roofline)]))
    absent: dict[str, list[str]] = {}
    for result in results:
        if result["status"] != "ok":
            why = f"{result['status']}: {headline(result['reason'])}"
            absent.setdefault(f"{result['system']} {why}", []).append(result["case"])
    notes = [f"- {text} ({', '.join(which)})\n" for text, which in absent.items()]
    notes += [f"- {system.name}: {SYSTEMS[system.kind]}\n" for system in systems]
    return "\n".join([*parts, "".join(notes)])


def headline(reason: str) -> str:
    """The first line of a reason, and the first exception that its log names: later ones tend to follow from it."""
    exceptions = re.findall(r"^(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception)\b.*)", reason, re.MULTILINE)
    return ": ".join([reason.splitlines()[0], *exceptions[:1]])


def environment() -> dict[str, Any]:
    """Describes the environment that a reader needs to judge the numbers, without importing torch."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    root = Path(__file__).resolve().parents[2]
    return {
        "python": platform.python_version(),
        "cpu_cores": os.cpu_count(),
        "gpus": (_output(query) or "").splitlines(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git_commit": _output(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }


def count_gpus() -> int:
    """GPUs that a worker would see, without touching any of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() not in ("", "-1")])
    return len((_output(["nvidia-smi", "-L"]) or "").splitlines())


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this machine in bytes, without touching any of them; None if that is not known."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    sizes = [int(line) for line in (_output(query) or "").split() if line.isdecimal()]
    return min(sizes) * 2**20 if sizes else None


def write(path: Path, content: dict[str, Any] | str) -> None:
    """Replaces a file in one piece, so that an interrupted run leaves the state before."""
    part = path.with_name(path.name + ".part")
    part.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    part.rename(path)


def _speed_cell(result: Result | None, base: float | None, peer: bool) -> str:
    if result is None:
        return "-"
    ratio = f" {result['ms'] / base:.2f}x" if base and peer else ""
    return f"{result['ms']:.1f} ({result['min_ms']:.1f}){ratio}"


def _detail_row(result: Result, bound: float | None) -> list[str]:
    compiled = result.get("compiled", {})
    first, warm = result["first_step_s"], result.get("warm_first_step_s")
    compile_s, warm_compile = compiled.get("compile_seconds"), result.get("warm_compile_s")
    return [
        result["case"],
        result["system"],
        *(_number(result[key], 1) for key in ("ms", "min_ms", "max_ms")),
        _number(bound and bound / result["ms"], 2),
        _number(result.get("optimizer_step_ms"), 1),
        _number(result.get("states_allocated_gib", result.get("states_gib")), 2),
        *(_number(result.get(key), 0) for key in ("tokens_per_s_per_gpu", "tflops_per_gpu")),
        *(_number(result.get(key), 1) for key in ("peak_gib", "reserved_gib", "host_ms")),
        _number(first, 1) + (f" (warm {warm:.1f})" if warm is not None else ""),
        f"{compiled['regions_compiled']}/{compiled['regions_total']}" if compiled else "-",
        _number(compile_s, 1) + (f" (warm {warm_compile:.1f})" if warm_compile is not None else ""),
        " ".join(f"{loss:.4f}" for loss in result["losses"]),
    ]


def _number(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else str(value or "-")


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """A table, of which the first row is the head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
