"""Writes the report as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_deepcompile.plan.scaling import scaling_rows
from lightning_deepcompile.plan.show import communication
from lightning_deepcompile.program.printer import format_bytes, format_count
from lightning_deepcompile.report import figures
from lightning_deepcompile.report.blocks import blocks_table, links_table
from lightning_deepcompile.report.head import head, numbers_script
from lightning_deepcompile.report.html import STYLE, escape, ms, quiet, table
from lightning_deepcompile.report.measured import events_of, ranks_table, times_text
from lightning_deepcompile.report.memory import KINDS, MemoryAt, memory_by_kind
from lightning_deepcompile.report.planning import planning
from lightning_deepcompile.report.record import StepRecord
from lightning_deepcompile.report.timeline import block_order, timeline

NO_CHARTS = (
    "Charts need Plotly, which is not installed: `pip install 'lightning-deepcompile[report]'` or `pip install plotly`."
)


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
        ("ranks", "The measured step, rank by rank", _ranks(record)),
        ("times", "Step after step", _times(record)),
        ("step", "The simulated step, stream by stream", _step(record)),
        ("links", "Communication against the link", _links(record)),
        ("blocks", "Compute by block", _blocks(record)),
        ("planning", "Planning", planning(record)),
        ("scaling", "On more ranks", _scaling(record)),
        ("graphs", "Graph breaks and recompilations", _graphs(record)),
        ("compiled", "Compiled programs", _compiled(record)),
        ("host", "Host memory", _host(record)),
    ]
    sections = [section for section in sections if section[2]]
    charts, without = "", f'<p class="warn">{escape(NO_CHARTS)}</p>\n'
    if figures.can_draw():
        charts, without = f"<script>{figures.library()}</script>", ""
    links = " ".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = "\n".join(f'<section id="{name}"><h2>{title}</h2>\n{text}\n</section>' for name, title, text in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>DeepCompile report</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n{charts}</head><body>\n"
        f"<h1>DeepCompile report</h1>\n{without}{head(record)}\n{numbers_script(record)}\n"
        f"<nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def _ranks(record: StepRecord) -> str:
    if record.measured is None or record.profile is None:
        return ""
    measured, profile = record.measured, record.profile
    order = block_order(record.schedules, profile)
    figure = figures.chart("ranks-figure", lambda: figures.ranks_figure(events_of(measured, profile), order))
    return ranks_table(measured) + figure


def _times(record: StepRecord) -> str:
    if not record.times:
        return ""
    swaps = [done.step for done in record.rounds if done.passes]
    return times_text(record.times) + figures.chart("times-figure", lambda: figures.times_figure(record.times, swaps))


def _links(record: StepRecord) -> str:
    prediction = record.predict()
    if record.profile is None or prediction is None:
        return ""
    return links_table(record.schedules, record.profile, prediction)


def _blocks(record: StepRecord) -> str:
    if record.profile is None or not record.profile.regions:
        return ""
    return blocks_table(record.schedules, record.profile, record.operations, record.peak)


def _graphs(record: StepRecord) -> str:
    if not record.graphs:
        return ""
    odd = [row for row in record.graphs if row[2] or row[3]]
    if not odd:
        return quiet(f"None: {format_count(len(record.graphs), 'graph')}, each of a whole function.")
    heads = ("graph", "ends at", "why it ends there", "why the function was compiled again")
    captured = format_count(len(record.graphs), "captured graph")
    note = f"Of {captured}, {len(odd)} end in the middle of a function, or were compiled for other sizes or values."
    return quiet(note) + table(heads, odd)


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
            f"A measured step took {ms(abs(profile.unexplained_seconds))} {more} than what is drawn: work outside of "
            "programs, and ranks that wait for each other. Predicted durations of the step include it."
        )
    if profile.host_computes:
        notes.append(
            "On CPUs no allocator counts. Activations are what programs hold between regions; plans do not count "
            "shards and states, which are added here."
        )
    figure = figures.chart("step-figure", lambda: figures.step_figure(events, memory, short.schedules, profile))
    return "".join(f'<p class="quiet">{escape(note)}</p>' for note in notes) + figure + _peak_table(memory)


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
    return head + table(("kind", "bytes", "part"), rows, numbers=(1, 2))


def _scaling(record: StepRecord) -> str:
    if not record.scaling or record.profile is None:
        return ""
    note = (
        f"Predicted from the step that was measured on {format_count(record.profile.world_size, 'rank')}, and planned "
        "anew for each number of ranks. Weak scaling: each rank has as large a batch as was measured. Strong scaling: "
        "all ranks have that batch together, and compute takes its part of the time, which small kernels do not."
    )
    heads, *rows = scaling_rows(record.scaling)
    figure = figures.chart("scaling-figure", lambda: figures.scaling_figure(record.scaling))
    return f'<p class="quiet">{escape(note)}</p>' + figure + table(heads, rows, numbers=range(len(heads)))


def _compiled(record: StepRecord) -> str:
    parts = []
    if record.summary is not None:
        parts.append(f"<pre>{escape(str(record.summary))}</pre>")
    if record.schedules:
        kept = [format_count(len(one.kept), "parameter") if one.kept else "-" for one in record.schedules]
        rows = [(*communication(one), text) for one, text in zip(record.schedules, kept, strict=True)]
        heads = ("program", "regions", "groups of gathers", "gathered", "groups of reductions", "reduced", "kept whole")
        parts.append(table(heads, rows, numbers=range(1, 7)))
    for name, text in record.programs.items():
        parts.append(
            f"<details><summary>{escape(name)}, instruction by instruction</summary><pre>{escape(text)}</pre></details>"
        )
    return "\n".join(parts)


def _host(record: StepRecord) -> str:
    rows = []
    for schedule in record.schedules:
        away = schedule.groups("offload")
        if away:
            tensors = sum(len(i.ids) for i in away)
            rows.append((f"activations of {schedule.name}", format_count(tensors, "tensor"),
                         format_bytes(sum(i.bytes for i in away)), "from forward to backward"))  # fmt: skip
    chunks = () if record.profile is None else record.profile.states.chunks
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
    return table(("what", "pieces", "bytes on one rank", "when and why"), rows, numbers=(2,))
