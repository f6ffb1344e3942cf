"""Spending memory on what saves the most time per byte."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.simulate import Prediction, simulate
from lightning_deepcompile.program.schedule import Instruction, Schedule

__all__ = ["Candidate", "choose_by_gain"]

Candidate = tuple[tuple[int, int], Instruction]
"""Indices of a forward and its backward schedule, and a group of gathers that may stay gathered."""


def choose_by_gain(
    schedules: list[Schedule],
    candidates: Sequence[Candidate],
    keep: Callable[[list[Schedule], int, int, Instruction], list[Schedule]],
    profile: Profile,
    budget: int,
) -> list[Schedule]:
    """Keeps groups in order of simulated time saved per byte, until none fits or none helps.

    Args:
        schedules: The programs of a micro-batch.
        candidates: What may be kept; of equally good ones the earlier goes first.
        keep: Gives the schedules with a candidate kept.
        profile: What to simulate with.
        budget: Bytes that may be allocated, unless the schedules need more already.

    Returns:
        The schedules.
    """
    result = list(schedules)
    best = simulate(result, profile)
    # The gain of one group shrinks, as a rule, the more are kept: a gain from an earlier round is an upper bound, and
    # only the group that leads has to be simulated anew.
    queue = [(float("-inf"), order, pair, group) for order, (pair, group) in enumerate(candidates)]
    heapq.heapify(queue)
    while queue:
        _, order, (forward, backward), group = heapq.heappop(queue)
        trial = keep(result, forward, backward, group)
        prediction = simulate(trial, profile)
        gain = _gain_per_byte(best, prediction, group)
        if gain <= 0 or prediction.peak_bytes > max(best.peak_bytes, budget):
            continue
        if queue and -gain > queue[0][0]:
            heapq.heappush(queue, (-gain, order, (forward, backward), group))
            continue
        result, best = trial, prediction
    return result


def _gain_per_byte(before: Prediction, after: Prediction, group: Instruction) -> float:
    """Seconds saved per byte; nothing below a ten-thousandth of the step, which is no reason to spend memory."""
    saved = before.seconds - after.seconds
    return saved / group.bytes if saved > 1e-4 * before.seconds and group.bytes else 0.0
