"""Resolves passes by name, checks their order, and applies them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.least import just_in_time
from lightning_deepcompile.plan.passes.fuse import fuse
from lightning_deepcompile.plan.passes.keep_whole import keep_whole
from lightning_deepcompile.plan.passes.offload_activation import offload_activation
from lightning_deepcompile.plan.passes.offload_optimizer import offload_optimizer
from lightning_deepcompile.plan.passes.prefetch import prefetch
from lightning_deepcompile.plan.passes.proactive_prefetch import proactive_prefetch
from lightning_deepcompile.plan.passes.reduce_late import reduce_late
from lightning_deepcompile.plan.passes.unshard import unshard
from lightning_deepcompile.plan.passes.zero3 import zero3
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.simulate import Prediction, simulate
from lightning_deepcompile.program.printer import format_bytes, format_count, format_program
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.reschedule import reschedule
from lightning_deepcompile.program.schedule import REDUCTIONS, Schedule

__all__ = [
    "BUILTIN_PASSES",
    "DEFAULT_PASSES",
    "DEFAULT_SCHEDULE",
    "NO_CHANGE",
    "Pass",
    "PassEffect",
    "PassError",
    "apply_passes",
    "difference",
    "optimize",
    "resolve_passes",
    "step_pass",
]

_log = logging.getLogger(__name__)

StepPass = Callable[[list[Schedule], PlanContext], list[Schedule]]
"""Changes the schedules of a training step together, in the order in which its programs run."""


class PassError(ValueError):
    """Passes that do not exist, or that cannot be applied in the order given."""


@dataclass(frozen=True)
class Pass:
    """A pass, and its requirements.

    Args:
        name: How schedules and logs refer to it.
        run: The function.
        needs: Requirements: names that earlier passes provide, or ``"profile"``.
        provides: Names that later passes may require.
        initial: Whether it runs on each program at compile time; planning starts from its result.
    """

    name: str
    run: StepPass
    needs: frozenset[str] = field(default_factory=frozenset)
    provides: frozenset[str] = field(default_factory=frozenset)
    initial: bool = False


def step_pass(
    name: str, needs: Sequence[str] = (), provides: Sequence[str] = (), *, initial: bool = False
) -> Callable[[StepPass], Pass]:
    """Makes a pass of a function ``(schedules, context) -> schedules``.

    The function may move, merge, add and drop gathers and releases, merge reductions (`merge_reductions`), and reduce
    gradients at the boundary; a schedule that would read a parameter that is not gathered is refused. It must return
    the same result on every rank, so it may depend on nothing but its arguments.

    Args:
        name: Name of the pass.
        needs: Requirements; ``"profile"`` for passes that read ``context.profile``.
        provides: Names that later passes may require.
        initial: Whether it runs on each program at compile time, as `zero3` does, without a profile, so that planning
            starts from its result. Such passes come first.
    """
    return lambda run: Pass(name, run, frozenset(needs), frozenset(provides), initial)


NO_CHANGE = "nothing"
"""The answer of `difference` for a pass that changed no schedule."""

BUILTIN_PASSES: dict[str, Pass] = {
    made.name: made
    for made in (
        step_pass("zero3", provides=["gathers"], initial=True)(zero3),
        step_pass("prefetch", needs=["gathers"], initial=True)(prefetch),
        step_pass("fuse", needs=["gathers", "profile"])(fuse),
        step_pass("offload_activation", needs=["gathers", "profile"])(offload_activation),
        step_pass("offload_optimizer", needs=["gathers", "profile"])(offload_optimizer),
        step_pass("unshard", needs=["gathers", "profile"])(unshard),
        step_pass("keep_whole", needs=["gathers", "profile"])(keep_whole),
        step_pass("reduce_late", needs=["gathers", "profile"])(reduce_late),
        step_pass("proactive_prefetch", needs=["gathers", "profile"])(proactive_prefetch),
    )
}
"""The passes that come with the package."""

DEFAULT_PASSES: tuple[Pass, ...] = (BUILTIN_PASSES["zero3"], BUILTIN_PASSES["prefetch"])
"""What every program goes through when it is compiled."""

DEFAULT_SCHEDULE: tuple[dict[str, Any], ...] = (
    {"step": 0, "passes": ["zero3", "prefetch"]},
    {
        "step": 3,
        "passes": [
            "zero3",
            "prefetch",
            "fuse",
            "offload_activation",
            "offload_optimizer",
            "unshard",
            "keep_whole",
            "reduce_late",
            "proactive_prefetch",
        ],
    },
)
"""What `CompileConfig.schedule` means by ``"auto"``."""


def resolve_passes(passes: Sequence[str | Pass], *, profiled: bool) -> tuple[Pass, ...]:
    """Resolves passes and checks their order.

    Args:
        passes: Names of `BUILTIN_PASSES`, ``"package.module:name"`` of a `Pass` of your own, or passes.
        profiled: Whether there will be a profile.

    Returns:
        The passes.

    Raises:
        PassError: For a name that is not known, for needs that nothing before provides, for needs in a circle, and for
            a pass that planning starts from behind one that plans.
    """
    found = tuple(entry if isinstance(entry, Pass) else _find(entry) for entry in passes)
    provided = {"profile"} if profiled else set()
    for position, one in enumerate(found):
        for need in sorted(one.needs - provided):
            raise PassError(_explain(one, need, found, position))
        if one.initial and not all(earlier.initial for earlier in found[:position]):
            raise PassError(f"The pass {one.name!r} schedules programs and must come before passes that plan a step.")
        provided |= one.provides
    if "gathers" not in provided:
        names = ", ".join(repr(one.name) for one in found) or "none"
        raise PassError(f"No pass schedules the communication (passes: {names}). Begin with 'zero3'.")
    return found


def _find(name: str) -> Pass:
    if name in BUILTIN_PASSES:
        return BUILTIN_PASSES[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        known = ", ".join(sorted(BUILTIN_PASSES))
        raise PassError(f"There is no pass {name!r}. Use one of {known}, or 'package.module:name' for one of yours.")
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PassError(f"The pass {name!r} cannot be imported: {error}") from error
    if not isinstance(value, Pass):
        raise PassError(f"{name!r} is a {type(value).__name__}, no pass: decorate the function with `step_pass`.")
    return value


def _explain(one: Pass, need: str, passes: Sequence[Pass], position: int) -> str:
    if need == "profile":
        return f"The pass {one.name!r} needs a profile: give it a `step` of at least 1 in the schedule."
    providers = [later for later in passes[position + 1 :] if need in later.provides]
    if not providers:
        known = [p.name for p in BUILTIN_PASSES.values() if need in p.provides]
        remedy = f"put {known[0]!r} before it" if known else "no pass provides that"
        return f"The pass {one.name!r} needs {need!r}, which no pass before it provides: {remedy}."
    circle = _circle(one, passes)
    if circle:
        return f"The passes {' -> '.join(repr(name) for name in circle)} need one another: no order satisfies them."
    return f"The pass {one.name!r} needs {need!r} from {providers[0].name!r}, which comes after it: swap them."


def _circle(start: Pass, passes: Sequence[Pass]) -> list[str]:
    """Returns the names along a path of needs from `start` back to it, if there is one."""
    path = [(start, [start.name])]
    seen: set[str] = set()
    while path:
        one, names = path.pop()
        for other in passes:
            if not one.needs & other.provides:
                continue
            if other.name == start.name:
                return [*names, start.name]
            if other.name not in seen:
                seen.add(other.name)
                path.append((other, [*names, other.name]))
    return []


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
    budget, with the result of schedules that gather everything right before its use.

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
        if cost(best)[0] > 0:
            least = [just_in_time(schedule) for schedule in schedules]
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


def difference(before: Sequence[Schedule], after: Sequence[Schedule]) -> str:
    """Describes the changes from one step's schedules to another's of the same programs."""
    parts = []
    for name, ops in (("gathers", {"gather"}), ("reductions", REDUCTIONS)):
        groups = [sum(i.op in ops for s in step for i in s.instructions) for step in (before, after)]
        if groups[0] != groups[1]:
            parts.append(f"{format_count(groups[0], 'group')} of {name} become {groups[1]}")
    kept = [sum(len(s.kept) for s in step if s.kind == "forward") for step in (before, after)]
    if kept[0] != kept[1]:
        parts.append(f"parameters kept for backward: {kept[0]} become {kept[1]}")
    whole = [
        sum(len(release.ids) for s in step for release in s.groups("release_at_boundary")) for step in (before, after)
    ]
    if whole[0] != whole[1]:
        parts.append(f"parameters kept for the next micro-batch: {whole[0]} become {whole[1]}")
    late = [
        sum(len(reduction.ids) for s in step for reduction in s.groups("reduce_at_boundary"))
        for step in (before, after)
    ]
    if late[0] != late[1]:
        parts.append(f"gradients reduced at the boundary: {late[0]} become {late[1]}")
    away = [sum(copy.bytes for s in step for copy in s.groups("offload")) for step in (before, after)]
    if away[0] != away[1]:
        parts.append(f"activations in host memory: {format_bytes(away[0])} become {format_bytes(away[1])}")
    states = [{k for s in step for copy in s.groups("reload_states") for k in copy.ids} for step in (before, after)]
    if states[0] != states[1]:
        parts.append(f"chunks of optimizer states fetched in backward: {len(states[0])} become {len(states[1])}")
    moved = sum(a.instructions != b.instructions for a, b in zip(before, after, strict=True))
    if moved and not parts:
        parts.append(f"launches moved in {moved} of {len(after)} programs")
    return "; ".join(parts) or NO_CHANGE
