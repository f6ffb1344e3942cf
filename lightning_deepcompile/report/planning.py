"""The rounds of planning as a section of a page: what each pass changed, and what that is worth."""

from __future__ import annotations

import functools
import inspect
import re

from lightning_deepcompile.plan.known_passes import BUILTIN_PASSES
from lightning_deepcompile.plan.report import PassReport, Round, split_idle
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.report import figures
from lightning_deepcompile.report.html import escape, ms, table
from lightning_deepcompile.report.record import StepRecord


def planning(record: StepRecord) -> str:
    """Returns the section; "" without a profile."""
    if not record.rounds:
        return "" if record.profile is None else "<p>Nothing was planned.</p>"
    parts = []
    for number, done in enumerate(record.rounds):
        where = f"Step {done.step}: " if done.step else ""
        parts.append(f"<h3>{escape(where + done.outcome)}</h3>")
        if done.reason:
            parts.append(f"<p>{escape(done.reason)}</p>")
        if done.budget is not None and done.passes:
            parts.append(f'<p class="quiet">Budget: {format_bytes(done.budget)} on each device.</p>')
        if done.passes:
            if len(split_idle(done.passes)[0]) > 1:
                parts.append(figures.chart(f"passes-figure-{number}", functools.partial(figures.passes_figure, done)))
            parts.append(_pass_table(done))
        parts.append(_compared(done))
    return "\n".join(parts)


def _pass_table(done: Round) -> str:
    rows: list[tuple[str, ...]] = []
    shown, idle = split_idle(done.passes)
    for before, entry in zip((None, *shown), shown, strict=False):
        why = "" if before is None else _gain(before, entry)
        rows.append((entry.name, entry.changed or "-", why, _purpose(entry.name)))
    note = f'<p class="quiet">Passes that changed nothing: {escape(idle)}.</p>' if idle else ""
    return table(("pass", "changed", "what that is worth, as predicted", "what the pass is for"), rows) + note


def _gain(before: PassReport, after: PassReport) -> str:
    parts = []
    for name, change, seconds in (
        ("step", after.step_seconds - before.step_seconds, before.step_seconds),
        ("waits", after.exposed_seconds - before.exposed_seconds, before.step_seconds),
    ):
        if abs(change) > 1e-4 * max(seconds, 1e-9):
            parts.append(f"{name} {change * 1e3:+.2f} ms")
    if change := after.peak_bytes - before.peak_bytes:
        parts.append(f"peak {'+' if change > 0 else '-'}{format_bytes(abs(change))}")
    return ", ".join(parts) or "no difference"


def _purpose(name: str) -> str:
    """The first sentence of a pass's documentation, of each pass if there are several."""
    sentences = []
    for one in name.split(" -> "):
        known = BUILTIN_PASSES.get(one)
        text = inspect.getdoc(known.run) if known is not None else None
        if text:
            sentences.append(re.sub(r"\s+", " ", text.split("\n\n")[0]).replace("`", ""))
    return " ".join(sentences)


def _compared(done: Round) -> str:
    """Compares predictions with measurements."""
    rows = []
    if done.passes and done.before_seconds > 0:
        first = done.passes[0]
        rows.append(("step before planning", ms(first.step_seconds), ms(done.before_seconds),
                     _off(first.step_seconds, done.before_seconds)))  # fmt: skip
        rows.append(("compute waits before planning", ms(first.exposed_seconds), ms(done.before_exposed_seconds), ""))
    if done.passes and done.after_seconds is not None:
        last = done.passes[-1]
        rows.append(("step with the plan", ms(last.step_seconds), ms(done.after_seconds),
                     _off(last.step_seconds, done.after_seconds)))  # fmt: skip
        if done.after_peak_bytes is not None:
            rows.append(("peak with the plan", format_bytes(last.peak_bytes), format_bytes(done.after_peak_bytes),
                         _off(last.peak_bytes, done.after_peak_bytes)))  # fmt: skip
    if not rows:
        return ""
    return "<h3>Predicted and measured</h3>" + table(("", "predicted", "measured", "off by"), rows, numbers=(1, 2, 3))


def _off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else ""
