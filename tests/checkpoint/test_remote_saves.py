"""Checkpoints in remote stores: whatever operation of a save fails, the old one or the new one loads."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from multiprocess import RankError, run_ranks

from lightning_deepcompile.checkpoint.file import FileCheckpointIO
from lightning_deepcompile.checkpoint.location import META, find_kind, fingerprint, local_path
from lightning_deepcompile.checkpoint.sharded import ShardedCheckpoint, save_sharded
from lightning_deepcompile.checkpoint.staging import remove, resolve, set_aside

ROOT = "LIGHTNING_DEEPCOMPILE_TEST_STORE"


class Unreliable(MemoryFileSystem):
    """A store that refuses one change, or all from some moment on, as if its process had been killed there."""

    protocol = "unreliable"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    changes, fails_at, for_good = 0, -1, False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(os.fspath(path).replace("unreliable://", "memory://"))

    def _change(self) -> None:
        cls = type(self)
        cls.changes += 1
        if cls.changes == cls.fails_at or (cls.for_good and cls.changes > cls.fails_at > 0):
            raise OSError(f"change {cls.changes} is refused")

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if mode != "rb":
            self._change()
        return super()._open(path, mode, *args, **kwargs)

    def cp_file(self, *args: Any, **kwargs: Any) -> None:
        self._change()
        super().cp_file(*args, **kwargs)

    def _rm(self, path: str) -> None:
        self._change()
        super()._rm(path)


class Shared(DirFileSystem):
    """A folder of this machine as a remote store, which several processes reach."""

    protocol = "shared"
    cachable = False  # each test has a folder of its own

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(os.environ[ROOT], LocalFileSystem())


fsspec.register_implementation("unreliable", Unreliable, clobber=True)
fsspec.register_implementation("shared", Shared, clobber=True)


def _checkpoint(value: float) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((4, 3), value)}, "epoch": value}


def _sharded(path: Any, value: float) -> None:
    save_sharded(_checkpoint(value), path, is_global_zero=True)


def _file(path: Any, value: float) -> None:
    with set_aside(path) if find_kind(path) == "sharded" else open(os.devnull):
        FileCheckpointIO().save_checkpoint(_checkpoint(value), path)


def _without_folder(path: Any, value: float) -> None:
    """Writes a checkpoint as ``aws s3 cp --recursive`` copies a local one."""
    _sharded(path, value)
    fs = Unreliable()
    (folder,) = [entry for entry in fs.ls(path, detail=False) if "save-" in entry]
    fs.rm(f"{path}/{META}")
    for file in fs.ls(folder, detail=False):
        fs.mv(file, f"{path}/{os.path.basename(file)}")
    fs.rm(folder, recursive=True)
    assert sorted(map(os.path.basename, fs.ls(path, detail=False))) == [".metadata", "__0_0.distcp", META]


def _read(path: Any) -> float:
    path = resolve(path)
    if find_kind(path) == "file":
        checkpoint = FileCheckpointIO().load_checkpoint(path)
    else:
        checkpoint = ShardedCheckpoint.open(path, None).load(None, lambda name, shape: False, with_optimizers=False)
    assert checkpoint["state_dict"]["weight"].unique().tolist() == [checkpoint["epoch"]]
    return checkpoint["epoch"]


@pytest.fixture
def unreliable() -> Iterator[type[Unreliable]]:
    Unreliable.fails_at, Unreliable.for_good = -1, False
    yield Unreliable
    Unreliable.store.clear()
    Unreliable.pseudo_dirs[:] = [""]


Save = Callable[[Any, float], None]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize(
    ("old", "new"),
    [(_sharded, _sharded), (_without_folder, _sharded), (_file, _sharded), (_sharded, _file), (_file, _file)],
)
def test_the_old_or_the_new_one_loads_whatever_fails(
    unreliable: type[Unreliable], old: Save, new: Save, for_good: bool
) -> None:
    number, failed = 0, True
    while failed:
        path = f"unreliable://checkpoints/{number}/last.ckpt"
        unreliable.fails_at, unreliable.changes = -1, 0
        old(path, 1.0)
        before = fingerprint(path)
        number += 1
        unreliable.changes, unreliable.fails_at, unreliable.for_good = 0, number, for_good
        try:
            new(path, 2.0)
            failed = unreliable.changes >= number  # it was worth a warning only
            assert _read(path) == 2.0 and fingerprint(path) not in ("", before)
        except (OSError, RuntimeError) as error:
            assert "is refused" in str(error)
            assert _read(path) in (1.0, 2.0)
        unreliable.fails_at = -1
        if new is _file and find_kind(path) == "directory":  # as the strategy refuses to replace one
            remove(path)
        new(path, 3.0)
        assert _read(path) == 3.0
        remove(path)
        assert find_kind(path) is None
    assert number > 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_was_before_is_removed_and_a_stray_name_refused(unreliable: type[Unreliable]) -> None:
    path, fs = "unreliable://checkpoints/last.ckpt", unreliable()
    fs.pipe_file(f"{path}/notes.txt", b"the user's")
    for value in (1.0, 2.0):
        _sharded(path, value)
        names = [os.path.basename(name) for name in fs.ls(path, detail=False)]
        assert len(names) == 3 and {META, "notes.txt"} < set(names)
    fs.pipe_file(f"{path}/{META}", b'{"folder": "../elsewhere"}')
    with pytest.raises(ValueError, match=r"names '\.\./elsewhere'"):
        ShardedCheckpoint.open(path, None)


def _save_until_killed(moment: str | None, value: float) -> None:
    dist.init_process_group("gloo")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and moment is not None and moment in str(args[0]) and "w" in str(args[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    rank = dist.get_rank()
    if rank == (1 if moment == ".distcp" else 0):
        sys.addaudithook(hook)
    dist.barrier()
    state = {"state_dict": {f"weight{rank}": torch.full((4, 3), value) for rank in range(2)}, "epoch": value}
    assert local_path("shared://last.ckpt") is None
    save_sharded(state, "shared://last.ckpt", is_global_zero=rank == 0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_killed_rank_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path))

    def read() -> float:
        opened = ShardedCheckpoint.open("shared://last.ckpt", None)
        return opened.load(None, lambda name, shape: False, with_optimizers=False)["state_dict"]["weight1"][0, 0].item()

    run_ranks(_save_until_killed, 2, None, 1.0)
    for moment in (".distcp", META):
        with pytest.raises(RankError, match="exit code -9"):
            run_ranks(_save_until_killed, 2, moment, 2.0)
        assert read() == 1.0
    run_ranks(_save_until_killed, 2, None, 3.0)
    assert read() == 3.0
    assert len(list((tmp_path / "last.ckpt").iterdir())) == 2  # what the killed ones left is gone


def _save_again_and_again() -> int:
    """Saves with a process of its own for a job; returns how often what it read meanwhile was one checkpoint."""
    first, whole = 100.0 * int(os.environ["RANK"]), 0
    for number in range(20):
        _sharded("shared://last.ckpt", first + number)
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the other one has replaced it meanwhile
            _read("shared://last.ckpt")
            whole += 1
    return whole


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_jobs_do_not_mix_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path))
    assert all(run_ranks(_save_again_and_again, 2))
    assert _read("shared://last.ckpt") in (19.0, 119.0)
    _sharded("shared://last.ckpt", 1.0)
    assert _read("shared://last.ckpt") == 1.0 and len(list((tmp_path / "last.ckpt").iterdir())) == 2
