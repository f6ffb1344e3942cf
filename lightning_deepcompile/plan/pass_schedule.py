"""The rule for `CompileConfig.schedule`: which passes run, and when."""

from __future__ import annotations

from typing import Any

from lightning_deepcompile.options import Rule, did_you_mean
from lightning_deepcompile.plan.known_passes import BUILTIN_PASSES
from lightning_deepcompile.plan.step_pass import Pass

_APART = 3  # steps: two are measured before a plan is made


class PassSchedule(Rule):
    """A list of ``{"step": n, "passes": [...]}``, in order, with names of passes that exist.

    Passes of the user's own are looked up later: the module that defines one may be the one that is being imported.
    """

    expected = "a list like [{'step': 0, 'passes': ['zero3']}, {'step': 3, 'passes': ['zero3', 'unshard']}]"

    def complaint(self, value: Any) -> str:
        """Describes the problem with `value`; "" if there is none."""
        steps: list[int] = []
        for entry in value:
            step, passes = entry.get("step"), entry.get("passes")
            if (
                entry.keys() != {"step", "passes"}
                or type(step) is not int
                or step < 0
                or not isinstance(passes, list | tuple)
            ):
                return f"{entry!r} should be like {{'step': 3, 'passes': ['zero3', 'unshard']}}."
            if text := next((text for one in passes if (text := _complaint(one))), ""):
                return text
            steps.append(step)
        if not steps or steps[0] != 0:
            return f"the first entry must be of step 0, and the steps are {steps}."
        if any(later - earlier < _APART for earlier, later in zip(steps, steps[1:], strict=False)):
            return (
                f"each must be {_APART} or more after the one before, since the steps before it are "
                f"measured, and the steps are {steps}."
            )
        return ""


def _complaint(name: object) -> str:
    if isinstance(name, Pass) or name in BUILTIN_PASSES:
        return ""
    if isinstance(name, str) and ":" in name:
        module, _, attribute = name.partition(":")
        if attribute.isidentifier() and all(part.isidentifier() for part in module.split(".")):
            return ""
    meant = did_you_mean(name, BUILTIN_PASSES)
    known = ", ".join(sorted(BUILTIN_PASSES))
    return f"there is no pass {name!r}.{meant} Use one of {known}, or 'package.module:name' for one of yours."
