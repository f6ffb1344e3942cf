"""The loop of measuring, planning and swapping: profiles a few ordinary steps, then rewrites the programs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_deepcompile.agreement import exchange
from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.plan.budget import MemoryBudgetError, check_budget
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.copy_placement import offload_all, without_copies
from lightning_deepcompile.plan.costs import Profile, ProfileError
from lightning_deepcompile.plan.pass_manager import DEFAULT_SCHEDULE, Pass, optimize, resolve_passes
from lightning_deepcompile.plan.plan_file import PlanFileError, Setting, read_plan, write_plan
from lightning_deepcompile.plan.report import PassReport, Round
from lightning_deepcompile.plan.simulate import just_in_time, least_budget
from lightning_deepcompile.profile.build import build_profile, explain, leave_room, merge_profiles
from lightning_deepcompile.profile.copies import measure_copies
from lightning_deepcompile.profile.memory import memory_limit
from lightning_deepcompile.profile.probe import StepProbe
from lightning_deepcompile.program.executable import Executable
from lightning_deepcompile.program.live import live_bytes
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.schedule import Schedule, read_schedule, reschedule

__all__ = ["Tuner"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

# A round, in steps from its first profiled one: two ordinary steps before are timed.
_OBSERVED, _ISOLATED, _PLANNED, _TIMED, _VERIFIED = 0, 1, 2, 3, 6
_NOISE = 0.03  # how much slower than before a plan may measure
_ATTEMPTS = 4  # at most, so that a model with ever new shapes does not plan for ever


class Tuner:
    """Plans the programs of a training step again when their times are known.

    A round takes a few optimizer steps, the same ones on every rank. Two are timed. One runs as scheduled, with marks
    behind every instruction; the next waits for every collective at once, so that each is seen by itself. Then ranks
    exchange what they measured, plan with the same numbers, and swap. Three more steps are timed: if they are slower,
    the old programs come back. Between rounds, a step costs one comparison.

    Args:
        capture: Its programs are planned.
        runtime: ``_C.Runtime`` that executes them.
        group: The ranks.
        device: Where programs run.

    Attributes:
        offloaded: Says what of the optimizers' states is in host memory; "" for none. For the report.
        host_room: Bytes of host memory that saved tensors may take; None where none may leave.
        rounds: What was done, round by round.
        profile: What the last round planned with.

    Raises:
        PassError: If the configured passes do not exist or do not fit together.
        ValueError: If the configured schedule plans for a stage at which nothing is gathered twice.
    """

    def __init__(self, capture: Capture, runtime: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        self._capture, self._runtime, self._group, self._device = capture, runtime, group, device
        self._config = capture.config
        ranks = capture.model.ranks
        self._world = ranks.shards
        self._setting = Setting(self._world, capture.stage, device.type)
        schedule = self._config.schedule
        if schedule is None or schedule == "auto":
            schedule = list(DEFAULT_SCHEDULE)
            nothing_travels = self._world == 1 and self._config.offload_activations == "none"
            nothing_to_plan = nothing_travels or capture.stage != 3  # there parameters stay whole anyway
            if nothing_to_plan or self._config.schedule is None:
                schedule = schedule[:1]
        if capture.stage != 3 and len(schedule) > 1:
            raise ValueError(
                f"CompileConfig(schedule=...) plans at step {schedule[1]['step']}, but at stage {capture.stage} "
                "parameters stay whole between uses: there is nothing to plan. Use stage 3, or step 0 alone."
            )
        first, *self._entries = [
            (entry["step"], resolve_passes(entry["passes"], profiled=entry["step"] > 0)) for entry in schedule
        ]
        capture.passes = first[1]
        self._passes: tuple[Pass, ...] = self._entries[-1][1] if self._entries else ()
        self.offloaded: Callable[[], str] = str
        self.host_room: Callable[[], int] | None = None
        self.rounds: list[Round] = []
        self.profile: Profile | None = None
        self._step = 0  # optimizer steps done
        self._boundary = False  # the optimizer has stepped since the last micro-batch
        self._first: int | None = None  # the round's first profiled step
        self._recheck: int | None = None  # when to look for programs that no plan covers
        self._known: set[str] = set()  # contents of programs that were planned
        self._attempts = 0
        self._probe: StepProbe | None = None
        self._probes: dict[int, StepProbe] = {}  # of this round, by step from its first
        self._schedules: dict[int, dict[str, Schedule]] = {}  # what ran in its profiled steps
        self._previous: tuple[tuple[Pass, ...], tuple[Schedule, ...]] = (capture.passes, ())
        if not self._load():
            self._next_entry()

    # What the engine calls --------------------------------------------------------------------------------------------

    def begin_micro_batch(self) -> None:
        """Call before a training step's forward pass, on all ranks."""
        if self._first is None and self._recheck is None:
            return
        if self._boundary:
            self._boundary, self._probe = False, None
            self._step += 1
            self._at_boundary()
        if self._probe is not None:
            self._probe.begin_micro_batch()

    def end_step(self) -> None:
        """Call when the optimizer has stepped."""
        self._boundary = True
        if self._probe is not None:
            self._probe.finish()

    def explain(self, error: BaseException) -> None:
        """Adds to an out-of-memory error what a plan has to do with it: it was made for the batches of a few steps."""
        kept = [one for one in self.rounds if one.outcome == "kept"]
        if kept and isinstance(error, torch.OutOfMemoryError):
            peak, budget = kept[-1].passes[-1].peak_bytes, kept[-1].budget
            error.add_note(
                f"Since step {kept[-1].step} a plan uses memory that was free until then, for a peak of "
                f"{format_bytes(peak)} with the batches seen before it"
                f"{'' if budget is None else f', of {format_bytes(budget)}'}. Limit it with "
                "CompileConfig(memory_budget=...), let larger batches' activations go to host memory with "
                "CompileConfig(offload_activations='auto'), or plan nothing with CompileConfig(schedule=None)."
            )

    @property
    def isolates(self) -> bool:
        """Whether the step under way must gather everything by itself."""
        return self._probe is not None and self._probe.drain is not None

    # A round ----------------------------------------------------------------------------------------------------------

    def _at_boundary(self) -> None:
        if self._step == self._recheck:
            self._look_for_new_programs()
        if self._first is None:
            return
        moment = self._step - self._first
        if moment == _PLANNED:
            self._plan()
        elif moment == _VERIFIED:
            self._verify()
        if self._first is None or not (moment < _PLANNED or _TIMED <= moment < _VERIFIED):
            return
        if moment < -2:
            return
        isolated = moment == _ISOLATED
        # Of this object it may know nothing: programs with marks outlive a training that ends during a round.
        drain = functools.partial(self._runtime.free_grads, []) if isolated else None
        self._probe = StepProbe(self._device, drain)
        self._probes[moment] = self._probe
        if moment in (_OBSERVED, _ISOLATED):
            self._instrument(moment, self._probe)

    def _training(self) -> list[Executable]:
        return [e for e in self._capture.executables if e.program.kind != "inference"]

    def _instrument(self, moment: int, probe: StepProbe) -> None:
        self._schedules[moment] = {}
        for executable in self._training():
            program = executable.program
            if moment == _ISOLATED:
                program = reschedule(program, just_in_time(read_schedule(program)), "isolated")
            self._schedules[moment][program.name] = read_schedule(program)
            executable.profile(program, probe.marks_of(program.name))

    def _plan(self) -> None:
        for executable in self._training():
            executable.swap(executable.program)
        self._attempts += 1
        results = self._exchange(self._attempt(self._measured))
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(results) if error]
        measured = [result for result, _ in results if result is not None]
        profiles = [profile for profile, _ in measured]
        try:
            if failed:
                raise ProfileError("; ".join(failed))
            merged = explain(merge_profiles(profiles))
            self.profile = profile = replace(merged, schedules=measured[0][1])
        except ProfileError as error:
            self._say(f"No plan was made at step {self._step}: {error}", logging.WARNING)
            self._end_round(retry=True)
            return
        self._log_spread(profiles)
        budget = profile.budget or 0
        smallest = profile.schedules if self.host_room is None else offload_all(profile.schedules)
        check_budget(least_budget(smallest, profile), budget, self._config.memory_budget)
        planned, effects = optimize(profile.schedules, self._passes, PlanContext(self._capture.settings, profile))
        peak = effects[-1].prediction.peak_bytes
        if self._config.memory_budget is not None and peak > budget:
            raise MemoryBudgetError(
                f"CompileConfig(memory_budget={self._config.memory_budget!r}) allows {budget} bytes, and the passes "
                f"{[p.name for p in self._passes]} come down to {peak}. Add 'proactive_prefetch', or raise the budget."
            )
        reports = [PassReport.of(effect) for effect in effects]
        if self.offloaded():
            reports.insert(1, replace(reports[0], name="offload", changed=self.offloaded()))
        self.rounds.append(
            Round(
                self._step,
                tuple(reports),
                budget,
                profile.step_seconds,
                profile.exposed_seconds,
            )
        )
        ran = {run.program for run in self._probes[_ISOLATED].runs}
        self._known |= {s.content for s in self._capture_schedules() if s.name in ran}
        self._previous = (self._capture.passes, tuple(self._capture.plan.values()))
        before = self._capture_schedules()
        self._capture.replan(passes=self._passes, plan=planned)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._capture_schedules() == before:
            self._finish_round(outcome="unchanged")

    def _capture_schedules(self) -> list[Schedule]:
        return [read_schedule(e.program) for e in self._training()]

    def _measured(self) -> tuple[Profile, tuple[Schedule, ...]]:
        """What this rank saw of the programs that it ran, and the schedules that planning starts from."""
        observed, isolated = self._probes[_OBSERVED], self._probes[_ISOLATED]
        names = list(dict.fromkeys(run.program for run in isolated.runs))
        start = self._capture.schedules(names, self._passes)
        programs = {e.program.name: e.program for e in self._training()}
        profile = build_profile(
            observed,
            isolated,
            self._schedules[_OBSERVED],
            self._schedules[_ISOLATED],
            world_size=self._world,
            reduces_late=self._config.reduces_late(self._capture.stage),
            reduce_window=self._config.reduce_window,
            budget=memory_limit(self._device, self._config.memory_budget),
            # The steps before may still have grown memory or tuned kernels; marks, too, only make a step longer.
            step_seconds=self._fastest(-2, _OBSERVED + 1),
            live={name: live_bytes(programs[name]) for name in names},
        )
        if self._config.memory_budget is None:
            profile = leave_room(profile)
        if self.host_room is not None:
            out, back = measure_copies(self._device)
            profile = replace(profile, copy_out=out, copy_in=back, host_budget=self.host_room())
        return profile, tuple(start[s.name] for s in profile.schedules)

    def _fastest(self, first: int, last: int) -> float:
        """The shortest of the steps from `first` up to `last`, counted from the round's first profiled one."""
        times = [self._probes[m].seconds() for m in range(first, last) if m in self._probes]
        return min((t for t in times if t > 0), default=0.0)

    def _verify(self) -> None:
        after = self._fastest(_TIMED, _VERIFIED)
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
        seen = self._exchange((after, peak))
        after, peak = max(t for t, _ in seen), max((p for _, p in seen if p is not None), default=None)
        before = self.rounds[-1].before_seconds
        assert self.profile is not None
        must = self.rounds[-1].passes[0].peak_bytes > (self.profile.budget or 0) + self.profile.room
        slower = before > 0 and after > before * (1 + _NOISE) and not must  # what did not fit is no alternative
        if slower:
            passes, plan = self._previous
            self._capture.replan(passes=passes, plan=plan)
        self._finish_round(after_seconds=after, after_peak_bytes=peak, outcome="reverted" if slower else "kept")

    def _finish_round(self, **fields: Any) -> None:
        self.rounds[-1] = done = replace(self.rounds[-1], **fields)
        self._say(str(done), logging.INFO)
        for miss in done.misses():
            self._say(f"The plan of step {done.step} did not do what was predicted: {miss}.", logging.WARNING)
        if done.outcome != "reverted":
            self._save()
        self._end_round()

    def _end_round(self, retry: bool = False) -> None:
        self._first = None
        self._probes.clear()
        self._schedules.clear()
        if retry and self._attempts < _ATTEMPTS:
            self._recheck = self._step + 10
        elif not self._next_entry() and self._attempts < _ATTEMPTS:
            # New programs are looked for ever more rarely: the look is a collective, and late ones pay off less.
            self._recheck = max(2 * self._step, self._step + 10)
        else:
            self._recheck = None

    def _next_entry(self) -> bool:
        """Starts the round of the next entry of the schedule, if there is one."""
        if not self._entries:
            return False
        step, self._passes = self._entries.pop(0)
        self._first = max(step, self._step + 3 if self._step else step)
        return True

    def _look_for_new_programs(self) -> None:
        new = any(s.content not in self._known for s in self._capture_schedules())
        self._recheck = None
        if any(self._exchange(new)) and self._passes:
            self._say("The training step has programs that were not measured yet: planning anew.", logging.INFO)
            self._entries.insert(0, (self._step + 3, self._passes))
            self._next_entry()
        elif self._passes and self._attempts < _ATTEMPTS:
            self._recheck = 2 * self._step

    # Between ranks and files ------------------------------------------------------------------------------------------

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, str]:
        """What `work` returns, or its error: a rank that failed alone would leave the others waiting for it."""
        try:
            return work(), ""
        except Exception as error:
            _log.debug("planning failed", exc_info=True)
            return None, f"{type(error).__name__}: {error}"

    def _exchange(self, mine: T) -> list[T]:
        return exchange(mine, self._group)

    def _say(self, text: str, level: int) -> None:
        if self._group.rank() == 0:
            _log.log(level, "%s", text)

    def _log_spread(self, profiles: list[Profile]) -> None:
        times = [sum(cost.seconds for cost in p.regions.values()) for p in profiles]
        if min(times) > 0 and max(times) > 1.2 * min(times):
            slowest = times.index(max(times))
            text = (
                f"Rank {slowest} computes {max(times) / min(times):.2f} times as long as the fastest: plans follow it."
            )
            self._say(text, logging.WARNING)

    def _load(self) -> bool:
        """Takes schedules from the plan file, as rank 0 sees it."""
        if self._config.plan is None:
            return False
        path = Path(self._config.plan)
        text, reason = self._attempt(lambda: path.read_text() if path.is_file() else None)
        text, reason = self._exchange((text, reason))[0]
        if text is None and not reason:
            return False  # to be written by this run
        try:
            if text is None:
                raise PlanFileError(reason)
            plan = read_plan(text, self._setting)
        except PlanFileError as error:
            self._say(f"The plan {str(path)!r} is not used, as {error}. Training plans anew.", logging.WARNING)
            return False
        schedules = plan.values()
        if self._config.offload_activations == "none":
            schedules = [without_copies(schedule) for schedule in schedules]
        self._capture.replan(plan=schedules)
        self._known = set(plan)
        self._entries.clear()  # for programs that the file does not have, a round follows the look at them
        self._recheck = 2
        return True

    def _save(self) -> None:
        if self._config.plan is None or self._group.rank() != 0:
            return
        path = Path(self._config.plan)
        text = write_plan(self._capture_schedules(), self._setting)

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            partial.write_text(text)
            partial.replace(path)

        _, error = self._attempt(write)
        if error:
            self._say(f"The plan could not be written to {str(path)!r}: {error}", logging.WARNING)
