"""Finds what limits a step: simulates it without one cost at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lightning_deepcompile.plan.costs import Link, Profile
from lightning_deepcompile.plan.measured import KINDS, Kind, MeasuredStep
from lightning_deepcompile.plan.simulate import Prediction, simulate
from lightning_deepcompile.program.schedule import Schedule

_FREE = Link(0.0, 1e18)
_TELLS = 0.05
"""The least part of a step that limits it: predictions are no better."""
_FULL = 0.9
"""The part of the budget from which on memory keeps plans from gathering less."""


class Limit(NamedTuple):
    """A cost of a step.

    Args:
        name: The cost.
        seconds: By how much the step would be shorter without it.
        part: The same, as a part of the step.
        advice: What to try.
    """

    name: str
    seconds: float
    part: float
    advice: str

    def __str__(self) -> str:
        """The line on top of a report."""
        if self.name == "compute":
            return f"limited by compute, {self.part:.0%} of the step; {self.advice}"
        return f"limited by {self.name} ({self.seconds * 1e3:.1f} ms of a step, {self.part:.0%}); try {self.advice}"


def limits(
    schedules: Sequence[Schedule],
    profile: Profile,
    skew_seconds: float = 0.0,
    measured: MeasuredStep | None = None,
    usual_seconds: float | None = None,
) -> list[Limit]:
    """Returns the costs of a step that are at least a twentieth of it, the largest first; or else compute.

    Args:
        schedules: The programs of a micro-batch, as they run.
        profile: Of the step.
        skew_seconds: For how long the rank with the least work waits in a step for the one with the most.
        measured: A step that ran so: no cost is more than ranks waited for it.
        usual_seconds: Duration of steps that ran so. If the measured one took longer, the device waited for the host by
            accident, as where processes share cores.
    """
    whole = simulate(schedules, profile)
    step, compute, most = whole.seconds, whole.compute_seconds, dict[Kind, float]()
    if measured is not None and measured.planned:
        parts = [measured.parts(rank) for rank in measured.ranks]
        most = {kind: max(one[kind] for one in parts) for kind in KINDS}
        skew_seconds = min(skew_seconds, measured.skew())
        step, compute = max(rank.end - rank.begin for rank in measured.ranks), most["compute"]
        if usual_seconds is not None and step > usual_seconds:
            most["between"] = max(most["between"] - (step - usual_seconds), 0.0)
            step = usual_seconds
    found = [
        Limit(name, saved, saved / step, advice)
        for name, cost, advice in _costs(schedules, profile, whole, skew_seconds, most)
        if (saved := min(cost, step)) > _TELLS * step  # measured steps have marks, and may take longer than usual ones
    ]
    if found:
        return sorted(found, key=lambda limit: -limit.seconds)
    busy = min(compute / step, 1.0) if step else 1.0
    return [Limit("compute", 0.0, busy, "communication costs less than a twentieth of it.")]


def _costs(
    schedules: Sequence[Schedule], profile: Profile, whole: Prediction, skew_seconds: float, most: Mapping[Kind, float]
) -> list[tuple[str, float, str]]:
    def saved(kind: Kind, **changes: Any) -> float:
        without = simulate(schedules, replace(profile, **changes)).seconds
        return min(whole.seconds - without, most.get(kind, math.inf))

    costs = {key: replace(cost, host=0.0) for key, cost in profile.regions.items()}
    return [
        ("gathers", saved("waits for gathers", gather=_FREE), _for_gathers(profile, whole)),
        (
            "reductions",
            saved("waits for reductions", reduce=_FREE),
            'gradient accumulation with rounding="any", or larger batches.'
            if profile.micro_batches == 1
            else 'rounding="any", which reduces accumulated gradients once where memory allows it.',
        ),
        (
            "the host",
            saved("compute", regions=costs, launch_seconds=0.0),
            "larger batches, which give the device more work for each launch, or cuda_graphs=True.",
        ),
        (
            "the optimizer",
            saved("optimizer", optimizer_seconds=0.0),
            "gradient accumulation, a fused optimizer (fused=True) if it is not, or states of fewer bits.",
        ),
        (
            "copies to and from host memory",
            saved("waits for copies", copy_out=_FREE, copy_in=_FREE),
            "a larger memory_budget, smaller batches, or more ranks.",
        ),
        ("ragged ranks", skew_seconds, "batches of about as many tokens on each rank."),
        (
            "work outside of programs",
            most.get("between", max(profile.unexplained_seconds, 0.0)),
            "PyTorch's profiler, to find hooks, metrics, clipping or logging that take long.",
        ),
    ]


def _for_gathers(profile: Profile, whole: Prediction) -> str:
    if profile.budget and whole.peak_bytes > _FULL * profile.budget:
        return "a larger memory_budget, or smaller batches: plans then keep more parameters gathered."
    return "more tokens per rank, or gradient accumulation; on several nodes device_mesh=(replicas, shards)."
