"""Writes the report as one HTML file that needs no network."""

from __future__ import annotations

import functools
import html
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.pass_manager import BUILTIN_PASSES
from lightning_deepcompile.plan.report import PassReport, Round, split_idle
from lightning_deepcompile.plan.scaling import scaling_rows
from lightning_deepcompile.plan.show import communication
from lightning_deepcompile.program.printer import format_bytes, format_count
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.report import figures
from lightning_deepcompile.report.memory import KINDS, MemoryAt, memory_by_kind
from lightning_deepcompile.report.names import compress
from lightning_deepcompile.report.record import StepRecord
from lightning_deepcompile.report.timeline import timeline

__all__ = ["NO_CHARTS", "page", "write_page"]

_REGIONS_SHOWN = 12
NO_CHARTS = (
    "Charts need Plotly, which is not installed: `pip install 'lightning-deepcompile[report]'` or `pip install plotly`."
)

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22272e; margin: 0 auto;
  max-width: 1240px; padding: 24px 32px 64px }
h1 { font-size: 26px; margin: 0 } h2 { font-size: 19px; margin: 40px 0 8px; border-bottom: 1px solid #d8dee4 }
h3 { font-size: 15px; margin: 20px 0 4px } p { margin: 6px 0; max-width: 900px } .quiet { color: #59636e }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0 }
.card { border: 1px solid #d8dee4; border-radius: 8px; padding: 10px 16px; min-width: 130px }
.card b { display: block; font-size: 20px; font-variant-numeric: tabular-nums } .card span { color: #59636e }
table { border-collapse: collapse; margin: 8px 0; font-size: 14px }
th, td { text-align: left; padding: 3px 14px 3px 0; vertical-align: top; border-bottom: 1px solid #eaeef2 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
pre { background: #f6f8fa; padding: 12px; overflow: auto; font-size: 12px; max-height: 480px }
summary { cursor: pointer; margin: 6px 0 } .warn { background: #fff4d6; padding: 8px 14px; border-radius: 6px }
nav a { margin-right: 16px; color: #3b5b84 }
"""


def write_page(record: StepRecord, path: str | Path) -> Path:
    """Writes the report of a step.

    Args:
        record: The contents.
        path: The file; its folder is made if there is none.

    Returns:
        The file.

    Raises:
        OSError: If it cannot be written.
    """
    path = Path(path)
    text = page(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def page(record: StepRecord) -> str:
    """Returns the report as text; arguments and errors as of `write_page`."""
    sections = [
        ("step", "The step, stream by stream", _step(record)),
        ("planning", "What planning changed", _planning(record)),
        ("scaling", "On more ranks", _scaling(record)),
        ("compiled", "What was compiled", _compiled(record)),
        ("regions", "Where compute goes", _regions(record)),
        ("host", "What is in host memory", _host(record)),
    ]
    sections = [section for section in sections if section[2]]
    charts, without = "", f'<p class="warn">{_text(NO_CHARTS)}</p>\n'
    if figures.can_draw():
        charts, without = f"<script>{figures.library()}</script>", ""
    links = " ".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = "\n".join(f'<section id="{name}"><h2>{title}</h2>\n{text}\n</section>' for name, title, text in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>DeepCompile report</title>\n'
        f"<style>{_STYLE}</style>\n{charts}</head><body>\n"
        f"<h1>DeepCompile report</h1>\n{without}{_head(record)}\n<nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def _head(record: StepRecord) -> str:
    profile, prediction = record.profile, record.predict()
    if profile is None or prediction is None:
        ranks = "" if record.summary is None else f"{format_count(record.summary.world_size, 'rank')}. "
        return (
            f'<p>{ranks}</p><p class="warn">No step was measured, so there is no timeline, no memory and no plan to '
            "show. Steps are measured from the fourth on at stage 3, unless <code>CompileConfig(schedule=None)</code> "
            "or a plan file says that nothing is to be planned.</p>"
        )
    steps = format_count(profile.micro_batches, "micro-batch", "micro-batches")
    cards = [
        ("predicted step", _ms(prediction.seconds)),
        (
            "measured before planning" if any(done.passes for done in record.rounds) else "measured step",
            _ms(profile.step_seconds) if profile.step_seconds else "unknown",
        ),
    ]
    measured = [done for done in record.rounds if done.after_seconds is not None]
    if measured and (after := measured[-1].after_seconds) is not None:
        cards.append((f"measured with the plan ({measured[-1].outcome})", _ms(after)))
    if record.rounds and (skew := record.rounds[-1].skew_seconds):
        cards.append(("rank skew: waiting for the rank with the most work", _ms(skew)))
    cards += [
        ("compute busy", _ms(prediction.compute_seconds)),
        ("compute waits", _ms(prediction.exposed_seconds)),
        ("gathers", _ms(prediction.gather_seconds)),
        ("reductions", _ms(prediction.reduce_seconds)),
        (
            "predicted peak of programs" if profile.host_computes else "predicted peak",
            format_bytes(prediction.peak_bytes),
        ),
    ]
    if measured and (peak := measured[-1].after_peak_bytes) is not None:
        cards.append(("measured peak", format_bytes(peak)))
    shown = "".join(f'<div class="card"><b>{_text(value)}</b><span>{_text(name)}</span></div>' for name, value in cards)
    links = []
    if profile.world_size > 1:
        links = [f"{name} {link}" for name, link in (("gathers", profile.gather), ("reductions", profile.reduce))]
    facts = [f"{format_count(profile.world_size, 'rank')} ({profile.device_type})", f"{steps} a step", *links]
    return f'<p class="quiet">{_text("; ".join(facts))}</p><div class="cards">{shown}</div>'


def _chart(name: str, draw: Callable[[], Any]) -> str:
    return figures.to_html(draw(), name) if figures.can_draw() else ""


def _step(record: StepRecord) -> str:
    short = record.shortened()
    profile, prediction = short.profile, short.predict()
    if profile is None or prediction is None or record.profile is None:
        return ""
    events = timeline(prediction, short.schedules, profile)
    memory = memory_by_kind(prediction, short.schedules, profile)
    notes = [
        "Times are the simulator's, from measured times of every region and every link. The colour of a bar is its "
        "block's place in the model, so a gather has the colour of the compute that reads it. Drag to zoom in, double "
        "click to zoom out; point at a bar for its block."
    ]
    if profile.micro_batches < record.profile.micro_batches:
        notes.append(f"Shown are two of {record.profile.micro_batches} micro-batches: the others are like the first.")
    if abs(profile.unexplained_seconds) > 0.02 * prediction.seconds:
        more = "more" if profile.unexplained_seconds > 0 else "less"
        notes.append(
            f"A measured step took {_ms(abs(profile.unexplained_seconds))} {more} than what is drawn: work outside of "
            "programs, and ranks that wait for each other. Predicted durations of the step include it."
        )
    if profile.host_computes:
        notes.append(
            "On CPUs no allocator counts. Activations are what programs hold between regions; plans do not count "
            "shards and states, which are added here."
        )
    figure = _chart("step-figure", lambda: figures.step_figure(events, memory, short.schedules, profile))
    return "".join(f'<p class="quiet">{_text(note)}</p>' for note in notes) + figure + _peak_table(memory)


def _peak_table(memory: Sequence[MemoryAt]) -> str:
    if not memory:
        return ""
    most = max(memory, key=lambda moment: sum(moment.sizes))
    rows = [
        (kind, format_bytes(size), f"{size / max(sum(most.sizes), 1):.0%}")
        for kind, size in zip(KINDS, most.sizes, strict=True)
        if size
    ]
    head = f"<h3>At the peak, {most.seconds * 1e3:.1f} ms into the step: {format_bytes(sum(most.sizes))}</h3>"
    return head + _table(("kind", "bytes", "part"), rows, numbers=(1, 2))


def _planning(record: StepRecord) -> str:
    if not record.rounds:
        return "" if record.profile is None else "<p>Nothing was planned.</p>"
    parts = []
    for number, done in enumerate(record.rounds):
        where = f"Step {done.step}: " if done.step else ""
        parts.append(f"<h3>{_text(where + done.outcome)}</h3>")
        if done.reason:
            parts.append(f"<p>{_text(done.reason)}</p>")
        if done.budget is not None and done.passes:
            parts.append(f'<p class="quiet">Budget: {format_bytes(done.budget)} on each device.</p>')
        if done.passes:
            parts.append(_chart(f"passes-figure-{number}", functools.partial(figures.passes_figure, done)))
            parts.append(_pass_table(done))
        parts.append(_compared(done))
    return "\n".join(parts)


def _pass_table(done: Round) -> str:
    rows: list[tuple[str, ...]] = []
    shown, idle = split_idle(done.passes)
    for before, entry in zip((None, *shown), shown, strict=False):
        why = "" if before is None else _gain(before, entry)
        rows.append((entry.name, entry.changed or "-", why, _purpose(entry.name)))
    note = f'<p class="quiet">Passes that changed nothing: {_text(idle)}.</p>' if idle else ""
    return _table(("pass", "changed", "what that is worth, as predicted", "what the pass is for"), rows) + note


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
        rows.append(("step before planning", _ms(first.step_seconds), _ms(done.before_seconds),
                     _off(first.step_seconds, done.before_seconds)))  # fmt: skip
        rows.append(("compute waits before planning", _ms(first.exposed_seconds), _ms(done.before_exposed_seconds), ""))
    if done.passes and done.after_seconds is not None:
        last = done.passes[-1]
        rows.append(("step with the plan", _ms(last.step_seconds), _ms(done.after_seconds),
                     _off(last.step_seconds, done.after_seconds)))  # fmt: skip
        if done.after_peak_bytes is not None:
            rows.append(("peak with the plan", format_bytes(last.peak_bytes), format_bytes(done.after_peak_bytes),
                         _off(last.peak_bytes, done.after_peak_bytes)))  # fmt: skip
    if not rows:
        return ""
    return "<h3>Predicted and measured</h3>" + _table(("", "predicted", "measured", "off by"), rows, numbers=(1, 2, 3))


def _off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else ""


def _scaling(record: StepRecord) -> str:
    if not record.scaling or record.profile is None:
        return ""
    note = (
        f"Predicted from the step that was measured on {format_count(record.profile.world_size, 'rank')}, and planned "
        "anew for each number of ranks. Weak scaling: each rank has as large a batch as was measured. Strong scaling: "
        "all ranks have that batch together, and compute takes its part of the time, which small kernels do not."
    )
    heads, *rows = scaling_rows(record.scaling)
    figure = _chart("scaling-figure", lambda: figures.scaling_figure(record.scaling))
    return f'<p class="quiet">{_text(note)}</p>' + figure + _table(heads, rows, numbers=range(len(heads)))


def _compiled(record: StepRecord) -> str:
    parts = []
    if record.summary is not None:
        parts.append(f"<pre>{_text(str(record.summary))}</pre>")
    if record.schedules:
        rows = [_program_row(schedule) for schedule in record.schedules]
        heads = ("program", "regions", "groups of gathers", "gathered", "groups of reductions", "reduced", "kept whole")
        parts.append(_table(heads, rows, numbers=range(1, 7)))
    for name, text in record.programs.items():
        parts.append(
            f"<details><summary>{_text(name)}, instruction by instruction</summary><pre>{_text(text)}</pre></details>"
        )
    return "\n".join(parts)


def _program_row(schedule: Schedule) -> tuple[str, ...]:
    return (*communication(schedule), format_count(len(schedule.kept), "parameter") if schedule.kept else "-")


def _regions(record: StepRecord) -> str:
    profile = record.profile
    if profile is None or not profile.regions:
        return ""
    total = sum(cost.seconds for cost in profile.regions.values())
    slowest = sorted(profile.regions.items(), key=lambda item: -item[1].seconds)[:_REGIONS_SHOWN]
    rows = [
        (key, _blocks(key, profile), _ms(cost.seconds), f"{cost.seconds / total:.1%}" if total else "-")
        for key, cost in slowest
    ]
    known = (
        f"The slowest {len(rows)} of {format_count(len(profile.regions), 'region')} of a micro-batch, "
        f"{_ms(total)} in all."
    )
    optimizer = f" The optimizer's step takes {_ms(profile.optimizer_seconds)}."
    return f'<p class="quiet">{known}{optimizer}</p>' + _table(
        ("region", "blocks", "time", "part of compute"), rows, numbers=(2, 3)
    )


def _blocks(key: str, profile: Profile) -> str:
    return compress(name for name in profile.labels.regions.get(key, "").split(", ") if name) or "-"


def _host(record: StepRecord) -> str:
    rows = []
    for schedule in record.schedules:
        away = schedule.groups("offload")
        if away:
            tensors = sum(len(i.ids) for i in away)
            rows.append((f"activations of {schedule.name}", format_count(tensors, "tensor"),
                         format_bytes(sum(i.bytes for i in away)), "from forward to backward"))  # fmt: skip
    chunks = () if record.profile is None else record.profile.state_chunks
    if chunks:
        reason = "" if record.summary is None else record.summary.offload_reason
        rows.append(("optimizer states", format_count(len(chunks), "chunk"), format_bytes(sum(chunks)),
                     reason or "from one optimizer step to the next"))  # fmt: skip
    elif record.summary is not None and record.summary.offloaded_bytes:
        rows.append(("optimizer states", "", format_bytes(record.summary.offloaded_bytes),
                     record.summary.offload_reason))  # fmt: skip
    if record.summary is not None and record.summary.offloaded_parameter_bytes:
        rows.append(("shards of parameters", "", format_bytes(record.summary.offloaded_parameter_bytes),
                     record.summary.offload_parameters_reason))  # fmt: skip
    if not rows:
        return "<p>Nothing: parameters, activations and optimizer states are on the device.</p>"
    return _table(("what", "pieces", "bytes on one rank", "when and why"), rows, numbers=(2,))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    right = set(numbers)

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if column in right else ''}>{_text(cell)}</{tag}>" for column, cell in enumerate(row)
        )

    lines = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', heads)}</tr>\n{lines}</table>"


def _text(text: str) -> str:
    return html.escape(text)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"
