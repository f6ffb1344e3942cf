"""A step in the trace event format of Perfetto and Chrome's ``about:tracing``: simulated, and as ranks measured it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.measured import MeasuredStep
from lightning_deepcompile.report.measured import events_of
from lightning_deepcompile.report.memory import KINDS, memory_by_kind
from lightning_deepcompile.report.record import StepRecord
from lightning_deepcompile.report.timeline import LANES, timeline

_PROCESS = 1


def write_trace(record: StepRecord, path: str | Path) -> Path:
    """Writes `trace_text` to a file.

    Args:
        record: Of a measured step.
        path: The file; its folder is made if there is none.

    Returns:
        The file.

    Raises:
        ValueError: If no step was measured.
        OSError: If it cannot be written.
    """
    path = Path(path)
    text = trace_text(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def trace_text(record: StepRecord) -> str:
    """Returns the step as JSON: a thread for each simulated stream, counters of memory, a process for each rank.

    Args:
        record: Of a measured step.

    Raises:
        ValueError: If no step was measured.
    """
    prediction, profile = record.predict(), record.profile
    if prediction is None or profile is None:
        raise ValueError("There is no trace, as no step was measured: see `strategy.profile()`.")
    events = timeline(prediction, record.schedules, profile)
    memory = memory_by_kind(prediction, record.schedules, profile)
    begin = min([event.start for event in events] + [moment.seconds for moment in memory], default=0.0)

    def microseconds(seconds: float) -> float:
        return round((seconds - begin) * 1e6, 3)

    title = f"predicted step, {profile.world_size} ranks ({profile.device_type})"
    rows: list[dict[str, Any]] = [_named("process_name", 0, title)]
    for number, lane in enumerate(LANES):
        if any(event.lane == lane for event in events):
            rows.append(_named("thread_name", number, lane))
            order = {"sort_index": number}
            rows.append({"name": "thread_sort_index", "ph": "M", "pid": _PROCESS, "tid": number, "args": order})
    for event in events:
        rows.append(
            {
                "name": event.name,
                "cat": event.lane,
                "ph": "X",
                "ts": microseconds(event.start),
                "dur": round((event.end - event.start) * 1e6, 3),
                "pid": _PROCESS,
                "tid": LANES.index(event.lane),
                "args": {"what": event.detail},
            }
        )
    for moment in memory:
        sizes = dict(zip(KINDS, moment.sizes, strict=True))
        rows.append({"name": "memory", "ph": "C", "ts": microseconds(moment.seconds), "pid": _PROCESS, "args": sizes})
    if record.measured is not None:
        rows += _measured_rows(record.measured, profile)
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})


def _measured_rows(measured: MeasuredStep, profile: Profile) -> list[dict[str, Any]]:
    """The measured step: a process for each rank, with a thread for its compute stream."""
    when = "under the plan" if measured.planned else "before planning"
    begin = min((rank.begin for rank in measured.ranks), default=0.0)
    processes = {f"rank {rank.rank}": _PROCESS + 1 + place for place, rank in enumerate(measured.ranks)}
    rows = [_named("process_name", 0, f"measured step {when}, {lane}", pid) for lane, pid in processes.items()]
    rows += [_named("thread_name", 0, "compute stream", pid) for pid in processes.values()]
    for event in events_of(measured, profile):
        rows.append(
            {
                "name": event.name,
                "cat": event.kind,
                "ph": "X",
                "ts": round((event.start - begin) * 1e6, 3),
                "dur": round((event.end - event.start) * 1e6, 3),
                "pid": processes[event.lane],
                "tid": 0,
                "args": {"what": event.detail},
            }
        )
    return rows


def _named(kind: str, thread: int, name: str, process: int = _PROCESS) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
