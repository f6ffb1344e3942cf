"""A simulated step as events: the work of each stream over time, with the names of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.simulate import Prediction
from lightning_deepcompile.program.instructions import Stream
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.schedule import Instruction, Schedule
from lightning_deepcompile.report.names import blocks_of, describe

LANES = (
    "program",
    "compute",
    "optimizer",
    "gather",
    "reduce",
    "copy to host",
    "copy from host",
    "states to host",
    "states from host",
    "host launches",
)
"""From the top of a chart to its bottom."""

_OF_STREAM: dict[Stream, str] = {
    "compute": "compute",
    "gather": "gather",
    "reduce": "reduce",
    "out": "copy to host",
    "in": "copy from host",
    "states out": "states to host",
    "states in": "states from host",
    "host": "host launches",
}


@dataclass(frozen=True)
class Event:
    """A piece of work of a stream.

    Args:
        lane: One of `LANES`.
        name: The blocks that it is for.
        detail: The program, and the action.
        block: The first of the blocks; "" where none is known.
        program: Name of the program that it belongs to; "" for the optimizer and copies of its states.
        start: In seconds from the beginning of the step.
        end: Likewise.
        kind: Of a measured piece, as in `plan.measured.KINDS`; else "".
    """

    lane: str
    name: str
    detail: str
    block: str
    program: str
    start: float
    end: float
    kind: str = ""


def timeline(prediction: Prediction, schedules: Sequence[Schedule], profile: Profile) -> list[Event]:
    """Returns the events of a predicted step.

    Args:
        prediction: The simulation of `schedules`.
        schedules: The programs of a micro-batch.
        profile: Has the names.

    Returns:
        Runs of programs, then the work of streams, in the order in which the host issues it.
    """
    sources: dict[str, tuple[Schedule, Instruction]] = {}
    for schedule in schedules:
        for instruction in schedule.instructions:
            sources[f"{schedule.name}/{instruction.region or instruction.text}"] = (schedule, instruction)
    events = []
    for span in prediction.spans:
        lane = "optimizer" if span.label == "optimizer" else _OF_STREAM[span.stream]
        name, detail, block, program = span.label, span.label, "", ""
        if span.label in sources:
            schedule, instruction = sources[span.label]
            program = schedule.name
            name = describe(instruction, schedule, profile)
            size = f", {format_bytes(instruction.bytes)}" if instruction.sizes else ""
            what = instruction.region or instruction.traits.label
            detail = f"{schedule.name}: {what}{size}"
            block = next(iter(blocks_of(instruction, schedule, profile)), "")
        events.append(Event(lane, name, detail, block, program, span.start, span.end))
    return [*_programs(events, schedules), *events]


def _programs(events: Sequence[Event], schedules: Sequence[Schedule]) -> list[Event]:
    """Returns the intervals in which each run of a program computes."""
    runs: list[Event] = []
    kinds = {schedule.name: schedule.kind for schedule in schedules}
    firsts = {f"{s.name}: {s.instructions[position].region}" for s in schedules for position in s.at("compute")[:1]}
    for event in events:
        if event.lane != "compute" or not event.program:
            continue
        if runs and runs[-1].program == event.program and event.detail not in firsts:
            runs[-1] = replace(runs[-1], end=event.end)
        else:
            name = event.program
            runs.append(Event("program", name, f"{kinds[name]} program", "", name, event.start, event.end))
    return runs


def block_order(schedules: Sequence[Schedule], profile: Profile) -> list[str]:
    """All blocks, in the order in which programs first compute with them."""
    found: dict[str, None] = {}
    for schedule in schedules:
        for position in schedule.at("compute"):
            found |= dict.fromkeys(blocks_of(schedule.instructions[position], schedule, profile))
    return list(found)
