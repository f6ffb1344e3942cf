"""The charts of a report, drawn by Plotly.

Plotly was chosen because its wheel contains the JavaScript for a page without network, it depends on two small
packages, and it draws horizontal bars with a base (a timeline), stacked areas and shared axes that zoom together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.measured import StepTime
from lightning_deepcompile.plan.report import Round, split_idle
from lightning_deepcompile.plan.scaling import ScalingPoint
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.report.memory import KINDS, MemoryAt
from lightning_deepcompile.report.timeline import LANES, Event, block_order

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MEMORY_COLORS = ("#4c6a92", "#7d9cc0", "#b9c4d0", "#e2a14a", "#c8553d", "#7fb069")
_SCALE = "Turbo"
_PLAIN = "#8a929c"
_WAITS = "#c8553d"
_KINDS: dict[str, str] = {
    "compute": _PLAIN,
    "waits for gathers": _WAITS,
    "waits for reductions": "#e08a76",
    "waits for copies": "#e2a14a",
    "optimizer": "#4c6a92",
    "between": "#d8dee4",
}
_LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}
_TIMELINE = {
    "barmode": "overlay",
    "bargap": 0.25,
    "hovermode": "closest",
    "dragmode": "zoom",
    "uniformtext": {"minsize": 9, "mode": "hide"},  # names that do not fit appear on zooming in
}
"""Layout of bars along an axis of time."""
_MANY = 60
"""So many bars are narrower than the lines between them would be."""
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def can_draw() -> bool:
    """Returns whether Plotly is installed. Without it a page has its tables, and no charts."""
    try:
        _plotly()
    except ImportError:
        return False
    return True


def _plotly() -> Any:
    import plotly.graph_objects
    import plotly.offline
    import plotly.subplots

    return plotly


def library() -> str:
    """Plotly's JavaScript, for a page that shows what `to_html` returns without network."""
    return _plotly().offline.get_plotlyjs()


def chart(name: str, draw: Callable[[], go.Figure]) -> str:
    """Returns a figure as part of a page that contains `library`; "" without Plotly.

    Args:
        name: Identifier of its element.
        draw: Makes the figure.
    """
    if not can_draw():
        return ""
    config = {"responsive": True, "displayModeBar": False, "scrollZoom": True}
    return draw().to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)


def _lay_out(figure: go.Figure, height: int, left: int, top: int, bottom: int, **options: Any) -> None:
    margin = {"l": left, "r": 20, "t": top, "b": bottom}
    figure.update_layout(template="plotly_white", height=height, margin=margin, **options)


def step_figure(
    events: Sequence[Event], memory: Sequence[MemoryAt], schedules: Sequence[Schedule], profile: Profile
) -> go.Figure:
    """Draws the streams of a step above its memory; both zoom together.

    Args:
        events: The work of streams.
        memory: Of one rank's device.
        schedules: The programs of a micro-batch, which give the blocks their order.
        profile: Has the budget.
    """
    plotly = _plotly()
    lanes = [lane for lane in LANES if any(event.lane == lane for event in events)]
    figure = plotly.subplots.make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.12, row_heights=[0.5, 0.5]
    )
    known = _block_colors(plotly, block_order(schedules, profile))
    for lane in lanes:
        chosen = [event for event in events if event.lane == lane]
        colors = [known.get(event.block, _PLAIN) for event in chosen]
        figure.add_trace(_bars(plotly, chosen, lane, colors, showlegend=False), row=1, col=1)
    unit = _add_memory(plotly, figure, memory, profile)
    begin, end = _extent(events, memory)
    figure.update_xaxes(range=[begin * 1e3, end * 1e3], showspikes=True, spikemode="across", spikethickness=1)
    figure.update_xaxes(title_text="milliseconds from the beginning of the step", row=2, col=1)
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], fixedrange=True, row=1, col=1)
    figure.update_yaxes(title_text=f"{unit} on one device", rangemode="tozero", fixedrange=True, row=2, col=1)
    legend = {"orientation": "h", "x": 0, "y": 0.47, "yanchor": "middle", "traceorder": "normal"}
    views = [_views(events, begin, end)]
    height = 2 * max(42 * len(lanes), 190) + 160
    _lay_out(figure, height, 120, 80, 50, legend=legend, updatemenus=views, **_TIMELINE)
    return figure


def _block_colors(plotly: Any, order: Sequence[str]) -> dict[str, str]:
    """The colour of each block: its place in the model."""
    place = {block: position / max(len(order) - 1, 1) for position, block in enumerate(order)}
    scale = plotly.colors.get_colorscale(_SCALE)
    return {block: plotly.colors.sample_colorscale(scale, [0.05 + 0.9 * part])[0] for block, part in place.items()}


def _bars(plotly: Any, events: Sequence[Event], name: str, colors: str | Sequence[str], **options: Any) -> Any:
    return plotly.graph_objects.Bar(
        orientation="h",
        name=name,
        y=[event.lane for event in events],
        base=[event.start * 1e3 for event in events],
        x=[(event.end - event.start) * 1e3 for event in events],
        marker={"color": colors, "line": {"width": 0.5 if len(events) < _MANY else 0, "color": "#fff"}},
        text=[event.name for event in events],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        constraintext="inside",
        textfont={"size": 10},
        customdata=[(event.name, event.detail, (event.end - event.start) * 1e3) for event in events],
        hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}<br>"
        "%{customdata[2]:.3f} ms, from %{base:.3f} ms<extra>%{y}</extra>",
        **options,
    )


def _add_memory(plotly: Any, figure: go.Figure, memory: Sequence[MemoryAt], profile: Profile) -> str:
    """Draws the memory; returns the unit of the axis."""
    most = max((sum(moment.sizes) for moment in memory), default=0)
    unit, scale = next((unit, scale) for unit, scale in _UNITS.items() if most >= scale or scale == 1)
    moments = [moment.seconds * 1e3 for moment in memory]
    for number, (kind, color) in enumerate(zip(KINDS, _MEMORY_COLORS, strict=True)):
        sizes = [moment.sizes[number] for moment in memory]
        if not any(sizes):
            continue
        area = plotly.graph_objects.Scatter(
            x=moments,
            y=[size / scale for size in sizes],
            name=kind,
            mode="lines",
            line={"width": 0.5, "color": color, "shape": "hv"},
            fillcolor=color,
            stackgroup="memory",
            customdata=[format_bytes(size) for size in sizes],
            hovertemplate="%{customdata}<extra>" + kind + "</extra>",
        )
        figure.add_trace(area, row=2, col=1)
    if profile.budget is not None and 0 < profile.budget < 2 * most:
        figure.add_hline(
            y=profile.budget / scale,
            line={"dash": "dash", "color": "#333", "width": 1},
            annotation_text=f"budget {format_bytes(profile.budget)}",
            annotation_position="top left",
            row=2,
            col=1,
        )
    return unit


def _extent(events: Sequence[Event], memory: Sequence[MemoryAt]) -> tuple[float, float]:
    begin = min([event.start for event in events] + [moment.seconds for moment in memory], default=0.0)
    end = max([event.end for event in events] + [moment.seconds for moment in memory], default=1e-3)
    margin = 0.01 * (end - begin)
    return begin - margin, end + margin


def _views(events: Sequence[Event], begin: float, end: float) -> dict[str, Any]:
    """Buttons that show a part of the step."""
    runs = [event for event in events if event.lane in ("program", "optimizer")]
    views = [("whole step", begin, end)]
    for lane, name in (("program", "forward"), ("program", "backward"), ("optimizer", "optimizer")):
        chosen = [event for event in runs if event.lane == lane and event.detail.startswith(name)]
        if chosen:
            last = chosen[-1] if lane == "optimizer" else chosen[0]  # of several micro-batches the first
            views.append((name, chosen[0].start, last.end))
    return {
        "type": "buttons",
        "direction": "right",
        "x": 1.0,
        "xanchor": "right",
        "y": 1.02,
        "yanchor": "bottom",
        "showactive": False,
        "pad": {"t": 0, "b": 0},
        "font": {"size": 11},
        "buttons": [
            {
                "label": name,
                "method": "relayout",
                "args": [{"xaxis.range": [a * 1e3, b * 1e3], "xaxis2.range": [a * 1e3, b * 1e3]}],
            }
            for name, a, b in views
        ],
    }


def passes_figure(done: Round) -> go.Figure:
    """Draws by how much each pass changes the step, and the time that compute waits, as predicted."""
    plotly = _plotly()
    shown, _ = split_idle(done.passes)
    pairs = list(zip(shown, shown[1:], strict=False))
    figure = plotly.graph_objects.Figure()
    for label, color, changes in (
        ("step", "#4c6a92", [after.step_seconds - before.step_seconds for before, after in pairs]),
        ("compute waits", _WAITS, [after.exposed_seconds - before.exposed_seconds for before, after in pairs]),
    ):
        figure.add_trace(
            plotly.graph_objects.Bar(
                orientation="h",
                name=label,
                y=[after.name for _, after in pairs],
                x=[change * 1e3 for change in changes],
                marker={"color": color},
                hovertemplate="%{x:+.2f} ms<extra>" + label + "</extra>",
            )
        )
    figure.update_yaxes(autorange="reversed", automargin=True, fixedrange=True)
    figure.update_xaxes(title_text="milliseconds more (right) or less (left)", zeroline=True, fixedrange=True)
    _lay_out(figure, 130 + 44 * len(pairs), 20, 40, 40, barmode="group", legend=_LEGEND)
    return figure


def ranks_figure(events: Sequence[Event], order: Sequence[str]) -> go.Figure:
    """Draws the measured step, a row for each rank.

    Args:
        events: The work of ranks.
        order: The blocks, in the model's order.
    """
    plotly = _plotly()
    figure = plotly.graph_objects.Figure()
    lanes = list(dict.fromkeys(event.lane for event in events))
    known = _block_colors(plotly, order)
    for kind, color in _KINDS.items():
        chosen = [event for event in events if event.kind == kind]
        if chosen:
            colors = [known.get(event.block, _PLAIN) for event in chosen] if kind == "compute" else color
            figure.add_trace(_bars(plotly, chosen, kind, colors))
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], automargin=True, fixedrange=True)
    figure.update_xaxes(title_text="milliseconds from the beginning of rank 0's step")
    _lay_out(figure, 150 + 40 * len(lanes), 20, 40, 50, legend=_LEGEND, **_TIMELINE)
    return figure


def times_figure(times: Sequence[StepTime], swaps: Sequence[int]) -> go.Figure:
    """Draws the durations of steps.

    Args:
        times: The durations, in order.
        swaps: The steps after which a plan took over.
    """
    plotly = _plotly()
    figure = plotly.graph_objects.Figure()
    usual = sorted(one.seconds for one in times if not one.compiled) or [one.seconds for one in times]
    most = 2.5 * usual[len(usual) // 2] * 1e3
    for name, color, chosen in (
        ("step", "#4c6a92", [one for one in times if not one.compiled]),
        ("with compilation", "#e2a14a", [one for one in times if one.compiled]),
    ):
        if chosen:
            figure.add_trace(
                plotly.graph_objects.Scatter(
                    x=[one.step for one in chosen],
                    y=[min(one.seconds * 1e3, most) for one in chosen],
                    customdata=[one.seconds * 1e3 for one in chosen],
                    name=name,
                    mode="markers",
                    marker={"color": color, "size": 5},
                    hovertemplate="step %{x}: %{customdata:.1f} ms<extra></extra>",
                )
            )
    for swap in swaps:
        figure.add_vline(
            x=swap + 0.5,
            line={"dash": "dash", "color": "#333", "width": 1},
            annotation_text="plan",
            annotation_position="bottom right",
        )
    figure.update_xaxes(title_text="optimizer step")
    figure.update_yaxes(title_text="milliseconds", range=[0, most * 1.05])
    _lay_out(figure, 260, 60, 40, 50, legend=_LEGEND)
    return figure


def scaling_figure(points: Sequence[ScalingPoint]) -> go.Figure:
    """Draws weak scaling as a step's duration, and strong scaling as a speed-up, over the number of ranks.

    Args:
        points: In order of their ranks.
    """
    plotly = _plotly()
    figure = plotly.subplots.make_subplots(rows=1, cols=2, subplot_titles=("weak scaling", "strong scaling"))
    ranks = [point.ranks for point in points]

    def add(name: str, values: Sequence[float], column: int, color: str, unit: str, dash: str = "solid") -> None:
        line = plotly.graph_objects.Scatter(
            x=ranks,
            y=values,
            name=name,
            mode="lines+markers" if dash == "solid" else "lines",
            line={"color": color, "dash": dash},
            hovertemplate=f"%{{x}} ranks: %{{y:.4g}} {unit}<extra>{name}</extra>",
        )
        figure.add_trace(line, row=1, col=column)

    add("step", [point.weak.seconds * 1e3 for point in points], 1, "#4c6a92", "ms")
    add("compute waits", [point.weak.exposed_seconds * 1e3 for point in points], 1, "#c8553d", "ms")
    add("speed-up", [point.speedup for point in points], 2, "#4c6a92", "times")
    add("ideal", [point.ideal for point in points], 2, _PLAIN, "times", dash="dash")
    figure.update_xaxes(type="log", title_text="ranks", tickvals=ranks, ticktext=[str(count) for count in ranks])
    figure.update_yaxes(title_text="milliseconds", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(type="log", title_text="times as fast as measured", row=1, col=2)
    _lay_out(figure, 380, 70, 50, 50)
    return figure
