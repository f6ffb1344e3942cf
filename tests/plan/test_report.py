"""`python -m lightning_deepcompile`: it matters most where the installation is broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_simulate import compute, gather, profile, reduce, release, schedule, wait

from lightning_deepcompile import __main__ as report


def _printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["lightning_deepcompile", *arguments])
    report.main()
    return capsys.readouterr().out


def test_json_holds_every_section(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    sections = json.loads(_printed(monkeypatch, capsys, "--json"))
    assert sections["versions"]["torch"]
    assert sections["extension"]["mode"] in ("cpu", "cuda")
    assert sections["communicators"]["process_group"] == "yes"
    assert sections["environment"]["NCCL_DEBUG"] == "WARN"


def test_a_missing_extension_is_reported_with_the_command_that_builds_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lightning_deepcompile._C", None)
    printed = _printed(monkeypatch, capsys)
    missing = printed.partition("\nmissing\n")[2]
    assert "C++ runtime does not load" in missing
    assert "setup.py build_ext --inplace" in missing or "pip install" in missing
    assert "no: the extension is not usable" in printed


def test_a_missing_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    sections = report.collect()
    assert 'pip install "torch' in sections["missing"][0]
    assert report.render(sections)


def test_switched_off_autoload_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert any("TORCH_DEVICE_BACKEND_AUTOLOAD" in sentence for sentence in report.collect()["missing"])


def test_a_profile_is_planned_for_other_ranks_links_and_budgets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parts = [(gather(k), wait(k), compute(k, k), release(k)) for k in range(3)]
    step = [schedule(kind, *(i for part in parts for i in part)) for kind in ("forward", "backward")]
    path = tmp_path / "profile.json"
    path.write_text(profile(step).to_json())
    plain = _printed(monkeypatch, capsys, "simulate", str(path), "--passes", "zero3,prefetch")
    assert "2 ranks" in plain and "zero3 -> prefetch  12000.0 ms" in plain
    planned = _printed(monkeypatch, capsys, "simulate", str(path))
    assert "parameters kept for backward: 0 become" in planned and "needs at least" in planned
    tight = _printed(monkeypatch, capsys, "simulate", str(path), "--budget", "1566")
    assert "kept for backward" not in tight
    wide = _printed(monkeypatch, capsys, "simulate", str(path), "--world", "64", "--bandwidth", "1000")
    assert "64 ranks" in wide and "1000.00 GB/s" in wide and "6000.0 ms" in wide
    roomy = _printed(monkeypatch, capsys, "simulate", str(path), "--offload-activations", "auto")
    assert "offload_activation" in roomy and "activations in host memory" not in roomy
    path.write_text(profile([*step, schedule("backward", reduce(0))], micro_batches=2, hold_seconds=0.0).to_json())
    every, late, auto = (
        _printed(monkeypatch, capsys, "simulate", str(path), "--passes", "zero3,reduce_late", "--reduce", when)
        for when in ("every", "boundary", "auto")
    )
    first = [next(line for line in text.splitlines() if "zero3" in line).split()[1] for text in (every, late, auto)]
    assert first == ["28000.0", "26000.0", "28000.0"]
    assert "26000.0 ms" in auto and "gradients reduced at the boundary: 0 become 1" in auto
    wrong = [
        ["--reduce", "auto"],
        ["--copy-bandwidth", "-1"],
        ["--offload-activations", "some"],
        ["--world", "0"],
        ["--bandwidth", "-1"],
    ]
    path.write_text(profile(step).to_json())
    for arguments in (*wrong, ["--budget", "much"], ["--passes", "zero9"]):
        with pytest.raises(SystemExit):
            _printed(monkeypatch, capsys, "simulate", str(path), *arguments)
