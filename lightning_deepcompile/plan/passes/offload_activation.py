"""Adaptive offloading of activations: what does not fit waits in host memory between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.copy_placement import CopyPlacement, without_copies
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.simulate import Prediction, memory_excess, simulate
from lightning_deepcompile.program.schedule import Schedule

__all__ = ["offload_activation"]

_MARGINS = (1.0, 1.5, 2.5)

Key = tuple[int, int]
"""A frame, and the number of one of its saved tensors."""


def offload_activation(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Lets as many saved tensors leave the device as exceed the memory budget, and no more.

    Looks for: saved tensors that free their memory by leaving.

    Changes: tensors leave in the order in which forward makes them, as the first ones have the most time until backward
    reads them. A copy out starts when its tensor is made; compute waits for it where it is expected to be over, or
    where the memory is needed, if that is earlier. A copy in starts at the last place from which it, and those queued
    behind it, end before they are read, or later, where there is no room before. Placements with more and more margin
    are simulated; of those that fit best, the fastest stays. Where everything fits, nothing leaves; with
    ``offload_activations="all"`` everything does.

    Needs from the profile: times and memory of regions; the speed of copies.

    Promises: same values; same communication; predicted memory within the budget where that is possible.

    Args:
        schedules: The programs of a micro-batch.
        context: Settings and profile.

    Returns:
        The schedules; unchanged unless `CompileConfig.offload_activations` asks for it.
    """
    mode = context.settings.offload_activations
    if mode == "none":
        return list(schedules)
    profile = context.require_profile("offload_activation")
    search = _Search([without_copies(s) for s in schedules], profile, context.whole_budget)
    candidates = _that_fit_on_host(_candidates(schedules, 0 if mode == "all" else _SMALLEST), profile)
    if mode == "all":
        return search.best(candidates)[0]
    fits: Callable[[int], bool] = lambda count: search.excess(candidates[:count]) == 0  # noqa: E731
    if fits(0):
        return search.schedules
    low, high = 0, len(candidates)  # the fewest that fit are more than `low`, and `high` if any do
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return search.best(candidates[:high])[0]


_SMALLEST = 1 << 16
"""A copy of fewer bytes costs the host more than its memory is worth."""


def _candidates(schedules: Sequence[Schedule], smallest: int) -> list[tuple[Key, int]]:
    """What may leave, with its bytes, in the order in which forward makes it."""
    read = {(s.frame, one.number) for s in schedules if s.kind == "backward" for one in s.saved}
    found = []
    for schedule in schedules:
        if schedule.kind != "forward":
            continue
        placement = CopyPlacement.of(schedule)
        for number in sorted(placement.saved, key=lambda n, p=placement: (p.first(n), -p.saved[n].size, n)):
            size = placement.saved[number].size
            if size >= max(smallest, 1) and (schedule.frame, number) in read:
                found.append(((schedule.frame, number), size))
    return found


def _that_fit_on_host(candidates: Sequence[tuple[Key, int]], profile: Profile) -> list[Key]:
    result, total = [], 0
    for key, size in candidates:
        total += 1 << max(size - 1, 0).bit_length()  # the runtime's buffers have powers of two
        if profile.host_budget is not None and total > profile.host_budget:
            break
        result.append(key)
    return result


class _Search:
    """Places copies and looks at what comes of it."""

    def __init__(self, schedules: list[Schedule], profile: Profile, limit: int) -> None:
        self.schedules = schedules
        self._profile, self._limit = profile, limit

    def excess(self, chosen: Sequence[Key]) -> int:
        """At how many places the budget is exceeded if `chosen` leave, as little as that can be."""
        return len(memory_excess(self._fitted(chosen, _MARGINS[0]), self._profile, self._limit))

    def best(self, chosen: Sequence[Key]) -> tuple[list[Schedule], Prediction]:
        """The fastest of the placements that exceed the budget the least."""
        trials = [self._fitted(chosen, margin) for margin in _MARGINS]
        predictions = [simulate(trial, self._profile) for trial in trials]
        over = [max(prediction.over(self._limit), 0) for prediction in predictions]
        index = min(range(len(trials)), key=lambda k: (over[k], predictions[k].seconds))
        return trials[index], predictions[index]

    def _fitted(self, chosen: Sequence[Key], margin: float) -> list[Schedule]:
        placements = [CopyPlacement.of(s) for s in self.schedules]
        turns = [self._turns(p, {n for f, n in chosen if f == p.schedule.frame}, margin) for p in placements]
        while True:
            trial = [p.at(t) for p, t in zip(placements, turns, strict=True)]
            over = memory_excess(trial, self._profile, self._limit)
            if not any(self._move(placements, trial, turns, index, position) for index, position in over):
                return trial

    def _turns(self, placement: CopyPlacement, numbers: set[int], margin: float) -> dict[int, int]:
        """The places that hide the copies, if each takes `margin` times as long as the profile says."""
        schedule, profile = placement.schedule, self._profile
        if schedule.kind not in ("forward", "backward"):
            return {}
        clock = [0.0]  # when compute, never waiting, gets to each instruction of the body
        for instruction in placement.body:
            cost = profile.cost(schedule, instruction.region).seconds if instruction.op == "compute" else 0.0
            clock.append(clock[-1] + cost)
        turns: dict[int, int] = {}
        order = sorted((n for n in numbers if n in placement.saved), key=lambda n: (placement.first(n), n))
        if schedule.kind == "forward":
            done = 0.0
            for number in order:
                seconds = profile.copy_out.copy_seconds(placement.saved[number].size)
                done = max(done, clock[placement.first(number) + 1]) + margin * seconds
                later = (p for p in range(placement.free(number), len(clock)) if clock[p] >= done)
                turns[number] = next(later, len(placement.body))
        else:
            deadline = float("inf")
            for number in reversed(order):
                seconds = profile.copy_in.copy_seconds(placement.saved[number].size)
                deadline = min(deadline, clock[placement.first(number)]) - margin * seconds
                earlier = (p for p in range(placement.first(number), -1, -1) if clock[p] <= deadline)
                turns[number] = next(earlier, 0)
        return turns

    def _move(
        self,
        placements: Sequence[CopyPlacement],
        trial: Sequence[Schedule],
        turns: Sequence[dict[int, int]],
        index: int,
        position: int,
    ) -> bool:
        """Makes room at an instruction: a copy out is waited for before it, or a copy in starts behind it."""
        placement, mine = placements[index], turns[index]
        where = sum(i.op not in ("offload", "reload", "wait_copy") for i in trial[index].instructions[:position])
        if placement.schedule.kind == "forward":
            late = {n: t for n, t in mine.items() if t > where >= placement.free(n)}
            if late:
                mine[min(late, key=lambda n: (placement.first(n), n))] = where
                return True
        elif placement.schedule.kind == "backward":
            early = {n: t for n, t in mine.items() if t <= where < placement.first(n)}
            if early:
                mine[max(early, key=lambda n: (placement.first(n), n))] = where + 1
                return True
        return False
