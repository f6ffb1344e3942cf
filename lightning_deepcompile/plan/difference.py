"""Describes the changes from one step's schedules to another's."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_deepcompile.program.instructions import TABLE, Tally
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.schedule import Schedule

NO_CHANGE = "nothing"
"""The answer of `difference` for a pass that changed no schedule."""


def difference(before: Sequence[Schedule], after: Sequence[Schedule]) -> str:
    """Describes the changes from one step's schedules to another's of the same programs."""
    parts = []
    kept = [sum(len(s.kept) for s in step if s.kind == "forward") for step in (before, after)]
    if kept[0] != kept[1]:
        parts.append(f"parameters kept for backward: {kept[0]} become {kept[1]}")
    for count in dict.fromkeys(count for row in TABLE.values() for count in row.counts):
        old, new = (_counted(count, step) for step in (before, after))
        if old != new:
            shown = format_bytes if count.of == "bytes" else str
            parts.append(f"{count.text}: {shown(old)} become {shown(new)}")
    moved = sum(a.instructions != b.instructions for a, b in zip(before, after, strict=True))
    if moved and not parts:
        parts.append(f"launches moved in {moved} of {len(after)} programs")
    return "; ".join(parts) or NO_CHANGE


def _counted(count: Tally, step: Sequence[Schedule]) -> int:
    found = [i for schedule in step for i in schedule.instructions if count in i.traits.counts]
    return sum({"groups": 1, "items": len(i.ids), "bytes": i.bytes}[count.of] for i in found)
