"""Traces one training step and says where its time went."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

MAX_TRACE_BYTES = 12 * 2**20
"""A compressed trace larger than this is not kept."""

Interval = tuple[float, float]

_KINDS = (
    ("nccl", ("nccl",)),
    ("attention", ("flash", "fmha", "attention", "cudnn_generated")),
    ("matmul", ("gemm", "nvjet", "cutlass", "cublas", "splitk")),
    ("optimizer", ("adam", "multi_tensor")),
    ("triton", ("triton",)),
    ("copy or fill", ("memcpy", "memset", "copy", "fill", "cat")),
)
"""Kernel kinds and what their names contain; the first match counts."""


class StepProfiler:
    """Profiles one optimizer step; a step before it absorbs the profiler's own start.

    Only device activity is recorded: recording host operators would slow the host, and with it the systems that wait
    for the host.
    """

    STEPS = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        plan = schedule(wait=0, warmup=1, active=1, repeat=1)
        self._profile = profile(activities=[activity], schedule=plan, on_trace_ready=self._export)
        self._started = False
        self._trace = b"{}"

    def boundary(self) -> None:
        """Call before the first of the profiled steps and after each of them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._started:
            self._profile.step()
        else:
            self._profile.start()
            self._started = True

    def save(self, folder: Path, name: str) -> dict[str, Any]:
        """Writes the summary, and the compressed trace if it is small, into ``folder``; returns the summary."""
        self._profile.stop()
        summary = summarize(json.loads(self._trace).get("traceEvents", []))
        packed = gzip.compress(self._trace, compresslevel=6)
        if len(packed) <= MAX_TRACE_BYTES:
            (folder / f"{name}.trace.json.gz").write_bytes(packed)
        else:
            summary["trace"] = f"not kept: {len(packed) / 2**20:.1f} MiB compressed"
        (folder / f"{name}.json").write_text(json.dumps(summary, indent=1))
        return summary

    def _export(self, done: profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            done.export_chrome_trace(str(path))
            self._trace = path.read_bytes()


def summarize(events: Iterable[dict[str, Any]], top: int = 15) -> dict[str, Any]:
    """Reduces the events of a Chrome trace to a summary of device time, in milliseconds.

    ``compute`` is everything but NCCL; the compute stream is the one with most of it. Exposed communication is the time
    in which NCCL ran and no compute did; idle time is that in which nothing ran, from the first event to the last.
    """
    device = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not device:
        return {"note": "the trace holds no device activity"}
    per_stream: Counter[Any] = Counter()
    kinds: Counter[str] = Counter()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in device:
        kind = kernel_kind(event["name"])
        kinds[kind] += event["dur"]
        kernels[event["name"]].append(event["dur"])
        if kind != "nccl":
            per_stream[_stream(event)] += event["dur"]
    main = per_stream.most_common(1)[0][0] if per_stream else None

    def busy(keep: Callable[[dict[str, Any]], bool]) -> list[Interval]:
        return union((e["ts"], e["ts"] + e["dur"]) for e in device if keep(e))

    def nccl_sum(word: str) -> float:
        return sum(sum(times) for name, times in kernels.items() if _is_nccl(name) and word in name.lower())

    everything = busy(lambda e: True)
    compute = busy(lambda e: not _is_nccl(e["name"]))
    nccl = busy(lambda e: _is_nccl(e["name"]))
    compute_stream = busy(lambda e: not _is_nccl(e["name"]) and _stream(e) == main)
    gaps = sorted((b[0] - a[1] for a, b in zip(compute_stream, compute_stream[1:], strict=False)), reverse=True)
    span = everything[-1][1] - everything[0][0]
    slowest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:top]
    return {
        "span_ms": _ms(span),
        "compute_stream_busy_ms": _ms(total(compute_stream)),
        "compute_ms": _ms(total(compute)),
        "nccl_gather_ms": _ms(nccl_sum("gather")),
        "nccl_reduce_ms": _ms(nccl_sum("reduce")),
        "nccl_busy_ms": _ms(total(nccl)),
        "exposed_communication_ms": _ms(total(nccl) - overlap(nccl, compute)),
        "idle_ms": _ms(span - total(everything)),
        "compute_stream_gaps_over_50us_ms": _ms(sum(gap for gap in gaps if gap > 50)),
        "largest_compute_stream_gaps_ms": [_ms(gap) for gap in gaps[:8]],
        "device_events": len(device),
        "ms_by_kind": {kind: _ms(time) for kind, time in kinds.most_common()},
        "top_kernels": [{"name": name[:120], "ms": _ms(sum(times)), "calls": len(times)} for name, times in slowest],
    }


def kernel_kind(name: str) -> str:
    """Sorts a kernel by its name into one of the kinds above, or ``other``."""
    lower = name.lower()
    return next((kind for kind, words in _KINDS if any(word in lower for word in words)), "other")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges overlapping intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """Summed length."""
    return sum(end - start for start, end in intervals)


def overlap(first: list[Interval], second: list[Interval]) -> float:
    """Length of the intersection of two merged lists."""
    shared, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        shared += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def _is_nccl(name: str) -> bool:
    return "nccl" in name.lower()


def _stream(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def _ms(microseconds: float) -> float:
    return round(microseconds / 1e3, 3)
