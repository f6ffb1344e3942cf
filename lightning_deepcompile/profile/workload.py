"""The steps that a plan is made for: how long ranks compute in each of them, at the sizes of its batches.

A step waits for the rank with the most work, so its time follows from that rank's. A plan is made for the mean of these
times over the steps seen, each as often as it came. Where compute or communication alone decides how long a step takes,
the mean step takes the mean time; between, it is a little shorter, for every plan alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.program.schedule import Schedule

_EQUAL = 0.03  # of a step's compute: ranks with equal work differ by as much
_BEYOND = 1.25  # how far beyond the measured steps times still follow from theirs


@dataclass(frozen=True)
class Workload:
    """Steps, merged over ranks.

    Args:
        longest: For how many seconds the rank with the most work computes in each step; 0 if that is not known.
        shortest: For how many the one with the least.
        seconds: How long the step took; 0 if that tells nothing, as something was compiled, or measured, in it.
        varied: Whether steps differ in their work.
    """

    longest: tuple[float, ...]
    shortest: tuple[float, ...]
    seconds: tuple[float, ...]
    varied: bool

    @classmethod
    def of(cls, totals: Sequence[float], seconds: Sequence[float], varied: bool) -> list[float]:
        """Returns one rank's numbers, of which `merged` takes the largest over ranks."""
        return [float(varied), *totals, *(-one for one in totals), *seconds, *(-one for one in seconds)]

    @classmethod
    def merged(cls, numbers: Sequence[float]) -> Workload:
        """Returns the steps, from the largest numbers over all ranks."""
        varied, *rest = numbers
        count = len(rest) // 4
        most, least, seconds, known = (rest[k * count : (k + 1) * count] for k in range(4))
        shortest = [-one for one in least]
        longest = [most if least > 0 else 0.0 for most, least in zip(most, shortest, strict=True)]
        valid = [one if other < 0 else 0.0 for one, other in zip(seconds, known, strict=True)]
        return cls(tuple(longest), tuple(shortest), tuple(valid), varied > 0)

    @property
    def mean(self) -> float:
        """Mean seconds of compute in a step, of the rank with the most work in it; 0 if unknown."""
        return statistics.fmean([one for one in self.longest if one > 0] or [0.0])

    @property
    def skew(self) -> float:
        """Mean seconds for which the rank with the least work waits in a step for the one with the most; 0 if equal."""
        pairs = [(most, least) for most, least in zip(self.longest, self.shortest, strict=True) if most > 0]
        skew = statistics.fmean([most - least for most, least in pairs] or [0.0])
        return skew if skew > _EQUAL * self.mean else 0.0

    def settle(self, profile: Profile) -> Profile:
        """Returns the profile of the mean step, and how long it takes.

        Args:
            profile: The ranks', merged: the times of its regions are the means of the rank for which each is longest.
        """
        # A gather waits for the last rank, too: that is no time of the link's.
        profile = replace(profile, exposed_seconds=max(profile.exposed_seconds - self.skew, 0.0))
        compute = profile.micro_batches * sum(_compute(profile, schedule) for schedule in profile.schedules)
        if not self.varied or self.mean <= 0 or compute <= 0:
            return profile
        profile = profile.with_compute(self.mean / compute)
        times = self.at_mean(profile, profile.schedules, self.longest, self.seconds)
        return replace(profile, step_seconds=statistics.median(times)) if times else profile

    def at_mean(
        self, profile: Profile, schedules: Sequence[Schedule], longest: Sequence[float], seconds: Sequence[float]
    ) -> list[float]:
        """Returns how long steps would have taken as a mean step, in which measured and predicted are as in theirs.

        Steps far beyond all measured ones tell nothing of it.

        Args:
            profile: Of the mean step.
            schedules: Those that ran.
            longest: As of the object, of any steps.
            seconds: Likewise.
        """
        known = [one for one in self.longest if one > 0]
        predict = _predictor(profile, schedules)
        found = []
        for compute, measured in zip(longest, seconds, strict=True):
            if measured > 0 and compute > 0 and min(known) / _BEYOND <= compute <= max(known) * _BEYOND:
                found.append(measured * predict(1.0) / predict(compute / self.mean))
        return found


def _compute(profile: Profile, schedule: Schedule) -> float:
    return sum(profile.cost(schedule, schedule.instructions[k].region).seconds for k in schedule.at("compute"))


def _predictor(profile: Profile, schedules: Sequence[Schedule]) -> Callable[[float], float]:
    known: dict[float, float] = {}

    def predict(factor: float) -> float:
        """Returns the duration of a step that computes so many times as long."""
        if factor not in known:
            found = simulate(schedules, profile.with_compute(factor)).seconds
            known[factor] = max(found, 1e-9)
        return known[factor]

    return predict
