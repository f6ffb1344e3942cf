"""Runs programs with marks for a step."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_deepcompile.plan.least import just_in_time
from lightning_deepcompile.profile.marks import StepMarks
from lightning_deepcompile.program.executable import Executable
from lightning_deepcompile.program.reschedule import reschedule
from lightning_deepcompile.program.schedule import Schedule


def instrument(executables: Iterable[Executable], marks: StepMarks) -> dict[str, Schedule]:
    """Makes `executables` report to `marks`, until their programs are swapped.

    Args:
        executables: Those of a training step.
        marks: Of the step. If it isolates collectives, gathers are launched right before their parameters are needed,
            too, so that every collective is measured by itself.

    Returns:
        The schedules that run, by program name.
    """
    schedules = {}
    executables = list(executables)
    for executable in executables:
        program = executable.program
        if marks.isolation is not None:
            program = reschedule(program, just_in_time(program.schedule), "isolated")
        schedules[program.name] = program.schedule
        executable.profile(program, marks.marks_of(program.name))
    marks.watch(executables)
    return schedules
