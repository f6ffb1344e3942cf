"""``python -m lightning_deepcompile simulate PROFILE.json``: what a step would cost on other ranks and links."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from lightning_deepcompile.plan.budget import parse_budget
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.copy_placement import offload_all
from lightning_deepcompile.plan.costs import Link, Profile, ProfileError
from lightning_deepcompile.plan.least import least_budget
from lightning_deepcompile.plan.offload import OffloadMode
from lightning_deepcompile.plan.pass_manager import DEFAULT_SCHEDULE, PassError, optimize, resolve_passes
from lightning_deepcompile.plan.passes.reduce_late import place_reductions
from lightning_deepcompile.plan.report import PassReport, format_passes
from lightning_deepcompile.plan.settings import PlanSettings, Reduction
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.schedule import Operation

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Plans and simulates a measured step; needs neither ranks nor a device.

    Args:
        arguments: Command line behind ``simulate``.
    """
    parser = argparse.ArgumentParser(prog="python -m lightning_deepcompile simulate", description=main.__doc__)
    parser.add_argument("profile", type=Path, help="what `strategy.profile().to_json()` gave")
    parser.add_argument("--world", type=int, help="number of ranks; times and sizes of regions stay as measured")
    parser.add_argument("--bandwidth", type=float, help="GB/s that a ring moves per rank, for gathers and reductions")
    parser.add_argument("--latency", type=float, help="microseconds of a group of collectives")
    parser.add_argument("--budget", help="memory that a plan may use: bytes, or a text like 24GiB")
    parser.add_argument(
        "--offload-activations", choices=get_args(OffloadMode), default="none", help="as in CompileConfig"
    )
    parser.add_argument(
        "--reduce", choices=get_args(Reduction), help="as in CompileConfig; by default as in the profiled run"
    )
    parser.add_argument("--copy-bandwidth", type=float, help="GB/s of copies to host memory, and of those back")
    parser.add_argument("--passes", default=",".join(DEFAULT_SCHEDULE[-1]["passes"]), help="separated by commas")
    options = parser.parse_args(arguments)
    try:
        profile = _changed(Profile.from_json(options.profile.read_text()), options)
        passes = resolve_passes(options.passes.split(","), profiled=True)
    except (OSError, ProfileError, PassError, ValueError) as error:
        parser.error(str(error))
    settings = PlanSettings(offload_activations=options.offload_activations, reduce=options.reduce or "every")
    _, effects = optimize(profile.schedules, passes, PlanContext(settings, profile))
    links = [
        f"{name} {link.latency * 1e6:.0f} us + {link.bandwidth / 1e9:.2f} GB/s"
        for name, link in (("gathers", profile.gather), ("reductions", profile.reduce))
    ]
    print(f"{profile.world_size} ranks, {profile.micro_batches} micro-batches a step; {'; '.join(links)}")
    print(format_passes([PassReport.of(effect) for effect in effects]))
    schedules = profile.schedules if options.offload_activations == "none" else offload_all(profile.schedules)
    print(f"needs at least {format_bytes(least_budget(schedules, profile))}")


def _changed(profile: Profile, options: argparse.Namespace) -> Profile:
    if options.world is not None:
        if options.world < 1:
            raise ValueError(f"--world {options.world}: expected a positive number.")
        profile = profile.for_ranks(options.world)
    links = []
    for link in (profile.gather, profile.reduce):
        bandwidth = link.bandwidth if options.bandwidth is None else options.bandwidth * 1e9
        links.append(Link(link.latency if options.latency is None else options.latency / 1e6, bandwidth))
    profile = replace(profile, gather=links[0], reduce=links[1])
    if options.reduce is not None:
        if options.reduce != "every" and profile.hold_seconds is None:
            raise ValueError(
                f"--reduce {options.reduce}: the profile does not say what it costs to add up whole gradients. Take "
                "one of a run that accumulates gradients with CompileConfig(reduce='auto') or reduce='boundary'."
            )
        op: Operation = "reduce_at_boundary" if options.reduce == "boundary" else "reduce"
        profile = replace(profile, schedules=tuple(place_reductions(profile.schedules, op)))
    if options.copy_bandwidth is not None:
        copy = replace(profile.copy_out, bandwidth=options.copy_bandwidth * 1e9)
        profile = replace(profile, copy_out=copy, copy_in=copy)
    if options.budget is not None:
        budget = int(options.budget) if options.budget.isdigit() else options.budget
        profile = replace(profile, budget=parse_budget(budget, total=1), room=0)
    profile.check()
    return profile
