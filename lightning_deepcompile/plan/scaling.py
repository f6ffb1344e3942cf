"""Predicts a step on more ranks: weak scaling (a batch as measured for each) and strong scaling (one for all)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.optimize import optimize
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.simulate import Prediction
from lightning_deepcompile.plan.step_pass import Pass
from lightning_deepcompile.program.printer import align, format_bytes


@dataclass(frozen=True)
class ScalingPoint:
    """The step on one number of ranks, planned for it.

    Args:
        ranks: All of them, replicas included.
        weak: The step where every rank has as large a batch as was measured.
        strong: The step where all ranks together have the batch that was measured.
        efficiency: Of weak scaling: 1 if the step takes no longer than on the measured ranks.
        speedup: Of strong scaling: how many times as fast the same batch is done as there.
        ideal: The speed-up if it were proportional to the number of ranks.
    """

    ranks: int
    weak: Prediction
    strong: Prediction
    efficiency: float
    speedup: float
    ideal: float


def scaling(
    measured: Profile,
    counts: Sequence[int],
    on: Callable[[int], Profile],
    passes: Sequence[Pass],
    settings: PlanSettings | None = None,
) -> list[ScalingPoint]:
    """Plans and simulates the measured step on other numbers of ranks.

    Args:
        measured: The profile.
        counts: Numbers of ranks.
        on: The profile as it would be on a number of ranks.
        passes: The passes that plan each step.
        settings: The choices that passes follow.
    """
    chosen = settings or PlanSettings()

    def planned(profile: Profile) -> Prediction:
        return optimize(profile.schedules, passes, PlanContext(chosen, profile))[1][-1].prediction

    reference = planned(measured).seconds
    points = []
    for ranks in counts:
        there, ideal = on(ranks), ranks / measured.world_size
        weak, strong = planned(there), planned(there.for_share(1 / ideal))
        efficiency, speedup = (reference / one.seconds if one.seconds else 0.0 for one in (weak, strong))
        points.append(ScalingPoint(ranks, weak, strong, efficiency, speedup, ideal))
    return points


def scaling_rows(points: Sequence[ScalingPoint]) -> list[tuple[str, ...]]:
    """Points as rows of a table; the first row names the columns."""
    rows: list[tuple[str, ...]] = [
        ("ranks", "step", "exposed", "peak", "efficiency", "step, same batch", "speed-up", "of ideal")
    ]
    for point in points:
        weak, strong = point.weak, point.strong
        cells = (_ms(weak.seconds), _ms(weak.exposed_seconds), format_bytes(weak.peak_bytes), f"{point.efficiency:.0%}")
        same = (_ms(strong.seconds), f"{point.speedup:.2f}", f"{point.speedup / point.ideal:.0%}")
        rows.append((f"{point.ranks}", *cells, *same))
    return rows


def format_scaling(points: Sequence[ScalingPoint]) -> str:
    """Points as a table for a terminal."""
    return "\n".join(f"  {line}" for line in align(scaling_rows(points), left=()))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
