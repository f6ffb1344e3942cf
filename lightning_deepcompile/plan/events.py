"""Discrete events: tasks run in order within a stream, after their dependencies, and slow each other down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from lightning_deepcompile.plan.costs import Contention
from lightning_deepcompile.program.instructions import Stream

_WAYS: tuple[set[Stream], ...] = ({"out", "states out"}, {"in", "states in"})
"""Copies in one direction share a link; the directions have one each, which a host's memory may not keep both busy."""


@dataclass(slots=True)
class Task:
    """Work on a stream.

    Args:
        stream: The stream that it runs on; tasks of one stream run one after another in the order of the list.
        seconds: Its duration if nothing runs beside it.
        after: Numbers of tasks that must be over before it starts.
        label: For people.
    """

    stream: Stream
    seconds: float
    after: list[int] = field(default_factory=list)
    label: str = ""


@dataclass(frozen=True)
class Timing:
    """The times at which tasks ran.

    Args:
        start: Start of every task, in seconds.
        end: Its end.
        busy: Seconds that each stream worked.
        exposed: Seconds in which a gather, a reduction or a copy ran and compute did not, within a step.
    """

    start: list[float]
    end: list[float]
    busy: dict[Stream, float]
    exposed: float


def run_tasks(tasks: Sequence[Task], contention: Contention) -> Timing:
    """Simulates `tasks`.

    Args:
        tasks: Each may depend on earlier ones only.
        contention: The slow-down of work that runs at the same time.

    Returns:
        Their times.
    """
    queues: dict[Stream, list[int]] = {stream: [] for stream in get_args(Stream)}
    for number, task in enumerate(tasks):
        if task.after and max(task.after) >= number:
            raise ValueError(f"Task {number} ({task.label}) waits for one that comes later: {task.after}.")
        queues[task.stream].append(number)
    for queue in queues.values():
        queue.reverse()  # the next task comes last
    left = [task.seconds for task in tasks]
    start, end = [-1.0] * len(tasks), [-1.0] * len(tasks)
    busy: dict[Stream, float] = dict.fromkeys(queues, 0.0)
    slowdowns: dict[frozenset[Stream], dict[Stream, float]] = {}
    now = exposed = 0.0
    active: dict[Stream, int] = {}
    idle = [stream for stream, queue in queues.items() if queue]  # whose next task may start
    waiting: dict[int, list[Stream]] = defaultdict(list)  # streams whose next task waits for a task
    # The first unfinished task depends on nothing unfinished and is next in its queue: something always runs.
    while idle or active:
        for stream in idle:
            first = queues[stream][-1]
            for other in tasks[first].after:
                if end[other] < 0:
                    waiting[other].append(stream)
                    break
            else:
                active[stream], start[first] = first, now
        streams = frozenset(active)
        slowdown = slowdowns.get(streams)
        if slowdown is None:
            slowdown = slowdowns[streams] = _slowdown(streams, contention)
        running = list(active.items())
        step = min([left[number] * slowdown[stream] for stream, number in running])
        if "compute" not in active and len(active) > ("host" in active):
            exposed += step
        now += step
        idle = []
        for stream, number in running:
            busy[stream] += step
            remaining = left[number] - step / slowdown[stream]
            # The task that set the time step has ended, whatever rounding says; so has any task that ends with it.
            if remaining > 1e-12 * max(tasks[number].seconds, 1e-9):
                left[number] = remaining
                continue
            end[number] = now
            del active[stream]
            queues[stream].pop()
            if queues[stream]:
                idle.append(stream)
            if number in waiting:
                idle += waiting.pop(number)
    return Timing(start, end, busy, exposed)


def _slowdown(active: frozenset[Stream], contention: Contention) -> dict[Stream, float]:
    """The factors by which each of `active` takes longer beside the others."""
    wires = active & {"gather", "reduce"}
    factors = dict.fromkeys(active, 1.0)  # copies to and from the host have links of their own
    if "compute" in active:
        factors["compute"] += contention.beside_gathers - 1 if "gather" in active else 0.0
        factors["compute"] += contention.beside_reductions - 1 if "reduce" in active else 0.0
    factors |= dict.fromkeys(wires, contention.shared_link if len(wires) == 2 else 1.0)
    duplex = contention.duplex if all(way & active for way in _WAYS) else 1.0
    for way in _WAYS:
        factors |= dict.fromkeys(way & active, duplex * (2.0 if way <= active else 1.0))
    return factors
