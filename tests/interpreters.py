"""Runs a fresh interpreter that sees this checkout as if it were installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def declare_entry_points(folder: Path) -> Path:
    """Writes the metadata from which Python knows the entry points of pyproject.toml; returns `folder`."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    info = folder / "lightning_deepcompile-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-deepcompile\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def clean_environment() -> dict[str, str]:
    """The environment without what torchrun, SLURM, or a Trainer that ran in this process tells child processes."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "NODE_RANK", "GROUP_RANK", "TORCHELASTIC_", "SLURM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def python_path(*first: Path) -> str:
    """The import path of a child process: `first`, this checkout, and this process's own path."""
    return os.pathsep.join(filter(None, (*map(str, first), str(ROOT), os.environ.get("PYTHONPATH"))))


def run_python(*arguments: str, paths: tuple[Path, ...] = (), autoload: bool = True, timeout: float = 280) -> str:
    """Runs Python on `arguments` in this checkout; returns what it printed and fails if it fails.

    Args:
        arguments: What follows `python` on the command line.
        paths: Folders to import from before this checkout.
        autoload: Whether torch may load the entry points of installed packages.
        timeout: Seconds.
    """
    env = clean_environment()
    env.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    env["PYTHONPATH"] = python_path(*paths)
    if not autoload:
        env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = subprocess.run(
        [sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
