"""The runtime's micro-benchmark runs, and reports every part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "benchmarks" / "runtime.py"


def test_every_part_is_reported() -> None:
    options = ["--device", "cpu", "--world", "2", "--divide", "64", "--repeat", "2"]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.startswith("2 ranks on cpu, process_group, 9 parameters")
    assert [row[:24].strip() for row in rows] == [
        "gather of a layer",
        "reduction of a layer",
        "offload and reload",
        "prefetch_params_fused",
        "wait_allgather_fused",
        "release_params_fused",
    ]


def test_bad_arguments_are_refused() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--divide", "0"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and "--divide between 1 and 1024" in done.stderr
