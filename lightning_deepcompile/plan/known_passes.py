"""The passes that come with the package, and passes by name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from lightning_deepcompile.plan.passes.fuse import fuse
from lightning_deepcompile.plan.passes.keep_whole import keep_whole
from lightning_deepcompile.plan.passes.offload_activation import offload_activation
from lightning_deepcompile.plan.passes.offload_optimizer import offload_optimizer
from lightning_deepcompile.plan.passes.prefetch import prefetch
from lightning_deepcompile.plan.passes.proactive_prefetch import proactive_prefetch
from lightning_deepcompile.plan.passes.reduce_late import reduce_late
from lightning_deepcompile.plan.passes.unshard import unshard
from lightning_deepcompile.plan.passes.zero3 import zero3
from lightning_deepcompile.plan.step_pass import Pass, PassError, step_pass

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

    Raises:
        PassError: For a name that is not known, for needs that nothing before provides, and for a pass that planning
            starts from behind one that plans.
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
    return f"The pass {one.name!r} needs {need!r} from {providers[0].name!r}, which comes after it: swap them."
