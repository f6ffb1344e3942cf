"""Decides again with a measured step, which knows seconds: with which moves it fits, and is then fastest.

Before anything is measured, moves are made in a fixed order, as many as the step lacks memory for (`plan.fit`). A plan
knows what a byte is worth: with more memory it may keep parameters gathered, which can save more time than copying
optimizer states costs; or it leaves memory free, into which states can come back, or in which blocks that the model
checkpoints can keep their activations. The last blocks do so first, as backward is done with them first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_deepcompile.plan.context import NO_LIMIT
from lightning_deepcompile.plan.copy_placement import offload_all
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.fit import MemoryPlan, Move, Moved, Need, fit
from lightning_deepcompile.plan.least import least_budget
from lightning_deepcompile.plan.optimize import PassEffect
from lightning_deepcompile.plan.settings import Rounding
from lightning_deepcompile.plan.simulate import arena_bytes, first_gather_bytes, simulate, window_bytes
from lightning_deepcompile.plan.state_copies import LEAST_SLOTS
from lightning_deepcompile.plan.state_memory import StateMemory, travel_seconds, with_away
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.schedule import Schedule

Planned = tuple[list[Schedule], list[PassEffect]]
"""What `optimize` returns."""

_GAIN = 0.01  # of a step: the least gain for which anything moves, or the step is traced again
_PARTS = 4  # of what might leave, tried one by one
_NO_STATES = StateMemory((), 0, 0, 0, 0, movable=False)


@dataclass(frozen=True)
class Checkpoint:
    """A block that is recomputed in backward, and could keep its activations instead.

    Args:
        bytes: Of these activations.
        gathered: Bytes of the parameters that it reads: its part of the forward pass, as far as is known.
    """

    bytes: int
    gathered: int


@dataclass(frozen=True)
class Trial:
    """A measured step as planned with some moves.

    Args:
        profile: The step as it would have been with them.
        schedules: Its programs under the plan.
        effects: What passes did.
        seconds: Predicted duration.
        over: Bytes beyond what may be allocated, in a pass or while the optimizer steps; negative if some are free.
        moved: Optimizer states in host memory.
        slots: Chunks of states that may be on the device while the optimizer steps.
        kept: How many of the last checkpointed blocks of each graph keep their activations.
    """

    profile: Profile
    schedules: Sequence[Schedule]
    effects: Sequence[PassEffect]
    seconds: float
    over: int
    moved: tuple[Moved, ...] = ()
    slots: int = LEAST_SLOTS
    kept: int = 0

    @property
    def away(self) -> int:
        """Bytes of optimizer states in host memory."""
        return sum(one.bytes for one in self.moved)

    def beats(self, other: Trial) -> bool:
        """Returns whether it exceeds the limit by less than another, or is faster by 1 % and exceeds it by no more."""
        more = max(self.over, 0) - max(other.over, 0)
        return more < 0 or (more == 0 and self.seconds < (1 - _GAIN) * other.seconds)


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan(MemoryPlan):
    """The moves with which a measured step fits, and is then fastest.

    Args:
        now: The step planned with everything where it is.
        best: The step planned with these moves; may be the same.
    """

    now: Trial
    best: Trial

    @classmethod
    def of(cls, room: int, least: int, now: Trial, best: Trial) -> MeasuredPlan:
        """Returns the decision for one of two plans; arguments as of the attributes."""
        reason = ""
        if best.away != now.away:
            other = (
                f"{now.seconds * 1e3:.1f} ms"
                if now.over <= 0
                else f"would need {format_bytes(now.over)} more than it may"
            )
            reason = f"a planned step takes {best.seconds * 1e3:.1f} ms; with {format_bytes(now.away)} there, {other}"
        peaks = room + now.over, room + best.over
        return cls(room, *peaks, best.moved, least=least, reason=reason, now=now, best=best)

    def stay(self) -> MeasuredPlan:
        """Returns the decision to move nothing."""
        return self.of(self.room, self.least, self.now, self.now)

    @property
    def moves_states(self) -> bool:
        """True if optimizer states move."""
        return self.best.away != self.now.away

    @property
    def required(self) -> bool:
        """True if they have to, as the step would not fit with them where they are."""
        return self.moves_states and self.now.over > 0

    def effects(self, placed: str) -> list[PassEffect]:
        """Returns what moves and passes do to the step as it was measured.

        Args:
            placed: What is in host memory with the plan, in words; "" for nothing.
        """
        first, *others = self.best.effects
        if not placed:
            return [first, *others]
        return [self.now.effects[0], replace(first, name="offload", changed=placed), *others]


def fit_measured(
    profile: Profile,
    plan: Callable[[Profile], Planned],
    states: StateMemory | None = None,
    *,
    blocks: Mapping[int, Sequence[Checkpoint]] | None = None,
    doubles: bool = False,
    traces: tuple[Move, ...] = (),
    rounding: Rounding = "same",
) -> MeasuredPlan:
    """Chooses by simulated time with which moves a step fits; moves nothing for less than 1 % of it.

    Where no plan fits, the step is traced again, as `fit` decides. Else, where nothing had to leave the device, as many
    checkpointed blocks as fit keep their activations, or half of them. Else plans are simulated with the optimizer
    states where they are now; with none in host memory, with half as many, and with as many as fill the remaining
    memory; and, if unlimited memory could save more time than the copies take, with more of them there.

    Args:
        profile: As measured.
        plan: Makes a plan with a profile.
        states: Sizes, and the bytes in host memory; None if they stay on the device in any case.
        blocks: Of each graph those that could keep their activations, by number and in the order in which they run.
        doubles: Whether blocks leave room for batches twice as large.
        traces: Ways to trace the step so that it needs less memory.
        rounding: Permission to change last bits.
    """
    search = _Search(profile, states or _NO_STATES, plan)
    room, least = search.limit, search.least()
    leaner = fit(Need({"step": least}, traces), room, rounding)
    if leaner.retrace is not None:
        ran = PassEffect("", "", simulate(profile.schedules, profile))
        now = Trial(profile, profile.schedules, [ran], ran.prediction.seconds, least - room)
        return replace(MeasuredPlan.of(room, least, now, now), retrace=leaner.retrace)
    now = search.tried(search.states.away)
    kept = search.kept(now, blocks or {}, doubles)
    return MeasuredPlan.of(room, least, now, kept or search.best_places(now))


class _Search:
    """Plans a step with one move after another; arguments as of `fit_measured`."""

    def __init__(self, profile: Profile, states: StateMemory, plan: Callable[[Profile], Planned]) -> None:
        self.profile, self.states, self._plan = profile, states, plan
        self.limit = (profile.budget or NO_LIMIT) + profile.room
        self._tried: dict[int, Trial] = {}  # a cached method would keep all of this alive

    def least(self) -> int:
        """Returns the least memory that the programs run in, with all in host memory that may be there."""
        profile, states = self.profile, self.states
        smallest = profile.schedules if profile.host_budget is None else offload_all(profile.schedules)
        return least_budget(smallest, with_away(profile, states, states.at_least(states.total)))

    def kept(self, now: Trial, blocks: Mapping[int, Sequence[Checkpoint]], doubles: bool) -> Trial | None:
        """Returns the step with blocks that keep their activations; None where that saves no time over `now`."""
        budget = self.profile.budget
        short = now.away > 0 or now.over > 0 or any(schedule.offloaded for schedule in self.profile.schedules)
        if budget is None or short or not any(blocks.values()):
            return None

        def needed(count: int) -> int:
            return sum(sum(block.bytes for block in some[-count:]) for some in blocks.values())

        start, best, reserve = now.effects[0], now, 2 if doubles else 1
        counts = range(1, max(map(len, blocks.values())) + 1)
        most = max((n for n in counts if start.prediction.peak_bytes + reserve * needed(n) <= budget), default=0)
        for count in sorted({most, most // 2} - {0}):
            left = budget - reserve * needed(count)
            schedules, effects = self._plan(replace(now.profile, budget=left))
            prediction = effects[-1].prediction
            seconds = prediction.seconds - _forward_seconds(self.profile, blocks, count)
            peak = prediction.peak_bytes + needed(count)
            text = f"blocks that keep activations: 0 become {count}, with {format_bytes(needed(count))}"
            effect = PassEffect("recompute", text, replace(prediction, seconds=seconds, peak_bytes=peak))
            over = prediction.peak_bytes - left
            trial = Trial(now.profile, schedules, [start, effect], seconds, over, now.moved, now.slots, count)
            best = trial if trial.beats(best) else best
        return best if best.kept else None

    def best_places(self, now: Trial) -> Trial:
        """Returns the step with optimizer states where it fits and is fastest."""
        states, best = self.states, now
        if not states.movable:
            return now

        def consider(away: int) -> None:
            nonlocal best
            if (trial := self.tried(away)).beats(best):
                best = trial

        while best.over > 0:  # once more if the buffers for states made the excess
            before = best
            consider(states.at_least(best.away + best.over))
            if best is before:
                break
        # In the step in which states come back, the buffers through which they come are allocated, too.
        coming = states.while_stepping(states.away) - states.while_stepping(states.away, 0) if states.chunk else 0

        def may_return(away: int) -> bool:
            return away >= states.away or states.while_stepping(away) + coming <= self.limit

        least = next(away for away in itertools.accumulate(states.sizes, initial=0) if may_return(away))
        for away in filter(may_return, self._fewer(now, least)):
            consider(away)
        for away in self._more(now):
            if best.over > 0 or now.over <= away - now.away:  # else what fits now would be given up
                consider(away)
        if best.away and best.over < 0:  # as many as fill the rest
            rest = states.at_least(max(best.away + best.over, least))
            if may_return(rest):
                consider(rest)
        return best

    def tried(self, away: int) -> Trial:
        """Returns the step with so many bytes of states in host memory, and the slots that its plan leaves room for."""
        if away not in self._tried:
            self._tried[away] = self._try(away)
        return self._tried[away]

    def _try(self, away: int) -> Trial:
        most = self._fitting(away, self.profile.schedules)
        trial = self._with_slots(away, most)
        fewer = self._fitting(away, trial.schedules)  # a plan may open a step with more
        if fewer < most:
            trial, most = self._with_slots(away, fewer), fewer
        if trial.over > 0 and (fewer := self.states.fewer_slots(away, most, trial.over)) > LEAST_SLOTS:
            trial = min(trial, self._with_slots(away, fewer), key=_excess)
        waits = trial.effects[-1].prediction.exposed_seconds > _GAIN * trial.seconds
        if most > LEAST_SLOTS and waits and (trial.over > 0 or trial.seconds > self._late_seconds(away)):
            # States that are on the device when the optimizer has stepped take memory from forward, which may wait for
            # them.
            trial = min(trial, self._with_slots(away, LEAST_SLOTS), key=_excess)
        return trial

    def _late_seconds(self, away: int) -> float:
        """The least seconds of a step whose states come when backward has ended, as with the fewest slots."""
        profile, schedules = self.profile, self.profile.schedules
        compute = sum(profile.cost(s, call.region).seconds for s in schedules for call in s.groups("compute"))
        copies = sum(map(profile.copy_in.copy_seconds, self.states.chunks(away)))
        return profile.micro_batches * compute + copies + profile.unexplained_seconds

    def _fitting(self, away: int, schedules: Sequence[Schedule]) -> int:
        states, sizes = self.states, sorted(s.instructions[k].bytes for s in schedules for k in s.at("gather"))
        # The gathers that open a step, or the two largest groups, if those are more.
        gathers = max(sum(sizes[-2:]), first_gather_bytes(schedules, self.profile))
        return states.slots(away, self.limit - gathers - states.stepping - states.total + away)

    def _with_slots(self, away: int, slots: int) -> Trial:
        profile, states = self.profile, self.states
        adapted = with_away(profile, states, away, slots)
        schedules, effects = self._plan(adapted)
        most, seconds = effects[-1].prediction.peak_bytes, effects[-1].prediction.seconds
        if states.sizes:
            # While states leave, the gathers that open the next step are launched.
            beside = _arena(schedules, profile) - _arena(profile.schedules, profile)
            if not profile.host_computes:
                there = window_bytes(schedules, profile) - window_bytes(profile.schedules, profile)
                beside = max(beside, first_gather_bytes(schedules, profile) + there)
            most = max(most, states.while_stepping(away, slots) + beside)
        return Trial(adapted, schedules, effects, seconds, most - self.limit, states.moved(away), slots)

    def _fewer(self, now: Trial, least: int) -> list[int]:
        """Amounts to try with fewer states in host memory than `now`, but at least `least`; the fewest last."""
        wanted = [now.away + min(now.over, 0), now.away // 2, least] if now.away else []
        found = [self.states.at_least(max(n, least)) for n in wanted]
        return sorted({n for n in found if n < now.away}, reverse=True)

    def _more(self, now: Trial) -> list[int]:
        """Amounts to try with more of them there, where a plan with unlimited memory would pay for their copies."""
        profile, states = self.profile, self.states
        free = self._plan(replace(now.profile, budget=NO_LIMIT))[1][-1].prediction.seconds
        gain = now.seconds - free
        if gain <= _GAIN * now.seconds:
            return []
        known = travel_seconds(profile, states.away)
        if states.chunk and not profile.host_computes:
            gain += now.effects[-1].prediction.compute_seconds  # beside which they can be copied
        away = [n for n in itertools.accumulate(states.sizes) if states.away < n <= states.host]
        paying = [n for n in away if travel_seconds(profile, n) - known < gain]
        return sorted({paying[(len(paying) * part - 1) // _PARTS] for part in range(1, _PARTS + 1)}) if paying else []


def _excess(trial: Trial) -> tuple[int, float]:
    """Sorts trials: by what they exceed the limit by, then by time."""
    return max(trial.over, 0), trial.seconds


def _forward_seconds(profile: Profile, blocks: Mapping[int, Sequence[Checkpoint]], count: int) -> float:
    """Seconds that the last `count` blocks compute in the forward passes of a step."""
    total = 0.0
    for schedule in profile.schedules:
        some = blocks.get(schedule.frame, ())
        if schedule.kind == "forward" and some:
            gathered = sum(gather.bytes for gather in schedule.groups())
            share = sum(block.gathered for block in some[-count:]) / max(gathered, 1)
            total += min(share, 1.0) * profile.clock(schedule)[-1]
    return total * profile.micro_batches


def _arena(schedules: Sequence[Schedule], profile: Profile) -> int:
    names = ("hosted", "window_from", "world_size", "device_type")
    rows = arena_bytes(schedules, **{name: getattr(profile, name) for name in names})
    return max((size for row in rows for size in row), default=0) + window_bytes(schedules, profile)
