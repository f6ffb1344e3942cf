"""The steps at which a training step is planned, and the passes."""

from __future__ import annotations

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.plan.known_passes import DEFAULT_SCHEDULE, resolve_passes
from lightning_deepcompile.plan.step_pass import Pass

__all__ = ["PassEntry", "pass_schedule"]

PassEntry = tuple[int, tuple[Pass, ...]]
"""Optimizer steps since the start or the resuming, and the passes from then on; none where a step is measured then and
nothing is planned, but it may be decided how the step is traced."""


def pass_schedule(config: CompileConfig, stage: int, shards: int) -> list[PassEntry]:
    """Resolves `CompileConfig.schedule`.

    Args:
        config: The settings.
        stage: ZeRO stage.
        shards: Ranks that share the parameters.

    Returns:
        The entries; the first is of step 0.

    Raises:
        PassError: If the configured passes do not exist or do not fit together.
        ValueError: If the configured schedule plans for a stage at which nothing is gathered twice.
    """
    schedule = config.schedule
    measures = False
    if schedule is None or schedule == "auto":
        schedule = list(DEFAULT_SCHEDULE)
        # One rank has nothing to wait for, but a budget is held to.
        nothing_travels = shards == 1 and config.offloading.activations != "all" and config.memory_budget is None
        nothing_to_plan = nothing_travels or stage != 3  # there parameters stay whole anyway
        measures = nothing_to_plan and config.schedule == "auto"
        if nothing_to_plan or config.schedule is None:
            schedule = schedule[:1]
    if stage != 3 and len(schedule) > 1:
        raise ValueError(
            f"CompileConfig(schedule=...) plans at step {schedule[1]['step']}, but at stage {stage} "
            "parameters stay whole between uses: there is nothing to plan. Use stage 3, or step 0 alone."
        )
    entries = [(entry["step"], resolve_passes(entry["passes"], profiled=entry["step"] > 0)) for entry in schedule]
    return [*entries, (DEFAULT_SCHEDULE[-1]["step"], ())] if measures else entries
