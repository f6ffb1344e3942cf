"""The head of a report: what was trained, what limits it, and its figures, measured ones first."""

from __future__ import annotations

import json
import statistics
from typing import NamedTuple

from lightning_deepcompile.program.printer import format_bytes, format_count
from lightning_deepcompile.report.html import escape, ms, quiet, table
from lightning_deepcompile.report.measured import last_seconds
from lightning_deepcompile.report.record import StepRecord

_LIMITS_SHOWN = 3


class Figure(NamedTuple):
    """A number on top of a page.

    Args:
        name: Its name.
        value: In seconds or bytes.
        unit: ``"s"`` or ``"B"``.
        measured: Whether it was measured, and not predicted.
    """

    name: str
    value: float
    unit: str
    measured: bool

    def __str__(self) -> str:
        return ms(self.value) if self.unit == "s" else format_bytes(int(self.value))


def head(record: StepRecord) -> str:
    """Returns the head of a page."""
    facts = table(("", ""), record.facts.items()) if record.facts else ""
    profile, prediction = record.profile, record.predict()
    if profile is None or prediction is None:
        ranks = "" if record.summary is None else f"{format_count(record.summary.world_size, 'rank')}. "
        return (
            f'{facts}<p>{ranks}</p><p class="warn">No step was measured, so there is no timeline, no memory and no '
            "plan to show. Steps are measured from the fourth on, unless "
            "<code>CompileConfig(schedule=None)</code> or a plan file says that nothing is to be planned.</p>"
        )
    first, *others = record.limits()
    limit = f'<p class="limit">This step is {escape(str(first))}</p>'
    if others:
        more = ", ".join(f"{one.name} {ms(one.seconds)}" for one in others[:_LIMITS_SHOWN])
        limit += quiet(f"Then: {more}. Each is what a simulated step saves without that cost alone.")
    links = []
    if profile.world_size > 1:
        links = [f"{name} {link}" for name, link in (("gathers", profile.gather), ("reductions", profile.reduce))]
    steps = format_count(profile.micro_batches, "micro-batch", "micro-batches")
    ranks = f"{format_count(profile.world_size, 'rank')} ({profile.device_type})"
    cards = "".join(
        f'<div class="card{" measured" if one.measured else ""}"><b>{escape(str(one))}</b>'
        f"<span>{escape(one.name)}</span></div>"
        for one in figures_of(record)
    )
    return f'{facts}{limit}<div class="cards">{cards}</div>{quiet("; ".join([ranks, f"{steps} a step", *links]))}'


def figures_of(record: StepRecord) -> list[Figure]:
    """Returns the figures of a measured step, measured ones first."""
    profile, prediction = record.profile, record.predict()
    if profile is None or prediction is None:
        return []
    found: list[tuple[str, float | None, str, bool]] = []
    done = [one for one in record.rounds if one.after_seconds is not None]
    if done:
        found.append((f"measured with the plan ({done[-1].outcome})", done[-1].after_seconds, "s", True))
    planned = any(one.passes for one in record.rounds)
    found.append(("measured before planning" if planned else "measured step", profile.step_seconds or None, "s", True))
    if (measured := record.measured) is not None:
        parts = [measured.parts(rank) for rank in measured.ranks]
        waits = [sum(seconds for kind, seconds in one.items() if kind.startswith("waits")) for one in parts]
        found.append(("measured waits, of the rank that waits most", max(waits, default=None), "s", True))
        between = [one["between"] for one in parts]
        found.append(("measured between programs, of the slowest rank", max(between, default=None), "s", True))
    skew = 0.0
    if measured is not None:
        skew = measured.skew()
    elif record.rounds:
        skew = record.rounds[-1].skew_seconds
    found.append(("rank skew: difference of compute between ranks", skew or None, "s", True))
    if done:
        found.append(("measured peak", done[-1].after_peak_bytes, "B", True))
    peak = "predicted peak of programs" if profile.host_computes else "predicted peak"
    found += [
        ("predicted step", prediction.seconds, "s", False),
        ("compute busy", prediction.compute_seconds, "s", False),
        ("compute waits", prediction.exposed_seconds, "s", False),
        ("gathers", prediction.gather_seconds, "s", False),
        ("reductions", prediction.reduce_seconds, "s", False),
        (peak, prediction.peak_bytes, "B", False),
    ]
    return [Figure(name, value, unit, measured) for name, value, unit, measured in found if value is not None]


def numbers_script(record: StepRecord) -> str:
    """Returns the numbers of a page as JSON inside of it, which `report --compare` reads."""
    last = last_seconds(record.times)
    numbers = {one.name: [one.value, one.unit] for one in figures_of(record)}
    if last:
        numbers["median of the last steps"] = [statistics.median(last), "s"]
    data = json.dumps({"facts": dict(record.facts), "figures": numbers}).replace("<", "\\u003c")
    return f'<script type="application/json" id="numbers">{data}</script>'
