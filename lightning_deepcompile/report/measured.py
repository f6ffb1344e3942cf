"""The measured step of all ranks, and the durations of steps, as sections of a page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.measured import KINDS, MeasuredStep, Piece, StepTime
from lightning_deepcompile.program.printer import format_count
from lightning_deepcompile.report.html import ms, quiet, table
from lightning_deepcompile.report.names import blocks_of, describe
from lightning_deepcompile.report.timeline import Event


def events_of(measured: MeasuredStep, profile: Profile) -> list[Event]:
    """Returns the measured step as events, with a lane for each rank."""
    events = []
    for rank in measured.ranks:
        for piece in measured.pieces(rank):
            name, detail, block, program = _named(piece, profile)
            events.append(Event(f"rank {rank.rank}", name, detail, block, program, piece.start, piece.end, piece.kind))
    return events


def _named(piece: Piece, profile: Profile) -> tuple[str, str, str, str]:
    schedule, instruction = piece.schedule, piece.instruction
    if schedule is None or instruction is None:
        return piece.kind, piece.kind, "", ""
    name, block = describe(instruction, schedule, profile), ""
    if piece.kind == "compute":
        block = next(iter(blocks_of(instruction, schedule, profile)), "")
    else:
        name = f"{piece.kind}: {name}"
    return name, f"{schedule.name}: {instruction.region or instruction.traits.label}", block, schedule.name


def ranks_table(measured: MeasuredStep) -> str:
    """Returns a table of the ranks' steps by kind of work."""
    rows = []
    for rank in measured.ranks:
        parts = measured.parts(rank)
        rows.append((str(rank.rank), ms(rank.end - rank.begin), *(ms(parts[kind]) for kind in KINDS)))
    step = "A step under the plan" if measured.planned else "A step before planning"
    note = (
        f"{step}, as the compute stream of each rank ran it. Between these parts, the device waited for the host, or "
        "did work of no program: hooks, clipping, logging."
    )
    if len(measured.ranks) < measured.world_size:
        note += f" Shown are {len(measured.ranks)} of {format_count(measured.world_size, 'rank')}, with the slowest."
    if len(measured.ranks) > 1:
        note += f" Rank skew, the difference of compute between ranks: {ms(measured.skew())}."
    return quiet(note) + table(("rank", "step", *KINDS), rows, numbers=range(len(KINDS) + 2))


def last_seconds(times: Sequence[StepTime]) -> list[float]:
    """Returns the durations of the last fifty steps in which nothing was compiled."""
    return [one.seconds for one in times if not one.compiled][-50:]


def times_text(times: Sequence[StepTime]) -> str:
    """Returns a paragraph about the durations of steps."""
    last = last_seconds(times)
    if not last:
        return ""
    compiled = [one for one in times if one.compiled]
    note = f"The median of the last {format_count(len(last), 'step')} is {ms(statistics.median(last))}, "
    note += f"the slowest of them took {ms(max(last))}. Data loading and callbacks are part of these times."
    if compiled:
        steps = ", ".join(str(one.step) for one in compiled[:8])
        more = "" if len(compiled) <= 8 else f" and {len(compiled) - 8} more"
        seconds = sum(one.seconds for one in compiled)
        note += f" Graphs were compiled in step {steps}{more}, which took {ms(seconds)} together."
    return quiet(note)
