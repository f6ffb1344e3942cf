"""The loop of measuring, planning and swapping: profiles a few ordinary steps, then rewrites the programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_deepcompile import compat
from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.offload.activations import ActivationOffload
from lightning_deepcompile.offload.residency import Residency
from lightning_deepcompile.plan.admit import admitted
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import Profile, ProfileError
from lightning_deepcompile.plan.fit import Need, fit
from lightning_deepcompile.plan.fit_measured import MeasuredPlan, Planned, fit_measured
from lightning_deepcompile.plan.known_passes import DEFAULT_SCHEDULE, resolve_passes
from lightning_deepcompile.plan.limits import limits
from lightning_deepcompile.plan.measured import MeasuredStep
from lightning_deepcompile.plan.optimize import optimize
from lightning_deepcompile.plan.plan_file import Batches, Setting
from lightning_deepcompile.plan.report import PassReport, Round, shortage_note
from lightning_deepcompile.plan.state_memory import StateMemory
from lightning_deepcompile.profile.links import Transfer, agree, small_transfers
from lightning_deepcompile.profile.marks import StepMarks
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.ranks.exchange import attempt, exchange, maxima, on_any
from lightning_deepcompile.tuning.agenda import Agenda, pass_schedule
from lightning_deepcompile.tuning.coverage import Coverage
from lightning_deepcompile.tuning.current import CurrentPrograms
from lightning_deepcompile.tuning.foresight import Foresight, StepRetracedError
from lightning_deepcompile.tuning.measuring import (
    ISOLATED,
    OBSERVED,
    PLANNED,
    TIMED,
    VERIFIED,
    Measurement,
    agreed_profile,
)
from lightning_deepcompile.tuning.plan_store import PlanStore
from lightning_deepcompile.tuning.retracing import Retracing
from lightning_deepcompile.tuning.shared_step import share_step
from lightning_deepcompile.tuning.shortages import MemoryRetry
from lightning_deepcompile.tuning.slow_ranks import SlowRanks
from lightning_deepcompile.tuning.together import Seen, put_together

_log = logging.getLogger(__name__)

_NOISE = 0.03  # how much slower than before a plan may measure
_NOTHING = "The step was measured, and there was nothing to plan: parameters are gathered once a step, or on one rank."


class Tuner:
    """Plans the programs of a training step again when their times are measured.

    A round takes a few optimizer steps, the same ones on every rank. Two are timed. One runs as scheduled, with marks
    behind every instruction; the next waits for every collective at once, so that each is seen by itself. Then ranks
    exchange what they measured, plan with the same numbers, and swap. Three more steps are timed: if they are slower,
    the old programs come back. Between rounds, a step costs one comparison. When a rank ran out of memory under a plan,
    all ranks drop it in the same step, decide again what fits, and plan with the memory that was there.

    Args:
        capture: Its programs are planned.
        runtime: ``_C.Runtime`` that executes them.
        group: The ranks.
        device: Where programs run.
        memory: Of that device.
        retry: Knows whether this rank was short of memory.
        residency: Places optimizer states together with plans; None where they stay on the device.
        leaving: Decides which saved tensors are offloaded where nothing was measured.
        hosted: Says which shards are in host memory for good; "" for none.

    Attributes:
        rounds: What was done, round by round.
        largest: Elements of the largest batch so far, and its longest dimension, on this rank or in the loaded plan.
        profile: What the last round planned with.
        measured: A step of several ranks: one under the plan in use, or one before planning; None before there
            is one.
        skew_seconds: For how long the rank with the least work waits in a step for the one with the most, as measured
            in the last round.

    Raises:
        PassError: If the configured passes do not exist or do not fit together.
        ValueError: If the configured schedule plans for a stage at which nothing is gathered twice.
    """

    def __init__(
        self,
        capture: Capture,
        runtime: Any,
        group: dist.ProcessGroup,
        device: torch.device,
        memory: PeakMemory,
        retry: MemoryRetry,
        residency: Residency | None,
        leaving: ActivationOffload,
        hosted: str = "",
    ) -> None:
        self._capture, self._runtime, self._group = capture, runtime, group
        self._device, self._memory = device, memory
        self._retry, self._residency, self._hosted = retry, residency, hosted
        self._slow_ranks = SlowRanks(group, device, memory, capture.frames)
        self._retracing = Retracing(capture, group)
        self._foresight = Foresight(capture, self._retracing, leaving, memory, group)
        capture.entry.before_first_run = compat.held_weakly(self.before_first_run)
        capture.entry.before_larger = compat.held_weakly(self.before_larger)
        config, world = capture.config, capture.model.ranks.shards
        setting = Setting(world, capture.stage, device.type, config.memory_budget, config.rounding)
        self._store = PlanStore(config.plan, setting, group)
        (_, first), *entries = pass_schedule(config, capture.stage, world)
        self._agenda = Agenda(entries)
        self._current = CurrentPrograms(capture, runtime, retry, first)
        self._leaving = leaving
        self._retraces = False  # whether the training step is to be retraced
        self.rounds: list[Round] = []
        self.profile: Profile | None = None
        self._decided: MeasuredPlan | None = None  # in the last round
        self.measured: MeasuredStep | None = None
        self.skew_seconds = 0.0
        self._step = 0  # optimizer steps done
        self._boundary = False  # the optimizer has stepped since the last micro-batch
        self._round: Measurement | None = None  # the one under way, or the next one if it is known when that begins
        self._coverage = Coverage(capture.frames)
        self._marks: StepMarks | None = None
        self._excess = 0  # bytes that steps took beyond the budget, which their plan had kept
        self.largest = 0, 0
        if not self._load():
            self._begin_round(self._agenda.next(0))

    # What the engine calls --------------------------------------------------------------------------------------------

    def begin_micro_batch(self) -> bool:
        """Call before a training step's forward pass, on all ranks; returns whether that step is to be retraced."""
        self._current.swapped = self._retraces = False
        if self.settled and self._agenda.recheck is None and not self._current.planned:
            return False
        if self._boundary:
            self._boundary, self._marks = False, None
            self._step += 1
            self._at_boundary()
        if self._marks is not None:
            self._marks.begin_micro_batch()
        return self._retraces

    def before_first_run(self, frame: int | None) -> None:
        """Call on all ranks at the same place, when a training step is compiled and before it runs.

        Args:
            frame: Number of a graph that was compiled later, which other ranks may not have; None for the first step.

        Raises:
            StepRetracedError: If the step is to be traced once more, so that it fits into memory.
            MemoryBudgetError: If the step does not fit into a budget that the user has chosen.
        """
        if frame is not None:
            self._foresight.look_alone([p for p in self._current.in_order() if p.schedule.frame == frame], self._say)
            return
        if self._current.planned:
            return  # a plan that was read knows
        restartable = self._capture.entry.runs_first()
        retraced = self._foresight.look(self._step, self._current.in_order(), self._say, restartable=restartable)
        if retraced is not None:
            self.rounds.append(retraced)
            self._say(retraced.headline(), logging.WARNING)
            raise StepRetracedError
        if self._leaving.needed:
            self._plan_copies()

    def begin_batch(self, larger: bool, on_any_rank: Callable[[], bool], elements: Callable[[], int]) -> None:
        """Call before a training step's forward pass, after `begin_micro_batch`.

        Args:
            larger: Whether this rank's batch is larger than all before.
            on_any_rank: Returns whether that of any rank is; the same on all ranks.
            elements: Returns the number of elements of this rank's batch.
        """
        self._capture.entry.larger = on_any_rank
        if self._round is not None and self._marks is not None:
            self._round.elements.append(elements())
        elif self._agenda.looks_soon(self._step):
            self._coverage.note(elements())
        if larger:
            self._foresight.note(self._capture.frames.training)

    def before_larger(self, frame: int) -> None:
        """Call on all ranks at the same place, before a batch runs that is larger than all before on a rank.

        Args:
            frame: Number of the graph that is about to run.
        """
        if not self._foresight.look_at_larger(
            [p for p in self._current.in_order() if p.schedule.frame == frame], self._say
        ):
            return
        if self._leaving.needed:
            self._plan_copies()
        self._runtime.parameters.invalidate()  # what was gathered ahead was for the programs of before
        if self._current.planned or self._round is not None:
            self._drop_plan()  # one for larger batches follows

    def _plan_copies(self) -> None:
        """Lets plans decide which saved tensors are offloaded."""
        self._leaving.plans = True
        scheduling = self._capture.scheduling
        if scheduling.settings.offload_activations == "none":
            scheduling.settings = replace(scheduling.settings, offload_activations="auto")
        if self._capture.config.schedule == "auto" and self._capture.stage == 3 and not self._agenda.passes:
            self._agenda.passes = resolve_passes(DEFAULT_SCHEDULE[-1]["passes"], profiled=True)

    def begin_backward(self, update: bool) -> None:
        """Call before a backward pass; `update` says whether the optimizer may step behind it."""
        if self._marks is not None:
            self._marks.begin_backward(update)

    def end_backward(self) -> None:
        """Call when a backward pass has ended, and the device waits for its reductions."""
        if self._marks is not None:
            self._marks.end_backward()

    def end_step(self) -> None:
        """Call when the optimizer has stepped."""
        self._boundary = True
        if self._marks is not None:
            self._marks.finish()

    def hear(self, *, short: bool) -> None:
        """Call when ranks have told each other whether one of them was `short` of memory."""
        self._retry.told |= short

    def note_memory(self, error: BaseException) -> None:
        """Adds a note to an out-of-memory error: a plan may be the cause, as it is made for a few steps' batches."""
        if isinstance(error, torch.OutOfMemoryError):
            notes = shortage_note(self.rounds), self._retracing.note(), self._foresight.shortfall()
            for note in filter(None, notes):
                error.add_note(note)

    @property
    def memory_plan(self) -> str:
        """The decision made before the first step, if the step did not fit as it is; else empty."""
        plan = self._foresight.plan
        return "" if plan is None or (plan.fits and not plan.moved) else str(plan)

    @property
    def settled(self) -> bool:
        """Returns whether no step is measured, now or soon."""
        return self._round is None and not self._slow_ranks.compares

    @property
    def isolates(self) -> bool:
        """True if the step under way must launch all its gathers: programs were swapped, or collectives are timed."""
        return self._current.swapped or (self._marks is not None and self._marks.isolation is not None)

    # A round ----------------------------------------------------------------------------------------------------------

    @property
    def short(self) -> bool:
        """True if this rank was short of memory since the programs in use took over."""
        return self._retry.short

    def _at_boundary(self) -> None:
        if self._retry.told:
            self._answer_shortages()
        if self._step == self._agenda.recheck:
            self._look_for_new_programs()
        if self._round is None:
            if self._slow_ranks.compares:
                self._compare_ranks()
            return
        moment = self._step - self._round.first
        if moment == PLANNED:
            self._plan(self._round)
            moment = OBSERVED if self._round is not None and self._round.first == self._step else moment
        elif moment == VERIFIED:
            self._verify()
        if self._round is not None:
            self._marks = self._round.marks(moment, self._device, self._memory, self._runtime, self._capture)
            if moment == OBSERVED and not self._round.repeats:
                self._say(f"Measuring steps {self._step} and {self._step + 1}, to plan with their times.", logging.INFO)
            if moment in (OBSERVED, ISOLATED) and self._capture.progress is not None:
                self._capture.progress(f"measuring, step {moment + 1}/2")

    def _compare_ranks(self) -> None:
        self._marks, found = self._slow_ranks.next_step()
        if found:
            self._say(found, logging.WARNING)

    def _plan(self, measurement: Measurement) -> None:
        for executable in self._capture.frames.training:
            executable.swap(executable.program)
        if on_any(not measurement.complete, self._group) and measurement.repeat():
            return
        self._agenda.attempts += 1
        own, _ = attempt(measurement.transfers)  # an error is met again, and told
        transfers = agree([*(own or ()), *self._small_transfers()], self._group)
        mine, error = attempt(lambda: self._measured(measurement, transfers))
        try:
            seen = put_together(mine, error, measurement.unknown, self._group)
        except ProfileError as failure:
            level = logging.WARNING if self._agenda.passes or self._retracing.pending else logging.INFO
            self._say(f"No plan was made at step {self._step}, and training goes on as before: {failure}", level)
            self._end_round(retry=True)
            return
        if measurement.searching and not seen.new:
            self._end_round()  # the steps ran what is planned already
            return
        chosen = self._capture.config.memory_budget
        self.measured = share_step(measurement.observed, self._group, planned=False)
        assert seen.workload is not None
        measurement.workload, self.skew_seconds = seen.workload, seen.workload.skew
        measurement.ran = seen.profile.schedules
        limit = self._foresight.limit
        profile, budget = agreed_profile(seen.profile, seen.workload, seen.start, chosen, limit, self._excess)
        self.profile = profile
        if seen.unequal:
            self._slow_ranks.suspect()
        # Without a budget of the user's, or a rank that was short, the step fits: it has run.
        must = chosen is not None or limit is not None
        decided = fit_measured(
            profile,
            self._optimized,
            self._states_now(),
            blocks=self._retracing.blocks(profile, seen.checkpoints),
            doubles=chosen is None,
            traces=self._retracing.moves() if must else (),
            rounding=self._capture.config.rounding,
        )
        if decided.retrace is None:
            fit(Need({"step": decided.least}), budget, "same").check(chosen)
        if (retraced := self._retracing.follow(self._step, decided, profile)) is not None:
            self._retrace(retraced)
            return
        if not self._agenda.passes:
            times = profile.step_seconds, profile.exposed_seconds
            self.rounds.append(Round(self._step, (), budget, *times, outcome="measured", reason=_NOTHING))
            self._say_limit()
            self._end_round()
            return
        if self._residency is not None and not self._residency.follow(decided):
            decided = decided.stay()
        self._decided, self.profile = decided, decided.best.profile
        states = "" if self._residency is None else self._residency.describe()
        effects = decided.effects("; ".join(filter(None, (self._hosted, states))))
        passes = [one.name for one in self._agenda.passes]
        note = f" The passes {passes} planned it. Add 'proactive_prefetch', or raise the budget."
        fit(Need({"step": effects[-1].prediction.peak_bytes}), budget, "same").check(chosen, note)
        reports = [PassReport.of(effect) for effect in effects]
        times = profile.step_seconds, profile.exposed_seconds
        self.rounds.append(
            Round(
                self._step,
                tuple(reports),
                budget,
                *times,
                before_peak_bytes=self._memory.highest or None,
                skew_seconds=self.skew_seconds,
            )
        )
        self._coverage.add(measurement.programs, measurement.elements)
        before = self._current.schedules()
        self._current.follow(decided.best.schedules, self._agenda.passes)
        self._memory.restart()
        same = self._current.schedules() == before and not decided.moves_states
        if not on_any(not same, self._group):  # which of its activations leave is decided by each rank
            self._finish_round(outcome="unchanged")

    def _optimized(self, profile: Profile) -> Planned:
        context = PlanContext(self._capture.scheduling.settings, profile)
        return optimize(profile.schedules, self._agenda.passes or self._current.first, context)

    def _states_now(self) -> StateMemory | None:
        """Returns where optimizer states are; None where they stay on the device, and before that is decided."""
        states = None if self._residency is None else self._residency.memory()
        return states if states is None or self._agenda.passes else replace(states, movable=False)

    def _retrace(self, done: Round) -> None:
        self.rounds.append(done)
        self._say(done.headline(), logging.INFO if not done.reason else logging.WARNING)
        self._say(str(done), logging.DEBUG)
        self._current.start_again()
        self._retraces = True
        # Else programs keep what they are compiled with, as at step 0.
        if self._agenda.passes or self._retracing.pending:
            self._agenda.again(self._step)
        self._end_round()

    def _answer_shortages(self) -> None:
        """Decides again, as a rank was short of memory; a collective."""
        shortages = [one for told in exchange(self._retry.take(), self._group) for one in told]
        self._retry.told = False
        if not shortages:  # they were of programs that are gone
            return
        if self.rounds and self.rounds[-1].outcome == "measuring":
            self.rounds[-1] = replace(self.rounds[-1], outcome="out of memory")
        plan = self._foresight.look_after(self._current.in_order(), shortages, self.profile, self._say)
        others = f" ({len(shortages) - 1} more times since)" if len(shortages) > 1 else ""
        reason = (
            f"{shortages[0]}{others} It gave {format_bytes(max(s.relieved for s in shortages))} back and went on. From "
            f"step {self._step} on: {plan}"
        )
        done = Round(self._step, (), plan.room, 0.0, 0.0, outcome="leaner", reason=reason)
        if plan.retrace is not None:
            self._retracing.trace(plan.retrace)
            self._retrace(done)
            return
        self.rounds.append(done)
        self._say(reason, logging.WARNING)
        if self._leaving.needed:
            self._plan_copies()
        self._runtime.parameters.invalidate()
        self._runtime.memory.free_buffers()
        self._current.swapped = True
        self._drop_plan()
        self._save()

    def _drop_plan(self) -> None:
        self._current.planned, self._marks = (), None
        self._coverage.adopt(())
        self._end_round(retry=True)

    def _small_transfers(self) -> list[Transfer]:
        parameters, world_size = self._capture.model.parameters, self._capture.model.ranks.shards
        return small_transfers(parameters[0].ds_id, world_size, self._device) if parameters and world_size > 1 else []

    def _measured(self, measurement: Measurement, transfers: Sequence[Transfer]) -> Seen:
        profile, start = measurement.profile(
            self._capture,
            self._device,
            transfers,
            self._agenda.passes or self._current.first,
            # The steps before may still have grown memory or tuned kernels; marks, too, only make a step longer.
            step_seconds=self._fastest(-2, OBSERVED + 1),
            window_from=self._runtime.memory.windows()[1],
            budget=self._memory.limit(self._capture.config.memory_budget),
            host_room=self._leaving.room,
            states_travel=self._states_now() is not None,
            larger=self._foresight.largest,
        )
        new = self._coverage.adds(measurement.usual_programs, measurement.elements)
        return Seen(profile, start, new, [self._retracing.seen(start)], measurement.numbers())

    def _fastest(self, first: int, last: int) -> float:
        return 0.0 if self._round is None else self._round.fastest(first, last)

    def _peak(self) -> int | None:
        return self._memory.latest if self._device.type == "cuda" else None

    def _verify(self) -> None:
        assert self._round is not None
        under_plan = share_step(self._round.marked, self._group, planned=True)
        for executable in self._capture.frames.training:
            executable.swap(executable.program)  # without marks
        after = self._fastest(TIMED, VERIFIED)
        after, most = maxima([after, -1 if (mine := self._peak()) is None else mine], self._group)
        peak = None if most < 0 else int(most)
        before = self.rounds[-1].before_seconds
        assert self.profile is not None and self._decided is not None
        pair = self._round.compare(self._group, self.profile, self._round.ran, self._current.planned)
        slowest, fastest = before, after
        if pair is not None and pair.before > 0:
            before, after, slowest, fastest = pair
        held = self.rounds[-1].passes[0].peak_bytes <= (self.profile.budget or 0) + self.profile.room
        must = not held or self._decided.required
        # What did not fit is no alternative; batches of other sizes are no comparison.
        slower = pair is not None and slowest > 0 and fastest > slowest * (1 + _NOISE) and not must
        if slower:
            self._current.go_back()
            if self._residency is not None and self._residency.undo():
                self.profile = self._decided.now.profile
        else:
            self.measured = under_plan or self.measured
        excess = (peak or 0) - (self.rounds[-1].budget or 0)
        if excess > 0 and not slower and self._capture.config.memory_budget is not None and self._agenda.goes_on:
            self._excess += excess  # memory that no model knows of: the next plan leaves it free
            self._say(
                f"Steps take {format_bytes(excess)} more than the memory budget: planning again.", logging.WARNING
            )
            self._agenda.again(self._step)
        self._finish_round(
            before_seconds=before,
            after_seconds=after,
            after_peak_bytes=peak,
            outcome="reverted" if slower else "kept",
            compared=pair is not None,
        )

    def _finish_round(self, **fields: Any) -> None:
        self.rounds[-1] = done = replace(self.rounds[-1], **fields)
        self._say(done.headline(), logging.INFO)
        self._say(str(done), logging.DEBUG)
        if text := done.shortfall():
            self._say(text, logging.WARNING)
        self._say_limit()
        if done.outcome != "reverted":
            self._save()
        self._end_round()

    def _say_limit(self) -> None:
        """Logs what limits the step as it runs now; needs no other rank."""
        if self._group.rank() == 0 and _log.isEnabledFor(logging.INFO):
            now = {one.structure: one for one in self._current.schedules()}
            assert self.profile is not None
            # Graphs of one structure run one plan; costs are known by the names of those that were measured.
            schedules = [replace(now.get(one.structure, one), name=one.name) for one in self.profile.schedules]
            found = limits(schedules, self.profile, self.skew_seconds, self.measured, self.rounds[-1].after_seconds)
            self._say(f"The step is {found[0]}", logging.INFO)

    def _end_round(self, retry: bool = False) -> None:
        self._round = self._capture.measures = None
        for executable in self._capture.frames.executables:
            executable.watch = None  # a kept plan swaps nothing, and what is noted would grow with every step
        self._begin_round(self._agenda.ended(self._step, retry=retry))

    def _begin_round(self, first: int | None, searching: bool = False) -> None:
        """Sets the next round, which begins at the optimizer step `first`, if there is one."""
        self._round = None if first is None else Measurement(first, searching)

    def _look_for_new_programs(self) -> None:
        self._agenda.recheck = None
        if not self._agenda.passes and not self._retracing.pending:
            if any(done.outcome != "measured" for done in self.rounds):
                self._save()  # nothing is planned for what was retraced
            return
        if on_any(self._coverage.look(), self._group):
            self._say("Most steps run programs or batch sizes that no plan covers: measuring.", logging.INFO)
            self._agenda.again(self._step)
            self._begin_round(self._agenda.next(self._step), searching=True)
        elif self._agenda.goes_on:
            self._agenda.recheck = 2 * self._step

    # Between ranks and files ------------------------------------------------------------------------------------------

    def _say(self, text: str, level: int) -> None:
        if self._group.rank() == 0:
            _log.log(level, "%s", text)

    def _save(self) -> None:
        if not self._store.keeps:
            return
        fewest, most = self._coverage.measured
        numbers = maxima([-fewest, most, *self.largest], self._group)
        batches = Batches(-int(numbers[0]), *map(int, numbers[1:]))
        places = None if self._residency is None else self._residency.places
        self._store.save(self._current.schedules(), places, self._capture.tracing, batches)

    def _load(self) -> bool:
        """Takes schedules, and where optimizer states are, from the plan file."""
        plan = self._store.load()
        if plan is None:
            return False
        if self._residency is not None:
            self._residency.expected = plan.states
        self._retracing.adopt(plan.tracing)
        schedules, settings = plan.schedules.values(), self._capture.scheduling.settings
        self._current.follow(admitted(schedules, settings, self._capture.model.ranks.shards, self._device.type))
        self._coverage.adopt(plan.schedules)
        self._coverage.measured = plan.batches.fewest, plan.batches.most
        self.largest = plan.batches.largest, plan.batches.longest
        self._agenda.follow_file()
        return True
