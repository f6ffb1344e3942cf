"""Decides, before a training step first runs, how it is traced and what waits in host memory."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.offload.activations import ActivationOffload
from lightning_deepcompile.plan.context import NO_LIMIT
from lightning_deepcompile.plan.copy_placement import COPY_AHEAD, resize, without_copies
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.fit import Kind, MemoryPlan, Move, Need, fit
from lightning_deepcompile.plan.memory_need import MemoryNeed, Standing, memory_need, would_fit
from lightning_deepcompile.plan.report import Round
from lightning_deepcompile.plan.saved_tensors import PARTS, SavedTensors
from lightning_deepcompile.plan.simulate import peak_bytes
from lightning_deepcompile.plan.step_pass import Pass
from lightning_deepcompile.plan.tracing import Tracing
from lightning_deepcompile.profile.forecast import arrived_gradients, forecast
from lightning_deepcompile.profile.holds import hold_ratio
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.program.executable import Executable
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.program import LOCAL_ID, Program
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.program.sizes import Noted, Sizes, note
from lightning_deepcompile.ranks.exchange import maxima
from lightning_deepcompile.tuning.retracing import Retracing
from lightning_deepcompile.tuning.shortages import Shortage, room_after

_log = logging.getLogger(__name__)

RegionWatch = Callable[[str, Sequence[Any]], None]


class StepRetracedError(BaseException):
    """Unwinds a training step that was compiled but has not run, so that it is traced again.

    Not an `Exception`, so that no handler in a user's step takes it for an error.
    """


class Foresight:
    """Examines the programs of a training step between their compilation and their first run.

    Args:
        capture: Compiles them.
        retracing: Decides how the step is traced.
        leaving: Decides which saved tensors are offloaded.
        memory: Of the device.
        group: The ranks.

    Attributes:
        largest: The sizes of programs' arguments in batches that were larger than all before, by program.
        plan: What was decided of the last step that was looked at; None before.
        need: What that step takes with all moves; None before.
        limit: Bytes that were there when a rank ran out of memory; None if none did.
    """

    def __init__(
        self,
        capture: Capture,
        retracing: Retracing,
        leaving: ActivationOffload,
        memory: PeakMemory,
        group: dist.ProcessGroup,
    ) -> None:
        self._capture, self._retracing, self._leaving = capture, retracing, leaving
        self._scheduling = capture.scheduling
        self._memory, self._group = memory, group
        self.largest: dict[str, dict[Noted, None]] = {}
        self.plan: MemoryPlan | None = None
        self.need: MemoryNeed | None = None
        self.limit: int | None = None
        self._host_is_short = False
        self._tried: tuple[Tracing, MemoryPlan] | None = None  # before the last retracing, and what asked for it

    def look(
        self, step: int, programs: list[Program], say: Callable[[str, int], None], *, restartable: bool
    ) -> Round | None:
        """Decides; call on all ranks at the same place, when programs are compiled and before they run.

        Args:
            step: Optimizer steps done.
            restartable: Whether nothing of this rank's step has run yet. Else no step is traced once more here: code
                that ran would run again.
            programs: Of a micro-batch, in the order in which they run.
            say: Logs a line, on one rank.

        Returns:
            What the report says of a step that is to be traced once more; None if it runs as it is traced.
        """
        self._memory.largest = largest = self._largest(programs)
        standing = self._standing(programs[0])
        profile = self._forecast(programs, standing)
        lean = self._lean(programs, profile, standing)
        # On CPUs, what a region makes and frees counts for no budget.
        guess = largest if self._leaving.device.type == "cuda" else lean.need.region
        told = _most(profile.schedules, profile, standing), *lean.peaks, -(profile.budget or 0), guess, not restartable
        *peaks, fewest_bytes, guess, has_run = map(int, maxima(told, self._group))
        budget = -fewest_bytes
        moves = _moves(_KINDS, peaks)
        if peaks[0] > budget and not has_run:
            moves += self._retracing.moves()
        self.plan = plan = fit(Need({"passes": peaks[0]}, moves), budget, self._capture.config.rounding)
        self.need, self._host_is_short = lean.need, lean.saved.host_is_short
        tried, self._tried = self._tried, None
        if tried is not None and not has_run and not (plan.needed < tried[1].needed or plan.least < tried[1].least):
            assert tried[1].retrace is not None
            return self._retracing.take_back(step, tried[1].retrace, tried[0], plan, profile)
        if plan.retrace is not None:
            self._tried = self._capture.tracing, plan
            return self._retracing.make(step, plan, profile)
        if plan.moved:
            say(str(plan), logging.INFO)
            self._do(plan, lean)
        if not plan.fits:
            if not has_run and self.limit is None and plan.least - guess > budget:  # else it may fit after all
                plan.check(self._capture.config.memory_budget, self._table())
            self._memory.avoid_pieces()
            say(self.shortfall(), logging.WARNING)
        return None

    def look_alone(self, programs: list[Program], say: Callable[[str, int], None]) -> None:
        """Decides for a graph that was compiled later, which other ranks may not have: what concerns no other rank.

        Args:
            programs: Of the graph.
            say: As for `look`.
        """
        self._memory.largest = max(self._memory.largest, self._largest(programs))
        if self._leaving.mode != "auto":
            return
        profile = self._forecast(programs, self._standing(programs[0]))
        saved = SavedTensors(profile.schedules, profile, self._leaving.host_bytes)
        peaks = saved.peaks()
        plan = fit(Need({"passes": peaks[0]}, _moves(_PARTS, peaks)), profile.budget or 0, "same")
        if plan.moved:
            say(f"A larger batch: {plan}", logging.INFO)
            self._scheduling.offload(saved.fewest(plan.room, COPY_AHEAD), alone=True)

    def look_at_larger(self, programs: list[Program], say: Callable[[str, int], None]) -> bool:
        """Decides for a batch that is larger than all before, on some rank; call on all ranks, before it runs.

        Args:
            programs: Of the graph that runs.
            say: As for `look`.

        Returns:
            Whether the plan in use must go, as the batch would not fit with it.
        """
        noted = list(self.largest.get(programs[0].name, ()))[-1:]
        sizes = programs[0].sizes(noted[0]) if noted else None  # else as before, or as it was compiled
        self._memory.largest = max(self._memory.largest, self._largest(programs, sizes))
        plan, lean = self._decide_again(programs, sizes)
        if plan.fits and not plan.moved:
            return False
        if plan.moved:
            say(f"A larger batch than all before: {plan}", logging.INFO)
        self._replace_plan(plan, lean, say)
        return True

    def look_after(
        self,
        programs: list[Program],
        shortages: Sequence[Shortage],
        measured: Profile | None,
        say: Callable[[str, int], None],
    ) -> MemoryPlan:
        """Decides after ranks ran out of memory; call on all ranks, between optimizer steps.

        Args:
            programs: Of a micro-batch, in the order in which they run.
            shortages: Of all ranks.
            measured: The profile that the programs were planned with; None if there is none.
            say: As for `look`.

        Returns:
            The decision. It is carried out unless it is to trace the step again.
        """
        plan, lean = self._decide_again(programs, None, shortages, measured)
        self.limit = plan.room
        if plan.retrace is None:
            self._replace_plan(plan, lean, say)
        return plan

    def _decide_again(
        self,
        programs: list[Program],
        sizes: Sizes | None,
        shortages: Sequence[Shortage] = (),
        measured: Profile | None = None,
    ) -> tuple[MemoryPlan, _Lean]:
        """Decides about programs that have run, whose optimizer states stay where they are; a collective."""
        standing = self._standing(programs[0])
        known = measured is not None and all(measured.covers(one.schedule) for one in programs)
        profile = measured if measured is not None and known else self._forecast(programs, standing, sizes)
        now = forecast(programs, standing.total, sizes=sizes, **self._fields()).schedules
        room = room_after(shortages, now, profile) if shortages else profile.budget or 0
        lean = self._lean(programs, profile, standing, sizes)
        told = _most(now, profile, standing), *lean.peaks[:-1], -room
        *peaks, fewest_bytes = map(int, maxima(told, self._group))
        moves, rounding = _moves(_KINDS[:-1], peaks), self._capture.config.rounding
        if not shortages:
            return fit(Need({"passes": peaks[0]}, moves), -fewest_bytes, "same"), lean
        return fit(Need({"passes": peaks[0]}, moves + self._retracing.moves()), -fewest_bytes, rounding), lean

    def _replace_plan(self, plan: MemoryPlan, lean: _Lean, say: Callable[[str, int], None]) -> None:
        self.plan, self.need, self._host_is_short = plan, lean.need, lean.saved.host_is_short
        self._scheduling.plan, self._scheduling.passes = {}, self._lean_passes()
        if not plan.fits:
            say(self.shortfall(), logging.WARNING)
        self._do(plan, lean)

    def note(self, executables: Iterable[Executable]) -> None:
        """Notes the sizes with which each of `executables` runs next."""
        for executable in executables:
            watch = executable.watch
            if not isinstance(watch, functools.partial) or watch.func != self._note:  # else it has not run since
                executable.watch = functools.partial(self._note, executable, watch)

    def _note(self, executable: Executable, before: RegionWatch | None, name: str, args: Sequence[Any]) -> None:
        executable.watch = before
        noted = note(args)
        known = self.largest.setdefault(name, {})
        known.pop(noted, None)
        known[noted] = None  # the last one is the latest
        if before is not None:
            before(name, args)

    def _do(self, plan: MemoryPlan, lean: _Lean) -> None:
        """Changes the programs, which have not run, as a decision says."""
        self._memory.avoid_pieces()
        kinds = {one.move.kind for one in plan.moved}
        if "gathers" in kinds:
            self._scheduling.passes = self._lean_passes()
        chosen = {}
        if self._leaving.mode == "auto" and (kinds & {"activations", "copies"} or not plan.fits):
            self._leaving.needed = True
            self._scheduling.ahead = 0 if "copies" in kinds or not plan.fits else COPY_AHEAD
            chosen = lean.saved.fewest(plan.room, self._scheduling.ahead)  # which of them concerns no other rank
        self._scheduling.offload(chosen)

    def _lean_passes(self) -> tuple[Pass, ...]:
        return tuple(one for one in self._scheduling.passes if one.name != "prefetch")

    def _lean(self, programs: list[Program], profile: Profile, standing: Standing, sizes: Sizes | None = None) -> _Lean:
        """Returns the step with parameters gathered right before their use, and what it takes with further moves."""
        lean = self._scheduling.start([program.name for program in programs], self._lean_passes())
        late = [without_copies(resize(lean[one.name], one.saved(sizes))) for one in programs]
        saved = SavedTensors(late, profile, 0 if self._leaving.mode == "none" else self._leaving.host_bytes)
        fewest = standing if self._leaving.offloading.states == "none" else replace(standing, states=0)
        without, away = self._forecast(programs, fewest, sizes), saved.offloaded(saved.keys, 0)
        need = memory_need(away, without, fewest, self.arrived(programs))
        peaks = [max(size, standing.at_step) for size in (*saved.peaks(), saved.peak(saved.keys, 0))]
        return _Lean(saved, (*peaks, _most(away, without, fewest)), need)

    def shortfall(self) -> str:
        """Returns what the step needs, where it is not expected to fit; "" where it is."""
        if self.plan is None or self.plan.fits:
            return ""
        done = f" with {self.plan.words}" if self.plan.words else ""
        return (
            f"This step is not expected to fit: it needs {format_bytes(self.plan.least)} at least{done}, and "
            f"{format_bytes(self.plan.room)} may be allocated.{self._table()}"
        )

    def _table(self) -> str:
        """Returns what the step takes with all moves, and with what it would fit."""
        assert self.plan is not None and self.need is not None
        config, settings = self._capture.config, []
        if config.offload not in ("auto", "all"):
            settings.append("offload='auto'")
        if config.rounding == "same":
            settings.append("rounding='needed'")
        ways = would_fit(self.need, self.plan.room, self._capture.model.ranks.shards)
        if self._host_is_short and self._leaving.mode != "none":
            ways.append(f"more host memory than {format_bytes(self._leaving.host_bytes)}")
        ways += [f"CompileConfig({', '.join(settings)}), which may need less"] if settings else []
        return f" It would fit with {', or '.join(ways)}. It takes:\n{self.need}"

    def _standing(self, first: Program) -> Standing:
        """Returns the memory in use before the first program runs, and what the step will add to it permanently."""
        model, device = self._leaving.model, self._leaving.device
        trained = sum(p.local.nbytes for p in model.parameters if p.dtensor.requires_grad)
        states = 2 * trained if self._leaving.states is None else self._leaving.states  # if not known, as Adam's
        states = 0 if self._leaving.has_states else states
        if device.type != "cuda":  # nobody counts what is resident
            return Standing()
        shards, whole = model.device_bytes, self._leaving.whole_bytes
        there = self._gradients_there
        inputs = forecast([first], 0, **self._fields()).regions
        read = next(iter(inputs.values())).before if inputs else 0  # counted among the values of programs
        other = max(self._memory.current - shards - there - read, 0)
        if not self._leaving.has_states:  # nothing has run
            other += _WORKSPACE
        return Standing(shards + whole, max(trained, there), states, other, self._leaving.stepping)

    def _forecast(self, programs: list[Program], standing: Standing, sizes: Sizes | None = None) -> Profile:
        plain = [replace(one, schedule=without_copies(one.schedule)) for one in programs]
        arrived = self.arrived(programs)
        lasting = standing.total - (0 if arrived is None else standing.gradients)
        return forecast(plain, lasting, arrived=arrived, sizes=sizes, **self._fields())

    def arrived(self, programs: list[Program]) -> dict[str, int] | None:
        """Returns the gradient shards that are there when each region runs; None where they stay between passes.

        Args:
            programs: Of a micro-batch, in the order in which they run.
        """
        model, update = self._leaving.model, self._capture.gradients.update
        if self._leaving.device.type != "cuda" or not update or self._gradients_there:
            return None
        trained = [flat for flat in model.flat_layouts if flat.is_trained]
        ids = [frozenset(model.by_name[shard.spec.name].ds_id & LOCAL_ID for shard in one.shards) for one in trained]
        return arrived_gradients(programs, [(numbers, one.nbytes) for numbers, one in zip(ids, trained, strict=True)])

    @property
    def _gradients_there(self) -> int:
        """Bytes of gradient shards that are allocated."""
        return sum(buffer.flat.untyped_storage().nbytes() for buffer in self._leaving.model.grad_buffers)

    def _fields(self) -> dict[str, Any]:
        capture, device, ranks = self._capture, self._leaving.device, self._capture.model.ranks
        config = capture.config
        return {
            "world_size": ranks.shards,
            "replicated": ranks.replicas > 1,
            "device_type": device.type,
            "hold_ratio": hold_ratio(capture.model.gradient_dtypes),
            "hosted": capture.model.hosted_bytes,
            "micro_batches": 1 if capture.gradients.update else 2,
            "budget": min(self._memory.limit(config.memory_budget), self.limit or NO_LIMIT),
        }

    def _largest(self, programs: list[Program], sizes: Sizes | None = None) -> int:
        """Bytes of the largest value that a region of `programs` makes; on CPUs it counts for no budget."""
        if self._leaving.device.type != "cuda":
            return 0
        regions = [region for program in programs for region in program.regions.values()]
        return max((region.info.memory.largest(sizes) for region in regions), default=0)


_WORKSPACE = 128 << 20
"""Bytes that cuBLAS and others take when they first run; 117 MiB on an H200 with PyTorch 2.11."""

_PART: Kind = "activations"
_PARTS = (_PART,) * PARTS
_KINDS: tuple[Kind, ...] = ("gathers", *_PARTS, "copies", "states")
"""The moves that change no bit, in the order in which they are simulated."""


class _Lean(NamedTuple):
    """A step with parameters gathered right before their use.

    Args:
        saved: Its saved tensors.
        peaks: Its peak as it is, and with each further move of `_KINDS`.
        need: What it takes with all of them.
    """

    saved: SavedTensors
    peaks: tuple[int, ...]
    need: MemoryNeed


def _most(schedules: Sequence[Schedule], profile: Profile, standing: Standing) -> int:
    """Returns the bytes at the peak of a step, the optimizer's included."""
    return max(peak_bytes(schedules, profile), standing.at_step)


def _moves(kinds: Sequence[Kind], peaks: Sequence[int]) -> tuple[Move, ...]:
    """Returns the moves, by the peak before the first and after each of them."""
    freed = [before - after for before, after in itertools.pairwise(itertools.accumulate(peaks, min))]
    units = {kind: tuple(size for one, size in zip(kinds, freed, strict=True) if one == kind) for kind in kinds}
    return tuple(Move(kind, sizes) for kind, sizes in units.items() if any(sizes))
