"""Names of blocks for people: the block that a group of parameters or a region belongs to, in few words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.program.schedule import COPIES, STATE_COPIES, Instruction, Schedule


def blocks_of(instruction: Instruction, schedule: Schedule, profile: Profile) -> list[str]:
    """The blocks that an instruction of `schedule` works for; none if the profile has no names of them."""
    if instruction.region:
        known = profile.labels.regions.get(f"{schedule.name}/{instruction.region}", "")
        names = [name for name in known.split(", ") if name]
        return names or _named(instruction.ids, profile)
    return [] if instruction.op in COPIES | STATE_COPIES else _named(instruction.ids, profile)


def describe(instruction: Instruction, schedule: Schedule, profile: Profile) -> str:
    """The blocks as one text; without names, the region or the moved values."""
    if blocks := blocks_of(instruction, schedule, profile):
        return compress(blocks)
    if instruction.region:
        return instruction.region
    if instruction.op in COPIES:
        return f"saved tensors {_numbers(instruction.ids)}"
    if instruction.op in STATE_COPIES:
        return f"states {_numbers(instruction.ids)}"
    return f"parameters {_numbers(instruction.ids)}"


def compress(names: Iterable[str]) -> str:
    """Names as one text, in which neighbours in a list of modules are a range: ``layers.0-3, head``."""
    runs: list[tuple[str, int | None, int | None]] = []
    for name in dict.fromkeys(names):
        match = re.fullmatch(r"(.*\.)(\d+)", name)
        prefix, number = (match[1], int(match[2])) if match else (name, None)
        if runs and number is not None and runs[-1][0] == prefix and runs[-1][2] == number - 1:
            runs[-1] = (prefix, runs[-1][1], number)
        else:
            runs.append((prefix, number, number))
    return ", ".join(
        prefix if first is None else f"{prefix}{first}" if first == last else f"{prefix}{first}-{last}"
        for prefix, first, last in runs
    )


def _named(ids: Iterable[int], profile: Profile) -> list[str]:
    known = profile.labels.parameters
    return list(dict.fromkeys(known[str(i)] for i in ids if str(i) in known))


def _numbers(ids: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ids[:6]))
    return shown if len(ids) <= 6 else f"{shown} and {len(ids) - 6} more"
