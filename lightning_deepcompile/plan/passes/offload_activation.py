"""Adaptive offloading of activations: those that do not fit wait in host memory between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_deepcompile.plan.choose import MARGINS, fastest_that_fits
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.copy_fit import CopyFit, Key
from lightning_deepcompile.plan.copy_placement import without_copies
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.offload import pinned_bytes
from lightning_deepcompile.program.schedule import Schedule

__all__ = ["offload_activation"]

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

    Args:
        schedules: The programs of a micro-batch.
        context: Settings and profile.

    Returns:
        The schedules; unchanged unless `CompileConfig.offload` asks for it.
    """
    mode = context.settings.offload_activations
    if mode == "none":
        return list(schedules)
    profile = context.require_profile("offload_activation")
    start = [without_copies(s) for s in schedules]
    fit = CopyFit(start, profile, context.whole_budget)
    candidates = _that_fit_on_host(fit.candidates(1 if mode == "all" else _SMALLEST), profile)
    if mode == "auto":
        candidates = _fewest(fit, candidates)
    if not candidates:
        return start
    return fastest_that_fits([fit.place(candidates, margin) for margin in MARGINS], profile, fit.limit)


def _that_fit_on_host(candidates: Sequence[tuple[Key, int]], profile: Profile) -> list[Key]:
    result, total = [], 0
    for key, size in candidates:
        total += pinned_bytes(size)
        if profile.host_budget is not None and total > profile.host_budget:
            break
        result.append(key)
    return result


def _fewest(fit: CopyFit, candidates: list[Key]) -> list[Key]:
    """Returns the fewest of the first ones that keep the limit, or else that reach the same peak as all of them."""
    fit.limit = max(fit.limit, fit.peak(candidates))
    if fit.peak([]) <= fit.limit:
        return []
    low, high = 0, len(candidates)  # `low` are too few, `high` suffice
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fit.peak(candidates[:middle]) <= fit.limit else (middle, high)
    return candidates[:high]
