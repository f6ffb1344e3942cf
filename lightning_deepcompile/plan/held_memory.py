"""What the runtime holds while a step runs, whatever its regions cost: follows from the schedules alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_deepcompile.plan.costs import Link, Profile, RegionCost
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.program.schedule import Schedule

__all__ = ["arena_bytes", "gradient_bytes"]


def arena_bytes(schedules: Sequence[Schedule]) -> list[list[int]]:
    """What the programs' own memory does not explain, after every instruction of every schedule of a micro-batch.

    Returns:
        Bytes of the arena's slots, less those of saved tensors that are in host memory.
    """
    memory = simulate(schedules, _without_costs(schedules)).memory
    return [[m.arena - m.away for m in memory if m.schedule == index] for index in range(len(schedules))]


def gradient_bytes(schedules: Sequence[Schedule], ratio: float, micro_batches: int) -> list[list[list[int]]]:
    """Bytes of whole gradients with the runtime, where compute waits for every reduction at once.

    Args:
        schedules: The programs of a micro-batch.
        ratio: Bytes of a sum of gradients per byte of a gradient.
        micro_batches: Of an optimizer step that accumulates gradients.

    Returns:
        Bytes while each instruction runs, by micro-batch and schedule.
    """
    profile = replace(_without_costs(schedules), hold_ratio=ratio, micro_batches=micro_batches, reduce_window=0)
    rows: list[list[list[int]]] = [[[] for _ in schedules] for _ in range(micro_batches)]
    for point in simulate(schedules, profile).memory:
        rows[point.micro_batch][point.schedule].append(point.gradients)
    return rows


def _without_costs(schedules: Sequence[Schedule]) -> Profile:
    regions = {f"{s.name}/{s.instructions[p].region}": RegionCost(0.0) for s in schedules for p in s.at("compute")}
    link = Link(0.0, 1.0)
    return Profile(1, "cpu", tuple(schedules), regions, link, link)
