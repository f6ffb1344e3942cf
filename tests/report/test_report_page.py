"""Reports and traces of a step of 64 layers: what they say follows from the prediction, and a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from large_step import large_profile

from lightning_deepcompile.plan.costs import Labels
from lightning_deepcompile.plan.report import PassReport, Round
from lightning_deepcompile.report.memory import KINDS, memory_by_kind
from lightning_deepcompile.report.names import compress
from lightning_deepcompile.report.page import page, write_page
from lightning_deepcompile.report.record import StepRecord
from lightning_deepcompile.report.timeline import timeline
from lightning_deepcompile.report.trace import trace_text

LAYERS = 64


def made(**fields: object) -> StepRecord:
    """A record of a plan that was kept, with numbers of its own."""
    profile = large_profile(LAYERS, **fields)  # type: ignore[arg-type]
    passes = (
        PassReport("zero3 -> prefetch", "", 1.35, 0.2, 50 << 30),
        PassReport("unshard", "parameters kept for backward: 0 become 34", 1.3, 0.1, 64 << 30),
    )
    done = Round(5, passes, profile.budget, 1.35, 0.1, after_seconds=1.31, after_peak_bytes=63 << 30, outcome="kept")
    return StepRecord(profile, profile.schedules, (done,))


def test_names_of_neighbours_are_ranges() -> None:
    assert compress(["embed", "layers.0", "layers.1", "layers.2", "layers.4", "head"]) == (
        "embed, layers.0-2, layers.4, head"
    )


def test_the_timeline_has_every_transfer_and_region_with_its_block() -> None:
    record = made(micro_batches=3)
    prediction, profile = record.predict(), record.profile
    assert prediction is not None and profile is not None
    events = timeline(prediction, record.schedules, profile)
    lanes = Counter(event.lane for event in events)
    blocks = LAYERS + 2
    assert (lanes["program"], lanes["compute"], lanes["gather"]) == (6, 6 * blocks, 6 * blocks)
    assert (lanes["reduce"], lanes["optimizer"]) == (3 * blocks, 1)
    for lane, seconds in (("gather", prediction.gather_seconds), ("reduce", prediction.reduce_seconds)):
        assert sum(event.end - event.start for event in events if event.lane == lane) == pytest.approx(seconds)
    ran = [event for event in events if event.lane == "compute"]
    assert [event.name for event in ran[1:4]] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    gathered = {event.name: event for event in events[::-1] if event.lane == "gather"}
    assert gathered["model.layers.7"].end <= next(e.start for e in ran if e.name == "model.layers.7")
    short = record.shortened()
    assert short.profile is not None and short.profile.micro_batches == 2


def test_memory_by_kind_adds_up_to_what_is_predicted() -> None:
    record = made()
    prediction, profile = record.predict(), record.profile
    assert prediction is not None and profile is not None
    memory = memory_by_kind(prediction, record.schedules, profile)
    assert [sum(moment.sizes) for moment in memory[:-1]] == [point.bytes for point in prediction.memory]
    assert max(sum(moment.sizes) for moment in memory) == prediction.peak_bytes
    moments = [moment.seconds for moment in memory]
    assert moments == sorted(moments) and moments[-1] == max(span.end for span in prediction.spans)
    shown = dict(
        zip(KINDS, max(memory, key=lambda moment: moment.sizes[KINDS.index("activations")]).sizes, strict=True)
    )
    assert shown["shards"] == profile.resident.shards and shown["optimizer states"] == profile.resident.states
    assert shown["activations"] >= LAYERS * (300 << 20), "the last layer's come on top of all others'"
    # A CPU's allocator counts nothing: what is resident comes on top.
    alone = replace(profile, device_type="cpu")
    resident = profile.resident.shards + profile.resident.states
    prediction = replace(record, profile=alone).predict()
    assert prediction is not None
    memory = memory_by_kind(prediction, record.schedules, alone)
    assert max(sum(moment.sizes) for moment in memory) == prediction.peak_bytes + resident


def test_a_trace_is_what_perfetto_reads() -> None:
    record = made()
    prediction = record.predict()
    assert prediction is not None
    rows = json.loads(trace_text(record))["traceEvents"]
    threads = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    busy: Counter[str] = Counter()
    last: dict[int, float] = {}
    for row in (row for row in rows if row["ph"] == "X"):
        busy[threads[row["tid"]]] += row["dur"]
        assert row["ts"] >= last.get(row["tid"], 0.0) - 0.01, "one after another on each thread"
        last[row["tid"]] = row["ts"] + row["dur"]
    assert busy["compute"] + busy["optimizer"] == pytest.approx(prediction.compute_seconds * 1e6, rel=1e-3)
    assert busy["gather"] == pytest.approx(prediction.gather_seconds * 1e6, rel=1e-3)
    counted = [sum(row["args"].values()) for row in rows if row["ph"] == "C"]
    assert max(counted) == prediction.peak_bytes
    with pytest.raises(ValueError, match="no step was measured"):
        trace_text(StepRecord())


def test_a_page_without_a_measured_step_says_so() -> None:
    pytest.importorskip("plotly")
    text = page(StepRecord(programs={"frame0.forward": "gather <all>"}))
    assert "No step was measured" in text and "gather &lt;all&gt;" in text and "step-figure" not in text


def test_a_page_needs_no_network_and_escapes_names(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    record = made()
    assert record.profile is not None
    parameters = {**record.profile.labels.parameters, "3": "<script>alert()</script>"}
    odd = replace(record.profile, labels=Labels(parameters, {}))
    path = write_page(replace(record, profile=odd), tmp_path / "new" / "report.html")
    text = path.read_text()
    assert "<script>alert()" not in text
    head = text.partition("<script>")[0] + text.rpartition("</script></head>")[2]
    assert "http" not in head.replace("http://www.w3.org", "")
    assert "parameters kept for backward: 0 become 34" in text and "step -50.00 ms" in text
    assert "Keeps gathered parameters between a forward and its backward program." in text
    assert "-0.8%" in text, "1300 ms were predicted and 1310 measured"


def test_without_plotly_a_page_has_its_tables_and_says_what_charts_need(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    text = write_page(made(), tmp_path / "report.html").read_text()
    assert "pip install plotly" in text and "step-figure" not in text and "<script>" not in text
    assert "At the peak" in text and "parameters kept for backward: 0 become 34" in text


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def browse(*arguments: str) -> str:
    assert BROWSER is not None
    # Virtual time: the page's scripts have run to their end, however busy the machine is.
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000"]
    done = subprocess.run([BROWSER, *options, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome, and none is installed")
def test_a_browser_draws_the_charts(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    image = pytest.importorskip("PIL.Image")
    path = write_page(made(), tmp_path / "report.html").as_uri()
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    shown = re.sub(
        r"<script.*?</script>", "", browse("--dump-dom", "--window-size=1280,1400", offline, path), flags=re.S
    )
    blocks = LAYERS + 2
    # Compute and gathers of forward and backward, reductions, two programs, the optimizer, and launches.
    assert shown.count('class="point"') >= 5 * blocks + 3
    for text in ("frame0.backward", "optimizer states", "unshard", "budget 68.4 GiB"):
        assert f">{text}</text>" in shown, "charts are drawn with it"
    picture = tmp_path / "report.png"
    browse(f"--screenshot={picture}", "--window-size=1280,1400", offline, path)
    with image.open(picture) as opened:
        pixels = opened.convert("RGB")
    assert pixels.size == (1280, 1400)
    seen = {color: count for count, color in pixels.getcolors(1 << 24)}
    for kind, color in (("states", (0x7D, 0x9C, 0xC0)), ("activations", (0x7F, 0xB0, 0x69))):
        assert seen.get(color, 0) > 5000, f"{kind} fill an area of the memory chart"
    assert len(seen) > 200, "blocks have colours of their own"
