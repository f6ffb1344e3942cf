"""A process that is killed while it saves leaves the old checkpoint or the new one, and nothing else that looks whole.

A child process is killed at its first operation on the file system, then at its second, and so on to the last.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_deepcompile.checkpoint import staging
from lightning_deepcompile.checkpoint.file import FileCheckpointIO
from lightning_deepcompile.checkpoint.location import find_kind
from lightning_deepcompile.checkpoint.sharded import ShardedCheckpoint, save_sharded
from lightning_deepcompile.checkpoint.staging import remove, resolve

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


def _checkpoint(value: float) -> dict[str, Any]:
    state = {"weight": torch.full((4, 3), value), "bias": torch.full((4,), value)}
    return {
        "state_dict": state,
        "optimizer_states": [{"state": {"weight": {"exp_avg": state["weight"]}}}],
        "epoch": value,
    }


def _save_sharded(path: Path, value: float) -> None:
    save_sharded(_checkpoint(value), path, is_global_zero=True)


def _save_full(path: Path, value: float) -> None:
    FileCheckpointIO().save_checkpoint(_checkpoint(value), path)


def _read(path: Path) -> float | None:
    """The value that all parts of the checkpoint agree on; None if there is none."""
    found = resolve(path)
    kind = find_kind(found)
    if kind == "file":
        checkpoint = FileCheckpointIO().load_checkpoint(found)
    elif kind == "sharded":
        checkpoint = ShardedCheckpoint.open(found, None).load(None, lambda name, shape: False, with_optimizers=True)
    else:
        return None
    values = [*checkpoint["state_dict"].values(), checkpoint["optimizer_states"][0]["state"]["weight"]["exp_avg"]]
    distinct = {float(v) for value in values for v in value.flatten()} | {checkpoint["epoch"]}
    assert len(distinct) == 1
    return distinct.pop()


def _killed_at(number: int, action: Callable[[], None], root: Path) -> bool:
    """Runs `action` in a child that kills itself before its `number`-th operation below `root`; whether it did."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            if event in EVENTS and str(args[0]).startswith(str(root)):
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.fixture(params=[True, False], ids=["exchange", "renames"])
def exchanges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if the file system can exchange two paths in one step, which NFS cannot."""
    if not request.param:
        monkeypatch.setattr(staging, "exchange_paths", lambda one, other: False)
    return request.param


@pytest.mark.filterwarnings("ignore")  # forking a threaded process; saving without a process group
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_save_full, _save_full),
        (_save_sharded, _save_sharded),
        (_save_full, _save_sharded),
        (_save_sharded, _save_full),
    ],
)
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new(
    tmp_path: Path, exchanges: bool, first: Callable[[Path, float], None], second: Callable[[Path, float], None]
) -> None:
    path = tmp_path / "last.ckpt"
    seen = set()
    for number in range(1, 200):
        remove(path)
        first(path, 1.0)
        directories = first is second is _save_sharded
        if directories:
            (path / "notes.txt").write_text("mine")
        killed = _killed_at(number, lambda: second(path, 2.0), tmp_path)
        value = _read(path)
        seen.add(value)
        assert value in ((1.0, 2.0) if killed else (2.0,))
        # Also by Lightning's search for the last checkpoint, and without a moment without one.
        visible = [p for p in tmp_path.iterdir() if p.name.startswith("last") and p.suffix == ".ckpt"]
        assert _read(max(visible, key=lambda p: p.stat().st_mtime_ns)) in (1.0, 2.0)
        assert all(resolve(p) == p for p in visible)
        assert path in visible or not (exchanges or first is second is _save_full)
        # Whatever is left over, saving again works, also elsewhere in the folder, and leaves nothing behind.
        second(tmp_path / "other.ckpt", 4.0)
        assert path.exists() and _read(path) == value
        remove(tmp_path / "other.ckpt")
        second(path, 3.0)
        assert _read(path) == 3.0
        assert list(tmp_path.iterdir()) == [path]
        assert all(resolve(p) == path for p in visible)  # also a name that was found in the middle of a save
        assert not directories or (path / "notes.txt").exists()
        if not killed:
            break
    assert number > 3 and seen == {1.0, 2.0}


@pytest.mark.filterwarnings("ignore")
def test_a_killed_removal_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for number in range(1, 20):
        _save_sharded(path, 1.0)
        killed = _killed_at(number, lambda: remove(path), tmp_path)
        assert _read(path) in (1.0, None)
        remove(path)
        assert not list(tmp_path.iterdir())
        if not killed:
            break
    assert number > 3


@pytest.mark.filterwarnings("ignore")
def test_a_directory_of_the_user_keeps_its_files(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    _save_sharded(path, 1.0)
    assert (path / "notes.txt").read_text() == "mine"
    assert _read(path) == 1.0
