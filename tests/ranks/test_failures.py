"""What a failed training leaves on the screen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import clean_environment, python_path


@pytest.mark.parametrize("ranks", ["01", "1"])
def test_a_users_own_error_is_what_is_read_last(ranks: str) -> None:
    script = Path(__file__).resolve().parents[1] / "failing.py"
    done = subprocess.run(
        [sys.executable, str(script), ranks], env={**clean_environment(), "PYTHONPATH": python_path()},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    printed = lines[next(index for index, line in enumerate(lines) if "Traceback" in line) :]
    assert done.returncode == 1 and len(printed) <= 16, done.stderr
    # Once in full, also where all ranks fail alike.
    assert done.stderr.count("Traceback") == 2 and done.stderr.count('raise ValueError("mine")') == 1
    place = printed.index(f"[rank{ranks[0]}]: ValueError: mine")
    assert printed[place - 1] == f'[rank{ranks[0]}]:     raise ValueError("mine")'
    if ranks == "01":
        assert (
            place == len(printed) - 1 and "[rank1]: ValueError: As on rank 0, which prints it in full: mine" in printed
        )
    else:
        assert "Rank 0 was left alone" in printed[-1] and "rank 1: ValueError: mine" in printed[-1]
