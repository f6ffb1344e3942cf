"""``python -m lightning_deepcompile plan PLAN.json``: prints a plan file, and checks whether it can be used."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_deepcompile.plan.command_line import fail
from lightning_deepcompile.plan.plan_file import NoPlanError, Plan, PlanFileError, Setting, read_plan, read_setting
from lightning_deepcompile.program.printer import align, format_bytes
from lightning_deepcompile.program.schedule import REDUCTIONS, Schedule


def main(arguments: Sequence[str]) -> None:
    """Checks a plan file and prints its contents.

    Args:
        arguments: Command line behind ``plan``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_deepcompile plan",
        description="Checks a plan file, and prints what it was made for and what its programs do.",
    )
    parser.add_argument("plan", type=Path, help="the file that CompileConfig(plan=...) names")
    parser.add_argument("--instructions", action="store_true", help="print every instruction of every program")
    options = parser.parse_args(arguments)
    try:
        text = options.plan.read_text(encoding="utf-8")
        setting = read_setting(text)
        print(format_plan(setting, read_plan(text, setting), instructions=options.instructions))
    except OSError as error:
        fail("plan", f"{options.plan} cannot be read: {error.strerror}.")
    except NoPlanError as error:
        fail("plan", f"{options.plan} cannot be shown, as {error}.")
    except (PlanFileError, UnicodeDecodeError) as error:
        fail("plan", f"{options.plan} cannot be used, as {error}. Remove it: the next training writes a new one.")


def format_plan(setting: Setting, plan: Plan, *, instructions: bool = False) -> str:
    """Formats a plan as a table.

    Args:
        setting: What it was made for.
        plan: The plan.
        instructions: Whether to list every instruction below.
    """
    budget = "the default" if setting.memory_budget is None else repr(setting.memory_budget)
    ranks = "1 rank" if setting.world_size == 1 else f"{setting.world_size} ranks"
    lines = [
        f"a plan for {ranks} ({setting.device_type}), stage {setting.stage}, memory_budget: {budget}, "
        f"rounding: {setting.rounding}"
    ]
    if plan.states is not None:
        lines.append(f"  optimizer states in host memory: {format_bytes(plan.states.away)} ({plan.states.slots} slots)")
    if plan.tracing.uncheckpointed:
        lines.append(f"  checkpointed blocks that keep their activations: {plan.tracing.uncheckpointed}")
    if plan.tracing.sparing:
        lines.append("  backward recomputes cheap operators")
    if plan.tracing.chunked_losses:
        lines.append(f"  losses over many classes are computed in {plan.tracing.chunked_losses} chunks")
    if plan.tracing.chunked_mlps:
        lines.append(f"  feed-forward layers are computed in {plan.tracing.chunked_mlps} chunks")
    schedules = list(plan.schedules.values())
    rows = [("program", "regions", "gathers", "bytes", "reductions", "bytes", "kept", "to host"), *map(_row, schedules)]
    lines += [f"  {line}" for line in align(rows)]
    if instructions:
        for schedule in schedules:
            lines += ["", schedule.name]
            for one in schedule.instructions:
                size = f" ({format_bytes(one.bytes)})" if one.sizes else ""
                what = one.region or ", ".join(map(str, one.ids))
                lines.append(f"  {one.traits.label:20} {what}{size}".rstrip())
    return "\n".join(lines)


def communication(schedule: Schedule) -> tuple[str, ...]:
    """Cells of a table: a schedule's name, its regions, and groups and bytes of its gathers and of its reductions."""
    gathers = [i for i in schedule.instructions if i.traits.effect == ("launch", "parameters")]
    reductions = [i for i in schedule.instructions if i.op in REDUCTIONS]
    return (
        schedule.name,
        str(len(schedule.at("compute"))),
        str(len(gathers)),
        format_bytes(sum(i.bytes for i in gathers)),
        str(len(reductions)),
        format_bytes(sum(i.bytes for i in reductions)),
    )


def _row(schedule: Schedule) -> tuple[str, ...]:
    away = sum(copy.bytes for copy in schedule.groups("offload"))
    return (*communication(schedule), str(len(schedule.kept)), format_bytes(away))
