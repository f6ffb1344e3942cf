"""A pass: a function from schedules to schedules, and its requirements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.program.schedule import Schedule

StepPass = Callable[[list[Schedule], PlanContext], list[Schedule]]
"""Changes the schedules of a micro-batch together, in the order in which its programs run, by settings and profile."""


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
