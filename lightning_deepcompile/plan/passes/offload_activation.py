"""Adaptive offloading of activations: those that do not fit wait in host memory between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_deepcompile.plan.choose import MARGINS, fastest_that_fits
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.copy_fit import CopyFit
from lightning_deepcompile.plan.copy_placement import Key, without_copies
from lightning_deepcompile.plan.saved_tensors import fewest, offloadable
from lightning_deepcompile.program.schedule import Schedule

_SMALLEST = 1 << 16
"""A copy of fewer bytes costs the host more than its memory is worth."""


def offload_activation(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Offloads as many saved tensors as exceed the memory budget, and no more.

    Looks for: saved tensors that free their memory by leaving.

    Changes: tensors leave in the order in which forward makes them, as the first ones have the most time until backward
    reads them. A copy out starts when its tensor is made; compute waits for it where it is expected to be over, or
    where the memory is needed, if that is earlier. A copy in starts at the last place from which it, and those queued
    behind it, end before they are read, or later, where there is no room before. Placements with more and more margin
    are simulated; of those that fit best, the fastest stays. Where everything fits, nothing leaves, and nothing that
    would not lower the peak; with ``offload="all"`` everything does.

    Needs from the profile: times and memory of regions; the speed of copies.

    Promises: same values; same communication; predicted memory within the budget where that is possible.

    Returns:
        The schedules; unchanged unless `CompileConfig.offload` asks for it.
    """
    mode = context.settings.offload_activations
    if mode == "none":
        return list(schedules)
    profile = context.require_profile("offload_activation")
    start = [without_copies(s) for s in schedules]
    fit = CopyFit(start, profile, context.whole_budget)
    chosen: Sequence[Key] = offloadable(start, profile.host_budget, 1 if mode == "all" else _SMALLEST)
    if mode == "auto":
        fit.limit = max(fit.limit, fit.peak(chosen))
        chosen = fewest(chosen, fit.peak, fit.limit)
    if not chosen:
        return start
    return fastest_that_fits([fit.place(chosen, margin) for margin in MARGINS], profile, fit.limit)
