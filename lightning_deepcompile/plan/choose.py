"""Chooses by simulation how to spend memory, and which of several placements to use."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.simulate import Estimate, peak_bytes, simulate, step_seconds
from lightning_deepcompile.program.schedule import Schedule

MARGINS = (1.0, 1.5, 2.5)
"""How many times as long as it should a transfer takes in the placements that are simulated."""

Choice = tuple[int, Callable[[list[Schedule]], list[Schedule]]]
"""Bytes that a change takes, and the change, such as keeping a group of parameters gathered."""

Peak = Callable[[list[Schedule], int], int]
"""Predicts the most bytes that schedules allocate, or some number beyond a limit."""


def estimate_within(
    schedules: list[Schedule], profile: Profile, limit: int, peak: Peak | None = None
) -> Estimate | None:
    """Returns the duration and the peak that `simulate` predicts; None for a step that exceeds the limit.

    Args:
        schedules: The programs of a micro-batch.
        profile: Used to simulate.
        limit: Bytes that may be allocated.
        peak: Used to simulate memory; None for `peak_bytes`.
    """
    size = peak_bytes(schedules, profile) if peak is None else peak(schedules, limit)
    return Estimate(step_seconds(schedules, profile), size) if size <= limit else None


def choose_by_gain(
    schedules: list[Schedule], choices: Sequence[Choice], profile: Profile, budget: int, peak: Peak
) -> list[Schedule]:
    """Makes changes in order of simulated time saved per byte, until none fits or none helps.

    Changes can also help only together: each of many saves too little to count, or a transfer that is dropped lets
    the others start at a worse time. So making as many as fit, in the given order, is simulated as well.

    Args:
        schedules: The programs of a micro-batch.
        choices: The changes; of equally good ones the first is made first.
        profile: Used to simulate.
        budget: Bytes that may be allocated, unless the schedules need more already.
        peak: Used to simulate memory.
    """
    start = simulate(schedules, profile).estimate
    search = _Search(choices, profile, budget, peak)
    one_by_one, predicted = search.one_by_one(schedules, start)
    together, prediction = search.as_many_as_fit(schedules, start)
    return together if _counts(predicted, prediction) else one_by_one


def fastest_that_fits(trials: Sequence[list[Schedule]], profile: Profile, limit: int) -> list[Schedule]:
    """Returns the fastest of those that exceed the limit the least.

    Args:
        trials: The programs of a micro-batch, scheduled in several ways; of equally good ones the first stays.
        profile: What to simulate with.
        limit: Bytes that may be allocated.
    """
    predictions = [simulate(trial, profile) for trial in trials]
    over = [max(prediction.over(limit), 0) for prediction in predictions]
    return trials[min(range(len(trials)), key=lambda k: (over[k], predictions[k].seconds))]


@dataclass(frozen=True)
class _Search:
    """The inputs of both ways of choosing; arguments as of `choose_by_gain`."""

    choices: Sequence[Choice]
    profile: Profile
    budget: int
    peak: Peak

    def one_by_one(self, schedules: list[Schedule], best: Estimate) -> tuple[list[Schedule], Estimate]:
        result = list(schedules)
        # As a rule, the gain of a change shrinks as more are made: a gain from an earlier round is an upper bound, so
        # only the change that leads has to be simulated again.
        queue = [(-math.inf, order) for order in range(len(self.choices))]
        fresh: dict[int, tuple[list[Schedule], Estimate]] = {}  # of changes simulated since the last one was made
        while queue:
            _, order = heapq.heappop(queue)
            if order not in fresh:
                size, change = self.choices[order]
                trial = change(result)
                predicted = estimate_within(trial, self.profile, max(best.peak_bytes, self.budget), self.peak)
                if predicted is None or not _counts(best, predicted):
                    continue
                fresh[order] = trial, predicted
                gain = (best.seconds - predicted.seconds) / max(size, 1)
                if queue and (-gain, order) > queue[0]:
                    heapq.heappush(queue, (-gain, order))
                    continue
            result, best = fresh[order]
            fresh.clear()
        return result, best

    def as_many_as_fit(self, schedules: list[Schedule], start: Estimate) -> tuple[list[Schedule], Estimate]:
        result, limit = list(schedules), max(start.peak_bytes, self.budget)
        for _, change in self.choices:
            trial = change(result)
            if self.peak(trial, limit) <= limit:
                result = trial
        return result, simulate(result, self.profile).estimate


def _counts(before: Estimate, after: Estimate) -> bool:
    """Returns whether it saves at least a ten-thousandth of the step: less is no reason to spend memory."""
    return before.seconds - after.seconds > 1e-4 * before.seconds
