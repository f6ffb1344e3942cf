"""``python -m lightning_deepcompile simulate PROFILE.json``: predicts a step's cost on other ranks and links."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from lightning_deepcompile.plan.budget import parse_budget
from lightning_deepcompile.plan.command_line import fail, read_profile
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.copy_placement import offload_all
from lightning_deepcompile.plan.costs import Profile, ProfileError
from lightning_deepcompile.plan.known_passes import DEFAULT_SCHEDULE, resolve_passes
from lightning_deepcompile.plan.least import least_budget
from lightning_deepcompile.plan.link_options import add_link_options, rank_counts, with_links
from lightning_deepcompile.plan.offload import OffloadMode
from lightning_deepcompile.plan.optimize import optimize
from lightning_deepcompile.plan.passes.reduce_late import place_reductions
from lightning_deepcompile.plan.report import PassReport, format_passes
from lightning_deepcompile.plan.scaling import format_scaling, scaling
from lightning_deepcompile.plan.settings import PlanSettings, Reduction, Rounding
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.plan.step_pass import PassError
from lightning_deepcompile.program.printer import exact_bytes, format_bytes, format_count
from lightning_deepcompile.program.schedule import Operation


def main(arguments: Sequence[str]) -> None:
    """Plans and simulates a measured step; needs neither ranks nor a device.

    Ends with status 1 if the step does not fit into the budget, and with 2 for what cannot be read.

    Args:
        arguments: Command line behind ``simulate``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_deepcompile simulate",
        description="Plans and simulates a measured step, on other ranks, links and budgets if asked to; needs neither "
        "ranks nor a device. The exit status is 1 if the step does not fit into the memory budget.",
    )
    parser.add_argument("profile", type=Path, help="what `strategy.profile().to_json()` gave")
    add_link_options(parser)
    parser.add_argument("--budget", help="memory that a plan may use: bytes, or a text like 24GiB")
    parser.add_argument(
        "--offload-activations",
        choices=get_args(OffloadMode),
        default="none",
        help="saved tensors in host memory: none, what exceeds the budget, or all",
    )
    parser.add_argument(
        "--reduce", choices=get_args(Reduction), help="as in CompileConfig; by default as in the profiled run"
    )
    parser.add_argument(
        "--rounding", choices=get_args(Rounding), default="same", help="as in CompileConfig; any: reductions may move"
    )
    parser.add_argument("--copy-bandwidth", type=float, help="GB/s of copies to host memory, and of those back")
    parser.add_argument("--passes", default=",".join(DEFAULT_SCHEDULE[-1]["passes"]), help="separated by commas")
    options = parser.parse_args(arguments)
    try:
        measured = read_profile(options.profile)
        profiles = {ranks: _changed(measured, options, ranks) for ranks in rank_counts(options, measured)}
        passes = resolve_passes(options.passes.split(","), profiled=True)
    except (ProfileError, PassError, ValueError) as error:
        fail("simulate", error)
    settings = PlanSettings(
        offload_activations=options.offload_activations,
        reduce=options.reduce or ("auto" if options.rounding == "any" else "every"),
        rounding=options.rounding,
    )
    profile = profiles[max(profiles)]
    if len(profiles) > 1:
        for note in _notes(measured, profile, options):
            print(f"note: {note}")
        print(format_scaling(scaling(measured, list(profiles), profiles.__getitem__, passes, settings)))
        return
    _, effects = optimize(profile.schedules, passes, PlanContext(settings, profile))
    print(
        f"{_ranks(profile)}, "
        f"{format_count(profile.micro_batches, 'micro-batch', 'micro-batches')} a step; gathers {profile.gather}; "
        f"reductions {profile.reduce}"
    )
    for note in _notes(measured, profile, options):
        print(f"note: {note}")
    print(format_passes([PassReport.of(effect) for effect in effects]))
    schedules = profile.schedules if options.offload_activations == "none" else offload_all(profile.schedules)
    least = least_budget(schedules, profile)
    print(f"needs at least {exact_bytes(least)}")
    if (excess := _excess(profile, least, effects[-1].prediction.peak_bytes)) is not None:
        print(f"does not fit: {excess}")
        raise SystemExit(1)


def _ranks(profile: Profile) -> str:
    """Describes the number of ranks, and how they are divided."""
    topology = profile.topology
    if topology is None:
        return format_count(profile.world_size, "rank")
    ranks = profile.world_size * topology.replicas
    parts = [format_count(ranks, "rank")]
    if ranks > topology.ranks_per_node:
        parts.append(f"on {ranks // topology.ranks_per_node} nodes")
    if topology.replicas > 1:
        parts.append(f"in {topology.replicas} replicas")
    return " ".join(parts)


def _excess(profile: Profile, least: int, peak: int) -> str | None:
    """Explains why the step does not fit into the budget; None if it does, or if there is no limit."""
    if profile.budget is None:
        return None
    budget = profile.budget + profile.room  # room is for larger batches than the one that was measured
    if least > budget:
        return f"the budget is {exact_bytes(budget)}, and {exact_bytes(least)} are the least that would do."
    if peak > budget:
        peaks = f"a step planned by these passes needs {exact_bytes(peak)}; {exact_bytes(least)} would do"
        return f"the budget is {format_bytes(budget)}, and {peaks}."
    return None


def _notes(measured: Profile, profile: Profile, options: argparse.Namespace) -> list[str]:
    """Returns notes on the result for the user."""
    notes = []
    if options.reduce == "boundary" and profile.micro_batches == 1:
        notes.append("--reduce boundary changes nothing: a step is one micro-batch, and reduces once anyway.")
    elif options.rounding == "any" and profile.micro_batches > 1 and profile.hold_seconds is None:
        notes.append(
            "every micro-batch's gradients are reduced: the profile does not say what it costs to add up unsharded "
            "gradients. One of a run with CompileConfig(rounding='any') does."
        )
    if _is_whole(measured) and profile.world_size > 1:
        low, high = _bounds(profile)
        notes.append(
            "the profile is of one rank, whose programs gather and reduce nothing: the table is compute alone. With "
            f"{profile.world_size} ranks' communication at these bandwidths a step takes {low * 1e3:.1f} ms if all of "
            f"it hides behind compute, and {high * 1e3:.1f} ms if none does. A profile of two ranks, or of one with "
            "CompileConfig(memory_budget=...), has the programs of many ranks."
        )
    return notes


def _is_whole(profile: Profile) -> bool:
    """Returns whether the programs are those of one rank that gathers nothing."""
    moving = ("launch", "parameters"), ("launch and wait", "parameters")
    found = any(i.traits.effect in moving for schedule in profile.schedules for i in schedule.instructions)
    return profile.world_size == 1 and not found


def _bounds(profile: Profile) -> tuple[float, float]:
    """Returns bounds on the seconds of a step whose communication is not in its programs.

    Every micro-batch gathers all parameters twice, for forward and for backward, and reduces their gradients.
    """
    compute = simulate(profile.schedules, profile).seconds
    size = profile.resident.shards * profile.world_size
    moved = 2 * profile.gather_seconds([size]) + profile.reduce_seconds([size])
    return max(compute, profile.micro_batches * moved), compute + profile.micro_batches * moved


def _changed(profile: Profile, options: argparse.Namespace, ranks: int) -> Profile:
    profile = with_links(profile, options, ranks)
    if options.reduce is not None:
        if options.reduce == "boundary" and profile.hold_seconds is None and profile.micro_batches > 1:
            raise ValueError(
                "--reduce boundary: the profile does not say what it costs to add up whole gradients. Take a new one "
                "of a run that accumulates gradients, with CompileConfig(rounding='any')."
            )
        op: Operation = "reduce_at_boundary" if options.reduce == "boundary" else "reduce"
        profile = replace(profile, schedules=tuple(place_reductions(profile.schedules, op)))
    if options.copy_bandwidth is not None:
        copy = replace(profile.copy_out, bandwidth=options.copy_bandwidth * 1e9)
        profile = replace(profile, copy_out=copy, copy_in=copy)
    if options.budget is not None:
        budget = int(options.budget) if options.budget.isdigit() else options.budget
        try:
            profile = replace(profile, budget=parse_budget(budget, total=1), room=0)
        except ValueError as error:
            raise ValueError(f"--budget {options.budget}: expected bytes, or a text like 24GiB.") from error
    profile.check()
    return profile
