"""Times the optimizer steps of one case and leaves the numbers where the driver finds them."""

from __future__ import annotations

import gc
import itertools
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import Case, Job
from profile_trace import StepProfiler
from torch import Tensor
from torch.distributed.tensor import DTensor

ISSUE_STEPS = 3
"""Steps begun with an empty queue, to see how long the host needs to issue one."""
LOSS_STEPS = 3
_GIB = 2**30


def synchronize(device: torch.device) -> None:
    """Waits for the device, where there is something to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def agree(flag: bool, device: torch.device) -> bool:
    """True on every rank if it is true on one; doubles as the barrier between phases, with an idle device after it."""
    synchronize(device)  # collectives of other communicators must not be in flight beside this one
    if not dist.is_initialized():
        return flag
    votes = torch.tensor([float(flag)], device=device)
    dist.all_reduce(votes)
    return votes.item() > 0


class CpuMemory:
    """Follows what PyTorch allocates on the CPU from now on. Steps take longer meanwhile."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def stop(self) -> float:
        """Ends it; returns the most that was in use, in GiB."""
        self._profile.stop()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            self._profile.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
        return max(itertools.accumulate(size for _, size in changes)) / _GIB


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text)


class StepMeter:
    """Follows one case from its first, compiling step to the last measured one.

    The steps are, in order: ``warmup`` (the first is the cold one), ``ISSUE_STEPS`` each begun with an empty queue,
    ``steps`` measured back to back (an event after each, no synchronisation between them), and those of a profiler.
    """

    def __init__(self, job: Job, case: Case, device: torch.device, rank: int) -> None:
        self._job, self._device = job, device
        profiled = rank == 0 and case == job.profile
        self._profiler = StepProfiler(device) if profiled else None
        self._settled = max(job.warmup, 1)
        self._issued = self._settled + ISSUE_STEPS
        self._measured = self._issued + job.steps
        self.total = self._measured + (StepProfiler.STEPS if case == job.profile else 0)
        self._done = 0
        self._losses: list[torch.Tensor] = []
        self._marks: list[Any] = []
        self._host_ms: list[float] = []
        self._numbers: dict[str, Any] = {}
        self._optimizer_marks: list[tuple[Any, Any]] = []
        self._optimizer_began: Any = None
        self._allocated = 0

    def begin(self) -> None:
        """Call right before the first step of the case."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        agree(False, self._device)
        self._began = self._since = time.perf_counter()

    def add_loss(self, loss: torch.Tensor) -> None:
        """Takes the loss of a micro-batch, already divided by the number of micro-batches."""
        if self._done >= LOSS_STEPS:
            return
        if len(self._losses) == self._done:
            self._losses.append(loss.detach().float().clone())
        else:
            self._losses[-1] += loss.detach()

    def begin_optimizer(self) -> None:
        """Call when all gradients are computed."""
        if self._done == 0 and self._device.type == "cuda":
            self._allocated = torch.cuda.memory_allocated(self._device)
        self._optimizer_began = self._now()

    def end_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Call when the optimizer has stepped, before gradients are dropped."""
        if self._done == 0:
            states = [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor)]
            local = [v.to_local() if isinstance(v, DTensor) else v for v in states]
            self._numbers["states_gib"] = sum(v.nbytes for v in local if v.device.type == self._device.type) / _GIB
            if self._device.type == "cuda":
                added = torch.cuda.memory_allocated(self._device) - self._allocated
                self._numbers["states_allocated_gib"] = added / _GIB
        if self._issued <= self._done < self._measured:
            self._optimizer_marks.append((self._optimizer_began, self._now()))

    def end_step(self) -> None:
        """Call after each optimizer step."""
        done = self._done = self._done + 1
        if done == 1:
            synchronize(self._device)
            self._numbers["first_step_s"] = time.perf_counter() - self._began
        if self._settled < done <= self._issued:
            self._host_ms.append((time.perf_counter() - self._since) * 1e3)
        if self._settled <= done <= self._issued:
            agree(False, self._device)
            if done == self._issued and self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            self._since = time.perf_counter()
        if self._issued <= done <= self._measured:
            self._mark()
        if done == self._measured:
            self._collect()
        if self._profiler and done >= self._measured:
            self._profiler.boundary()

    def record(self) -> dict[str, Any]:
        """The numbers of this rank."""
        losses = [loss.item() for loss in self._losses]
        record = {**self._numbers, "losses": losses, "wall_s": time.perf_counter() - self._began}
        if self._profiler:
            name = _file_name(f"profile_{self._job.system.name}_{self._job.profile}")
            record["profile"] = self._profiler.save(Path(self._job.out), name)
        return record

    def _mark(self) -> None:
        self._marks.append(self._now())

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) if self._device.type == "cuda" else (end - begin) * 1e3)

    def _collect(self) -> None:
        synchronize(self._device)
        self._numbers["ms"] = [self._between(a, b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        self._numbers["optimizer_step_ms"] = [self._between(*pair) for pair in self._optimizer_marks]
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self._numbers |= {
                "peak_gib": torch.cuda.max_memory_allocated(self._device) / _GIB,
                "reserved_gib": torch.cuda.max_memory_reserved(self._device) / _GIB,
                "device_gib": (total - free) / _GIB,
            }
        self._numbers["host_ms"] = self._host_ms


class Recorder:
    """The workers' side of the job folder: which case is running, and a file per finished case and rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank, self._folder = job, rank, Path(job.folder)
        self._memory = CpuMemory() if job.memory and job.device == "cpu" else None

    def start(self, case: Case) -> None:
        """Notes that a case begins, so that the driver knows what a dead group was doing."""
        if self._rank == 0:
            with (self._folder / "started").open("a") as file:
                file.write(f"{case} {time.time() - self._job.spawned:.2f}\n")

    def save(self, case: Case, record: dict[str, Any]) -> None:
        """Writes the numbers of a finished case; the file appears whole or not at all."""
        if self._memory is not None:
            record["peak_gib"], self._memory = self._memory.stop(), None
        path = self._folder / f"{case}.rank{self._rank}.json"
        path.with_suffix(".part").write_text(json.dumps(record))
        path.with_suffix(".part").rename(path)

    def save_profile(self, case: Case, profile: Any) -> None:
        """Keeps what plans were made with, for ``python -m lightning_deepcompile simulate``; None where none was."""
        if self._rank == 0 and profile is not None:
            name = _file_name(f"plan_{self._job.system.name}_{case}.json")
            (Path(self._job.out) / name).write_text(profile.to_json())

    def out_of_time(self, device: torch.device) -> bool:
        """Returns whether any rank is past the deadline; the same answer on all ranks."""
        return agree(time.time() > self._job.deadline, device)
