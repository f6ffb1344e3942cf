"""Adapts a plan of another run to this run's settings."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_deepcompile.plan.copy_placement import without_copies
from lightning_deepcompile.plan.passes.reduce_late import place_reductions
from lightning_deepcompile.plan.reductions import may_merge, split_reductions
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.program.schedule import Schedule


def admitted(schedules: Iterable[Schedule], settings: PlanSettings, ranks: int, device_type: str) -> list[Schedule]:
    """Returns the schedules without what this run's settings exclude: the other run's settings may have differed.

    Args:
        schedules: Out of a plan file.
        settings: This run's.
        ranks: The number of ranks that share the parameters.
        device_type: ``"cuda"`` or ``"cpu"``.
    """
    if settings.reduce != "auto":
        schedules = place_reductions(schedules, "reduce" if settings.reduce == "every" else "reduce_at_boundary")
    if not may_merge(ranks, device_type, settings.rounding):
        schedules = [split_reductions(schedule) for schedule in schedules]
    if settings.offload_activations == "none":
        schedules = [without_copies(schedule) for schedule in schedules]
    return list(schedules)
