"""Discrete events: tasks on streams, in order within a stream, behind what they depend on, slower beside others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from lightning_deepcompile.plan.costs import Contention

__all__ = ["StreamName", "Task", "Timing", "run_tasks"]

StreamName = Literal["trainer", "host", "compute", "gather", "reduce", "out", "in", "states out", "states in"]
"""The device's streams, the host that launches, and the trainer, which is busy between steps."""


_SHARED: tuple[set[StreamName], ...] = ({"out", "states out"}, {"in", "states in"})
"""Copies in one direction share a link."""


@dataclass
class Task:
    """Work on a stream.

    Args:
        stream: Where it runs; tasks of one stream run one after another in the order of the list.
        seconds: How long it takes with nothing beside it.
        after: Numbers of tasks that must be over before it starts.
        label: For people.
    """

    stream: StreamName
    seconds: float
    after: list[int] = field(default_factory=list)
    label: str = ""


@dataclass(frozen=True)
class Timing:
    """When tasks ran.

    Args:
        start: Start of every task, in seconds.
        end: Its end.
        busy: Seconds that each stream worked.
        exposed: Seconds in which a gather, a reduction or a copy ran and compute did not, though it had a step to do.
    """

    start: list[float]
    end: list[float]
    busy: dict[StreamName, float]
    exposed: float


def run_tasks(tasks: Sequence[Task], contention: Contention) -> Timing:
    """Plays `tasks` through.

    Args:
        tasks: Each may depend on earlier ones only.
        contention: What runs at the same time slows down.

    Returns:
        Their times.
    """
    queues: dict[StreamName, deque[int]] = {stream: deque() for stream in get_args(StreamName)}
    for number, task in enumerate(tasks):
        if any(other >= number for other in task.after):
            raise ValueError(f"Task {number} ({task.label}) waits for one that comes later: {task.after}.")
        queues[task.stream].append(number)
    left = [task.seconds for task in tasks]
    start, end = [-1.0] * len(tasks), [-1.0] * len(tasks)
    busy: dict[StreamName, float] = dict.fromkeys(queues, 0.0)
    now = exposed = 0.0
    while any(queues.values()):
        # The first unfinished task depends on nothing unfinished and is first in its queue: something always runs.
        active = {
            stream: queue[0]
            for stream, queue in queues.items()
            if queue and all(end[other] >= 0 for other in tasks[queue[0]].after)
        }
        working = active.keys() - {"host", "trainer"}
        slowdown = _slowdown(working, contention)
        step = min(left[number] * slowdown.get(stream, 1.0) for stream, number in active.items())
        for stream, number in active.items():
            if start[number] < 0:
                start[number] = now
            busy[stream] += step
            remaining = left[number] - step / slowdown.get(stream, 1.0)
            # The one that set the step is over, whatever rounding says; so is whatever ends with it.
            left[number] = remaining if remaining > 1e-12 * max(tasks[number].seconds, 1e-9) else 0.0
        if working and not active.keys() & {"compute", "trainer"}:
            exposed += step
        now += step
        for stream, number in active.items():
            if left[number] == 0.0:
                end[number] = now
                queues[stream].popleft()
    return Timing(start, end, busy, exposed)


def _slowdown(active: set[StreamName], contention: Contention) -> dict[StreamName, float]:
    wires = active & {"gather", "reduce"}
    factors: dict[StreamName, float] = {}  # copies to and from the host have links of their own
    if "compute" in active:
        factors["compute"] = contention.compute if wires else 1.0
    for wire in wires:
        beside_compute = contention.communication if "compute" in active else 1.0
        factors[wire] = beside_compute * (contention.shared_link if len(wires) == 2 else 1.0)
    for pair in _SHARED:
        factors |= dict.fromkeys(pair, 2.0) if pair <= active else {}
    return factors
