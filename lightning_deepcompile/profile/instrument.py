"""Runs programs with marks for a step."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_deepcompile.plan.least import just_in_time
from lightning_deepcompile.profile.probe import StepProbe
from lightning_deepcompile.program.executable import Executable
from lightning_deepcompile.program.reschedule import reschedule
from lightning_deepcompile.program.schedule import Schedule


def instrument(executables: Iterable[Executable], probe: StepProbe) -> dict[str, Schedule]:
    """Makes `executables` report to `probe`, until their programs are swapped.

    Args:
        executables: Those of a training step.
        probe: Of the step. If it isolates collectives, gathers are launched right before their parameters are needed,
            too, so that every collective is measured by itself.

    Returns:
        The schedules that run, by program name.
    """
    schedules = {}
    executables = list(executables)
    for executable in executables:
        program = executable.program
        if probe.isolation is not None:
            program = reschedule(program, just_in_time(program.schedule), "isolated")
        schedules[program.name] = program.schedule
        executable.profile(program, probe.marks_of(program.name))
    probe.watch(executables)
    return schedules
