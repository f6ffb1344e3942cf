"""What one rank saw of the profiled steps, as a profile, and what all ranks plan with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.pass_manager import Pass
from lightning_deepcompile.profile.build import build_profile, explain, leave_room, limit_memory, merge_profiles
from lightning_deepcompile.profile.copies import measure_copies
from lightning_deepcompile.profile.holds import hold_ratio, measure_holds
from lightning_deepcompile.profile.memory import memory_limit
from lightning_deepcompile.profile.probe import StepProbe
from lightning_deepcompile.program.live import live_bytes
from lightning_deepcompile.program.schedule import Schedule

__all__ = ["agreed_profile", "measured_profile"]

_MARGIN = 8  # of a chosen budget, plans leave 1 / 2^8 free: predictions are not better than that


def measured_profile(
    capture: Capture,
    device: torch.device,
    steps: Sequence[tuple[StepProbe, Mapping[str, Schedule]]],
    passes: Sequence[Pass],
    *,
    step_seconds: float,
    between_seconds: float,
    launched: Mapping[str, bool],
    host_room: Callable[[], int] | None,
    states_travel: bool,
) -> tuple[Profile, tuple[Schedule, ...]]:
    """The profile of the programs that this rank ran, and the schedules that planning starts from.

    Args:
        capture: Has compiled them.
        device: Where they ran.
        steps: What ran with marks, and how: a step as scheduled, and one in which every collective was waited for.
        passes: What planning uses.
        step_seconds: Duration of an ordinary step.
        between_seconds: From a step's end to the next.
        launched: When a step's first gathers are launched, as fields of a `Profile`.
        host_room: Bytes of host memory that saved tensors may take; None where none may leave.
        states_travel: Whether optimizer states come and go.
    """
    (observed, ran), (isolated, ran_isolated) = steps
    config, model = capture.config, capture.model
    names = list(dict.fromkeys(run.program for run in isolated.runs))
    start = capture.schedules(names, passes)
    programs = {e.program.name: e.program for e in capture.executables}
    dtypes = {(p.gather_dtype, p.local.dtype) for p in model.parameters if p.dtensor.requires_grad}
    profile = build_profile(
        observed,
        isolated,
        ran,
        ran_isolated,
        world_size=model.ranks.shards,
        hold_ratio=hold_ratio(dtypes),
        reduce_window=config.reduce_window,
        budget=memory_limit(device, config.memory_budget),
        step_seconds=step_seconds,
        live={name: live_bytes(programs[name]) for name in names},
    )
    early, in_optimizer = (launched.get(name, False) for name in ("early_gathers", "head_start"))
    profile = replace(profile, early_gathers=early, head_start=in_optimizer, between_seconds=between_seconds)
    if profile.micro_batches > 1 and profile.hold_seconds is None:
        profile = replace(profile, hold_seconds=measure_holds(dtypes, device))
    if config.memory_budget is None:
        profile = leave_room(profile)
    if host_room is not None or states_travel:
        out, back, duplex = measure_copies(device)
        room, contention = host_room and host_room(), replace(profile.contention, duplex=duplex)
        profile = replace(profile, copy_out=out, copy_in=back, contention=contention, host_budget=room)
    return profile, tuple(start[s.name] for s in profile.schedules)


def agreed_profile(
    profiles: Sequence[Profile], start: Sequence[Schedule], memory_budget: object, limit: int | None, excess: int
) -> tuple[Profile, int]:
    """The profile that all ranks plan with.

    Args:
        profiles: Every rank's.
        start: The schedules that planning starts from.
        memory_budget: As configured.
        limit: Bytes that were there when a rank ran out of memory; None if none did.
        excess: Bytes that steps took beyond the budget, which their plan had kept.

    Returns:
        The profile, and the bytes that steps may allocate, of which its budget may leave some free.

    Raises:
        ProfileError: If ranks ran different programs in the profiled step.
    """
    merged = explain(merge_profiles(profiles))
    budget = merged.budget or 0
    margin = 0 if memory_budget is None else budget >> _MARGIN
    merged = limit_memory(merged, limit)
    left = max((merged.budget or 0) - margin - excess, 1)
    return replace(merged, schedules=tuple(start), budget=left), budget
