r"""Draws what compare.py measured: milliseconds per step, and how near each system comes to the roofline.

    python examples/benchmarks/plot.py results/results.json results/plot.png
    python examples/benchmarks/plot.py results/sweep.json results/sweep.png

compare.py and sweep.py do so themselves where matplotlib is installed. Several memory budgets make a curve.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLORS = ("#1b6ca8", "#e07b39", "#6a994e", "#a4508b", "#8d99ae", "#bc4749")


def can_draw() -> bool:
    """Returns whether matplotlib is installed; nothing else here needs it."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(results: Sequence[dict[str, Any]], path: Path, source: str = "") -> bool:
    """Writes a picture with a group of bars per case.

    Args:
        results: Results as in ``results.json``; those without numbers are left out.
        path: The file; its ending says which format.
        source: What the file says of its source.

    Returns:
        Whether there was anything to draw.
    """
    found = {(r["case"], r["system"]): r for r in results if r["status"] == "ok"}
    cases = list(dict.fromkeys(case for case, _ in found))
    systems = [s for s in dict.fromkeys(system for _, system in found) if s != "roofline"]
    if not systems:
        return False
    from matplotlib.figure import Figure

    bounds = {case: found[case, "roofline"]["ms"] for case in cases if (case, "roofline") in found}
    figure = Figure(figsize=(3 + 2.2 * len(cases), 7 if bounds else 4), layout="constrained")
    panels = figure.subplots(2 if bounds else 1, 1, sharex=True, squeeze=False)[:, 0]
    times = {key: result["ms"] for key, result in found.items()}
    _bars(panels[0], cases, systems, times, "ms per optimizer step (median)", "{:.0f}")
    for place, case in enumerate(cases):
        if case in bounds:
            panels[0].hlines(bounds[case], place - 0.45, place + 0.45, colors="black", linestyles="dashed")
    if bounds:
        panels[0].plot([], [], "k--", label="roofline")
        shares = {(case, system): bounds[case] / ms for (case, system), ms in times.items() if case in bounds}
        _bars(panels[1], cases, systems, shares, "fraction of the roofline", "{:.2f}")
        panels[1].set_ylim(0, 1.05)
    panels[0].margins(y=0.1)  # for the labels of the highest bars
    panels[0].legend(fontsize="small")
    panels[-1].set_xlabel("sequence length x micro-batch x micro-batches per step")
    _save(figure, path, source)
    return True


def draw_sweep(results: Sequence[dict[str, Any]], path: Path, source: str = "") -> bool:
    """Writes a picture of step time and peak memory, measured and predicted, over the settings of ``sweep.py``.

    If they are several memory budgets, it is a curve: step time over budgets, with peaks and states in host memory.

    Args:
        results: Results as in ``sweep.json``; those without numbers are left out.
        path: The file; its ending says which format.
        source: What the file says of its source.

    Returns:
        Whether there was anything to draw.
    """
    ran = [result for result in results if result["status"] == "ok"]
    if not ran:
        return False
    from matplotlib.figure import Figure

    if len({result["budget_gib"] for result in ran if result.get("budget_gib")}) > 1:
        figure = Figure(figsize=(8, 5), layout="constrained")
        _budgets(figure.subplots(), results)
        _save(figure, path, source)
        return True
    names = [result["system"] for result in ran]
    figure = Figure(figsize=(3 + 1.2 * len(ran), 7), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for panel, key, title in zip(
        panels, ("ms", "peak_gib"), ("ms per optimizer step", "peak GiB of the allocator"), strict=True
    ):
        panel.plot(names, [r.get(key) or math.nan for r in ran], "o-", color=COLORS[0], label="measured")
        predicted = [(r.get("predicted") or {}).get(key, math.nan) for r in ran]
        panel.plot(names, predicted, "x--", color=COLORS[1], label="predicted")
        panel.set_ylabel(title)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(fontsize="small")
    panels[1].tick_params(axis="x", rotation=30)
    _save(figure, path, source)
    return True


def states_away(result: dict[str, Any]) -> float | None:
    """The part of Adam's states, twice the shards, that waits in host memory; None if that is not known."""
    summary = result.get("summary") or {}
    states = 2 * summary.get("sharded_bytes_per_rank", 0)
    return summary.get("offloaded_bytes", 0) / states if states else None


def _budgets(panel: Any, results: Sequence[dict[str, Any]]) -> None:
    curve = sorted((r for r in results if r.get("budget_gib")), key=lambda r: r["budget_gib"])
    ran = [result for result in curve if result["status"] == "ok"]
    budgets = [result["budget_gib"] for result in ran]
    panel.plot(budgets, [result["ms"] for result in ran], "o-", color=COLORS[0], label="measured")
    predicted = [(result.get("predicted") or {}).get("ms", math.nan) for result in ran]
    panel.plot(budgets, predicted, "x--", color=COLORS[1], label="predicted")
    for number, result in enumerate(ran):  # budgets may lie close together: in turn above and below the curve
        peak, share = result.get("peak_gib"), states_away(result)
        lines = [] if peak is None else [f"peak {peak:.1f} GiB"]
        lines += [] if share is None else [f"{share:.0%} of states away"]
        place = result["budget_gib"], result["ms"]
        side: dict[str, Any] = {"xytext": (6, 8), "ha": "left", "va": "bottom"}
        if number % 2 == 0:
            side = {"xytext": (-6, -9), "ha": "right", "va": "top"}
        panel.annotate("\n".join(lines), place, textcoords="offset points", fontsize="x-small", **side)
    for number, result in enumerate(result for result in curve if result["status"] != "ok"):
        label = "does not fit" if number == 0 else None
        panel.axvline(result["budget_gib"], color=COLORS[5], linestyle="dotted", label=label)
    others = [result for result in results if result["status"] == "ok" and not result.get("budget_gib")]
    for result, color in zip(others, COLORS[2:], strict=False):
        panel.axhline(result["ms"], color=color, linestyle="dashed", label=result["system"])
    panel.set_xlabel("memory budget of each GPU in GiB")
    panel.set_ylabel("ms per optimizer step")
    panel.margins(0.1, 0.2)
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize="small")


def _save(figure: Any, path: Path, source: str) -> None:
    """Writes a picture in one piece, so that an interrupted run leaves the one before."""
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    figure.savefig(part, dpi=150, metadata={"Source": source})
    part.rename(path)


def _bars(
    panel: Any,
    cases: Sequence[str],
    systems: Sequence[str],
    values: dict[tuple[str, str], float],
    title: str,
    form: str,
) -> None:
    width = 0.9 / len(systems)
    for number, system in enumerate(systems):
        places = [place for place, case in enumerate(cases) if (case, system) in values]
        heights = [values[cases[place], system] for place in places]
        left = [place - 0.45 + (number + 0.5) * width for place in places]
        bars = panel.bar(left, heights, 0.95 * width, label=system, color=COLORS[number % len(COLORS)])
        panel.bar_label(bars, [form.format(height) for height in heights], fontsize="small")
    panel.set_xticks(range(len(cases)), cases)
    panel.set_ylabel(title)
    panel.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Draws a file of results; returns 0 if there was something to draw."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    if not can_draw():
        print("plot.py needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    source, target = map(Path, sys.argv[1:])
    results = json.loads(source.read_text())["results"]
    swept = any("budget_gib" in result for result in results)  # which sweep.py's results have
    if (draw_sweep if swept else draw)(results, target):
        return 0
    print(f"{source} has no numbers to draw", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
