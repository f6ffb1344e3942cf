"""The measured step of several ranks in reports and traces, what limits a step, and two reports side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from large_step import large_profile

from lightning_deepcompile.__main__ import main
from lightning_deepcompile.plan.costs import Link, Profile
from lightning_deepcompile.plan.limits import limits
from lightning_deepcompile.plan.measured import KINDS, MeasuredStep, StepTime, aligned
from lightning_deepcompile.report.page import page, write_page
from lightning_deepcompile.report.record import StepRecord
from lightning_deepcompile.report.trace import trace_text

LAYERS = 4


def measured(profile: Profile, slow: float = 1.5, launch: float = 0.0) -> MeasuredStep:
    """A step of two ranks: 1 ms for a wait, 2 ms for compute, of which rank 1 takes `slow` times as much.

    Args:
        profile: Of the step.
        slow: The factor.
        launch: Seconds for which the device waits where communication is launched.
    """
    seconds = {"wait": 0.001, "gather": launch, "reduce": launch}
    rows = {}
    for rank, factor in ((0, 1.0), (1, slow)):
        now, row = 0.01, []
        for schedule in profile.schedules:
            now += 0.005  # between programs
            row.append(now)
            for instruction in schedule.instructions:
                now += 0.002 * factor if instruction.op == "compute" else seconds.get(instruction.op, 0.0)
                row.append(now)
        rows[rank] = [*row, now + (0.004 if rank else 0.02), now + (0.004 if rank else 0.02) + 0.003]
    return MeasuredStep(profile.schedules, aligned(profile.schedules, rows), 2, planned=True)


def record(slow: float = 1.5, **fields: object) -> StepRecord:
    profile = large_profile(LAYERS, **fields)
    times = [StepTime(step, 0.5 if step == 1 else 0.1, step == 1) for step in range(1, 9)]
    operations = dict.fromkeys(profile.regions, 10**12)
    graphs = [("frame0.forward", "net.py:3 in f: print(x)", "Call to print.", ""), ("frame1.forward", "", "", "")]
    return StepRecord(
        profile,
        profile.schedules,
        facts={"model": "Net <b>"},
        measured=measured(profile, slow),
        times=times,
        operations=operations,
        peak=989e12,
        graphs=graphs,
    )


def test_the_pieces_of_a_rank_are_its_whole_step() -> None:
    step = measured(large_profile(LAYERS))
    blocks = 2 * (LAYERS + 2)
    for rank, factor in zip(step.ranks, (1.0, 1.5), strict=True):
        pieces = list(step.pieces(rank))
        assert pieces[0].start == pytest.approx(rank.begin) and pieces[-1].end == rank.end
        assert all(a.end == pytest.approx(b.start, abs=1e-6) for a, b in zip(pieces, pieces[1:], strict=False))
        parts = step.parts(rank)
        assert sum(parts.values()) == pytest.approx(rank.end - rank.begin, abs=1e-5)
        assert parts["compute"] == pytest.approx(blocks * 0.002 * factor)
        assert parts["waits for gathers"] == pytest.approx(blocks * 0.001)
        assert parts["between"] == pytest.approx(0.02) and parts["optimizer"] == pytest.approx(0.003)
        assert parts["waits for reductions"] == pytest.approx(0.004 if rank.rank else 0.02)
    assert step.skew() == pytest.approx(blocks * 0.001)
    first, second = step.ranks
    assert first.reduced == pytest.approx(second.reduced), "the last reduction ends on all ranks at once"


def test_where_communication_is_launched_the_device_waits_for_it() -> None:
    profile = large_profile(LAYERS)
    plain, late = measured(profile), measured(profile, launch=0.0005)
    for before, after in zip(plain.ranks, late.ranks, strict=True):
        more = {kind: late.parts(after)[kind] - seconds for kind, seconds in plain.parts(before).items()}
        gathers, reductions = (sum(len(s.at(op)) for s in profile.schedules) for op in ("gather", "reduce"))
        assert more.pop("waits for gathers") == pytest.approx(0.0005 * gathers)
        assert more.pop("waits for reductions") == pytest.approx(0.0005 * reductions)
        assert more == pytest.approx(dict.fromkeys(more, 0.0), abs=1e-6) and gathers and reductions


def test_a_step_is_limited_by_what_it_is_short_without() -> None:
    # Nothing but compute takes long.
    fast = large_profile(LAYERS, optimizer_seconds=1e-4, launch_seconds=0.0, unexplained_seconds=0.0)
    fast = replace(fast, gather=Link(1e-6, 1e14), reduce=Link(1e-6, 1e14))
    (only,) = limits(fast.schedules, fast)
    assert only.name == "compute" and str(only).startswith("limited by compute, ")
    for name, changes in (
        ("gathers", {"gather": Link(1e-3, 2e10)}),
        ("reductions", {"reduce": Link(1e-3, 2e10)}),
        ("the optimizer", {"optimizer_seconds": 1.0}),
        ("work outside of programs", {"unexplained_seconds": 1.0}),
    ):
        first, *_ = limits(fast.schedules, replace(fast, **changes))
        assert first.name == name and "; try " in str(first) and 0 < first.part < 1
    late = {key: replace(cost, host=0.1) for key, cost in fast.regions.items()}
    assert limits(fast.schedules, replace(fast, regions=late))[0].name == "the host"
    assert limits(fast.schedules, fast, skew_seconds=1.0)[0].name == "ragged ranks"


def test_no_cost_is_more_than_ranks_waited_for_it() -> None:
    slow = replace(large_profile(LAYERS, unexplained_seconds=1.0), gather=Link(1e-3, 2e9))
    assert limits(slow.schedules, slow)[0].name == "gathers"
    step = measured(slow)
    found = {one.name: one.seconds for one in limits(slow.schedules, slow, 5.0, step)}
    parts = [step.parts(rank) for rank in step.ranks]
    assert found["gathers"] == pytest.approx(max(one["waits for gathers"] for one in parts))
    assert found["work outside of programs"] == pytest.approx(max(one["between"] for one in parts))
    assert found["ragged ranks"] < 0.1
    usual = max(rank.end - rank.begin for rank in step.ranks) - max(one["between"] for one in parts)
    names = [one.name for one in limits(slow.schedules, slow, 5.0, step, usual)]
    assert "gathers" in names and "work outside of programs" not in names, "other steps did without"
    assert limits(slow.schedules, slow, 5.0, step, usual_seconds=1e-4)[0].part == 1, "no cost is more than the step"


def test_a_page_has_the_measured_step_before_the_simulated_one() -> None:
    pytest.importorskip("plotly")
    text = page(record())
    assert 0 < text.index("This step is limited by") < text.index('id="ranks"') < text.index('id="step"')
    assert "Net &lt;b&gt;" in text and "Net <b>" not in text
    assert all(f"<th class=n>{kind}</th>" in text for kind in KINDS)
    assert "net.py:3 in f: print(x)" in text and "Graphs were compiled in step 1" in text
    # 12 operations of 10^12 in 6 ms forward, and in 12 ms backward.
    assert "<td class=n>2000.0</td><td class=n>111.1 T</td><td class=n>11%</td>" in text
    assert 'name="viewport"' in text and "ranks-figure" in text and "times-figure" in text


def test_a_trace_has_a_process_for_each_measured_rank() -> None:
    rows = json.loads(trace_text(record()))["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert [names[pid] for pid in (2, 3)] == [f"measured step under the plan, rank {rank}" for rank in (0, 1)]
    for pid, factor in ((2, 1.0), (3, 1.5)):
        busy = sum(row["dur"] for row in rows if row["pid"] == pid and row.get("cat") == "compute")
        assert busy == pytest.approx(2 * (LAYERS + 2) * 2000 * factor, rel=1e-3)
    assert min(row["ts"] for row in rows if row["ph"] == "X" and row["pid"] > 1) == pytest.approx(0.0)


def test_two_reports_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: object) -> None:
    for name, step in (("a.html", 1.0), ("b.html", 0.75)):
        write_page(record(step_seconds=step), tmp_path / name)
    import sys

    monkeypatch.setattr(sys, "argv", ["", "report", "--compare", str(tmp_path / "a.html"), str(tmp_path / "b.html")])  # type: ignore[attr-defined]
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["a.html", "b.html", "change"]
    assert next(line for line in lines if line.startswith("measured step")).split()[2:] == [
        "1000.0", "ms", "750.0", "ms", "-25.0%",
    ]  # fmt: skip
    assert not any(line.startswith("model") for line in lines), "it is the same"
    (tmp_path / "b.html").write_text("<html></html>")
    with pytest.raises(SystemExit):
        main()
    assert "b.html is no report" in capsys.readouterr().err
