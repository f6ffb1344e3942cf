"""Applies passes: to a program when it is compiled, and to a step when its times are known."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.difference import difference
from lightning_deepcompile.plan.known_passes import DEFAULT_PASSES
from lightning_deepcompile.plan.least import just_in_time
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.simulate import Prediction, simulate
from lightning_deepcompile.plan.step_pass import Pass, PassError
from lightning_deepcompile.program.printer import format_program
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.reschedule import reschedule
from lightning_deepcompile.program.schedule import Schedule

_log = logging.getLogger(__name__)


def apply_passes(program: Program, settings: PlanSettings, passes: Sequence[Pass] = DEFAULT_PASSES) -> Program:
    """Applies `passes` to one program, before its times are known, and logs each result at DEBUG level.

    Args:
        program: The program as `lower` returns it.
        settings: What the user chose.
        passes: The passes; none of them needs a profile.

    Returns:
        The scheduled program; `program` does not change.
    """
    context = PlanContext(settings)
    for one in passes:
        (schedule,) = _run_pass(one, [program.schedule], context)
        program = reschedule(program, schedule, one.name)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("after %s:\n%s", program.history[-1], format_program(program))
    return program


@dataclass(frozen=True)
class PassEffect:
    """The effect of one pass on a step.

    Args:
        name: The pass.
        changed: What changed, in words.
        prediction: The step as simulated afterwards.
    """

    name: str
    changed: str
    prediction: Prediction


def optimize(
    schedules: Sequence[Schedule], passes: Sequence[Pass], context: PlanContext
) -> tuple[list[Schedule], list[PassEffect]]:
    """Applies to a training step's schedules those of `passes` that did not run at compile time.

    A pass takes memory from the passes after it, and may spend memory that is in use at another moment anyway. So if
    the result leaves no memory for two more groups, it is compared with an order in which the last pass, which places
    launches by default, comes first, too (if it uses the profile, and needs none of the others); and if both exceed the
    budget, with the result of schedules that gather everything right before its use, unless these do so.

    Args:
        schedules: Schedules that planning starts from, in the order in which the programs run.
        passes: The passes; those that made `schedules` are among them.
        context: Settings and a profile.

    Returns:
        The new schedules, and the effect of each pass; those that ran at compile time come first, as one entry.
    """
    profile = context.profile
    if profile is None:
        raise ValueError("Planning a step needs a profile of it.")
    applied = " -> ".join(one.name for one in passes if one.initial)
    start = PassEffect(applied, "", simulate(schedules, profile))
    step = [one for one in passes if not one.initial]
    if not step:
        return list(schedules), [start]
    best = planned, effects = _run_passes(step, list(schedules), context)

    def cost(plan: tuple[list[Schedule], list[PassEffect]]) -> tuple[int, float]:
        prediction = plan[1][-1].prediction
        return max(prediction.over(profile.budget), 0), prediction.seconds

    group = max((gather.bytes for s in planned for gather in s.groups()), default=0)
    if profile.budget is not None and profile.budget - effects[-1].prediction.peak_bytes < 2 * group:
        there = {"profile"}.union(*(one.provides for one in passes if one.initial))
        orders = [step, [step[-1], *step]] if "profile" in step[-1].needs <= there else [step]
        for order in orders[1:]:
            best = min(best, _run_passes(order, list(schedules), context), key=cost)
        if cost(best)[0] > 0 and (least := list(map(just_in_time, schedules))) != list(schedules):
            begin = PassEffect("just_in_time", difference(schedules, least), simulate(least, profile))
            for order in orders:
                planned, effects = _run_passes(order, least, context)
                best = min(best, (planned, [begin, *effects]), key=cost)
    return best[0], [start, *best[1]]


def _run_passes(
    passes: Sequence[Pass], schedules: list[Schedule], context: PlanContext
) -> tuple[list[Schedule], list[PassEffect]]:
    effects: list[PassEffect] = []
    for one in passes:
        assert context.profile is not None
        before, schedules = schedules, _run_pass(one, schedules, context)
        same = effects and schedules == before
        prediction = effects[-1].prediction if same else simulate(schedules, context.profile)
        effects.append(PassEffect(one.name, difference(before, schedules), prediction))
    return schedules, effects


def _run_pass(one: Pass, schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    result = one.run(list(schedules), context)
    if [s.name for s in result] != [s.name for s in schedules]:
        raise PassError(f"The pass {one.name!r} must return a schedule for each program that it was given, in order.")
    kept = {s.frame: s.kept for s in result if s.kind == "forward"}
    offloaded = {s.frame: s.offloaded for s in result if s.kind == "forward"}
    for schedule in result:
        left = offloaded.get(schedule.frame)
        if schedule.kind == "backward" and left is not None:
            read = tuple(s.number for s in schedule.saved if s.number in left)
            if schedule.offloaded != read:
                raise PassError(
                    f"After the pass {one.name!r}, forward leaves the saved tensors {list(left)} in host memory, and "
                    f"{schedule.name!r} copies {list(schedule.offloaded)} back: they must be the same."
                )
    return [replace(s, kept=kept.get(s.frame, s.kept)) if s.kind == "backward" else s for s in result]
