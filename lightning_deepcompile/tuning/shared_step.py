"""Shares what ranks measured in one step, for reports."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.distributed as dist

from lightning_deepcompile.plan.measured import MeasuredStep, aligned
from lightning_deepcompile.profile.marks import ProgramRun, StepMarks
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.ranks.exchange import maxima, number_of

_RANKS = 16
"""So many ranks are shown, and the slowest one: the cost is the same for any number of ranks."""


def share_step(
    mine: tuple[StepMarks, Mapping[str, Schedule]] | None, group: dist.ProcessGroup, *, planned: bool
) -> MeasuredStep | None:
    """Returns a step as the ranks measured it, the same on all of them; a collective.

    Args:
        mine: The step with its marks, and the schedules that ran in it by program name; None on all ranks if no step
            has marks.
        group: The ranks.
        planned: Whether the step ran under a plan.

    Returns:
        The step of ranks that ran what the first one ran; None where that is not known.
    """
    if mine is None:
        return None
    rank, world = group.rank(), group.size()
    marks, schedules = mine
    runs = tuple(schedules[run.program] for run in marks.runs if run.program in schedules)
    numbers = _numbers(marks, runs) if len(runs) == len(marks.runs) and not marks.compiled else []
    ran = [(run.structure, [instruction.text for instruction in run.instructions]) for run in runs]
    digest = float(number_of(repr(ran))) if numbers else 0.0
    compute = sum(_compute_seconds(*one) for one in zip(marks.runs, runs, strict=True)) if numbers else 0.0
    first = [digest, float(len(numbers))] if rank == 0 else [-1.0, -1.0]
    wanted, count, most = maxima([*first, compute], group)
    (slowest,) = maxima([float(rank) if compute == most else -1.0], group)
    shown = sorted({*range(min(world, _RANKS)), int(slowest)})
    if not wanted or not count:
        return None
    table = [-math.inf] * (len(shown) * int(count))
    if rank in shown and digest == wanted and len(numbers) == count:
        place = shown.index(rank) * int(count)
        table[place : place + int(count)] = numbers
    table = maxima(table, group)
    rows = {one: table[place * int(count) : (place + 1) * int(count)] for place, one in enumerate(shown)}
    if digest != wanted:
        return None
    known = {one: row for one, row in rows.items() if math.isfinite(row[0])}
    return MeasuredStep(runs, aligned(runs, known), world, planned)


def _compute_seconds(run: ProgramRun, schedule: Schedule) -> float:
    seconds = run.seconds()
    return sum(seconds[position] for position in schedule.at("compute"))


def _numbers(marks: StepMarks, runs: tuple[Schedule, ...]) -> list[float]:
    """Seconds since the step's begin of all marks; empty if one is missing."""
    if marks.start is None or marks.reduced is None or marks.end is None or not runs:
        return []
    if any(len(run.marks) != len(schedule.instructions) + 1 for run, schedule in zip(marks.runs, runs, strict=True)):
        return []
    marks.synchronize()
    passed = [*(mark for run in marks.runs for mark in run.marks), marks.reduced, marks.end]
    return [mark.at(marks.start) for mark in passed]
