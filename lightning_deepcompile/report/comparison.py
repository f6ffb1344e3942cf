"""Compares two reports: their figures, and the facts in which they differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lightning_deepcompile.program.printer import align, format_bytes
from lightning_deepcompile.report.html import ms

_NUMBERS = re.compile(r'<script type="application/json" id="numbers">(.*?)</script>', re.DOTALL)


def compare(before: Path, after: Path) -> str:
    """Returns a table of what differs between two pages that `write_page` wrote.

    Raises:
        ValueError: If a file is no such page.
        OSError: If it cannot be read.
    """
    first, second = _read(before), _read(after)
    rows = [("", before.name, after.name, "change")]
    for name in dict.fromkeys([*first["facts"], *second["facts"]]):
        facts = [str(one["facts"].get(name, "-")) for one in (first, second)]
        if facts[0] != facts[1]:
            rows.append((name, *facts, ""))  # type: ignore[arg-type] # two of them
    for name in dict.fromkeys([*first["figures"], *second["figures"]]):
        values = [one["figures"].get(name) for one in (first, second)]
        change = ""
        if None not in values and values[0][0]:
            change = f"{values[1][0] / values[0][0] - 1:+.1%}"
        rows.append((name, *map(_shown, values), change))  # type: ignore[arg-type]
    return "\n".join(align(rows, left=range(4)))


def _shown(value: list[Any] | None) -> str:
    if value is None:
        return "-"
    return ms(value[0]) if value[1] == "s" else format_bytes(int(value[0]))


def _read(path: Path) -> dict[str, Any]:
    found = _NUMBERS.search(path.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{path} is no report: give pages that `strategy.save_report()` wrote.")
    data: dict[str, Any] = json.loads(found[1])
    return data
