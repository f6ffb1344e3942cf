"""The schedules of captured programs: those of a plan, or those that passes give when a program is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_deepcompile.capture.frames import Frame, Frames
from lightning_deepcompile.plan.copy_placement import COPY_AHEAD, fit_copies, offload_saved
from lightning_deepcompile.plan.known_passes import DEFAULT_PASSES
from lightning_deepcompile.plan.optimize import apply_passes
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.step_pass import Pass
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.reschedule import reschedule
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.ranks.order import Agreement


@dataclass(eq=False, repr=False)
class Scheduling:
    """Schedules programs; nothing is retraced or recompiled.

    Args:
        frames: The programs.
        settings: The user's choices.
        agreement: Compares programs between ranks.
        runtime: ``_C.Runtime`` that executes them.
        choose_activations: Which saved tensors are offloaded, by a forward program's schedule; by default none.

    Attributes:
        passes: The passes that schedule programs when they are compiled.
        plan: Schedules by structure: whatever shapes each rank meets, all ranks must gather alike in programs of one
            structure.
        ahead: Regions between a copy of a saved tensor and what needs it, where no plan says it.
    """

    frames: Frames
    settings: PlanSettings
    agreement: Agreement
    runtime: Any
    choose_activations: Callable[[Schedule], frozenset[int]] | None = None
    passes: tuple[Pass, ...] = DEFAULT_PASSES
    plan: dict[str, Schedule] = field(default_factory=dict)
    ahead: int = COPY_AHEAD

    def replan(
        self, settings: PlanSettings | None = None, passes: Sequence[Pass] | None = None, plan: Iterable[Schedule] = ()
    ) -> None:
        """Swaps every program for a newly planned one.

        Call between optimizer steps, on all ranks alike.

        Args:
            settings: New choices; None keeps those in use. The time of reductions stays as configured, unless `plan`
                says otherwise.
            passes: The passes for programs from now on; those that need a profile are skipped here.
            plan: Schedules for programs, now and later, of the same structure, whatever their shapes: for other shapes
                it is the nearest plan that exists. All other programs get the result of the passes.
        """
        self.settings = replace(settings or self.settings, reduce=self.settings.reduce)
        self.passes = self.passes if passes is None else tuple(passes)
        self.plan = {schedule.structure: schedule for schedule in plan}
        self.agreement.forget()  # a program that matched the others' old ones may not match their new ones
        self.runtime.parameters.invalidate()
        for frame in self.frames.all:
            self._swap(frame)

    def offload(self, chosen: Mapping[int, frozenset[int]], *, alone: bool = False) -> None:
        """Schedules programs again, with other saved tensors offloaded; call before these run.

        Args:
            chosen: Numbers of the tensors, by the number of their graph.
            alone: Whether the programs of other graphs stay as they are.
        """
        for frame in self.frames.all:
            if not alone or frame.index in chosen:
                frame.chosen = chosen.get(frame.index, frame.chosen)
                self._swap(frame)

    def _swap(self, frame: Frame) -> None:
        for executable in frame.executables:
            executable.swap(self.scheduled(frame, executable.base))

    def start(self, names: Iterable[str], passes: Sequence[Pass]) -> dict[str, Schedule]:
        """Returns the schedules that planning with `passes` starts from; nothing is swapped."""
        wanted, found = set(names), {}
        passes = [one for one in passes if one.initial]
        for frame in self.frames.all:
            kept: tuple[int, ...] = ()
            for executable in frame.executables:
                program = self._offload(frame, self._apply(executable.base.with_kept(kept), passes))
                kept = program.kept if program.kind == "forward" else kept
                if program.name in wanted:
                    found[program.name] = program.schedule
        return found

    def scheduled(self, frame: Frame, base: Program) -> Program:
        """Returns a program of `frame` with the schedule that it runs with from now on.

        Args:
            frame: The captured graph.
            base: The program as `lower` returns it. Forward comes first, also when all are scheduled again: a backward
                program must know what forward leaves.
        """
        program = self._apply(base.with_kept(frame.kept), self.passes)
        schedule = program.schedule
        wanted = self.plan.get(schedule.structure)
        if program.kind == "forward" and frame.chosen is None:
            frame.chosen = frozenset()
            if self.choose_activations is not None:
                frame.chosen = self.choose_activations(schedule)
        if wanted is None:
            program = self._offload(frame, program)
        else:
            leaving = frame.chosen if program.kind == "forward" else frame.offloaded
            program = reschedule(program, fit_copies(wanted, schedule, leaving or ()), "plan")
        if program.kind == "forward":
            frame.kept = program.kept
            frame.offloaded = frozenset(program.schedule.offloaded)
        return program

    def _apply(self, base: Program, passes: Sequence[Pass]) -> Program:
        return apply_passes(base, self.settings, [one for one in passes if "profile" not in one.needs])

    def _offload(self, frame: Frame, program: Program) -> Program:
        """Lets saved tensors leave where no plan says which."""
        if not frame.chosen or program.kind == "inference":
            return program
        (schedule,) = offload_saved([program.schedule], {frame.index: frame.chosen}, self.ahead)
        return reschedule(program, schedule, "offload")
