"""A save that fails costs nothing: the checkpoint before it stays and is found, and no incomplete file does."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from multiprocess import run_ranks
from test_checkpoint import STEPS, fit, ours

from lightning_deepcompile.checkpoint.file import FileCheckpointIO
from lightning_deepcompile.checkpoint.location import find_kind
from lightning_deepcompile.checkpoint.sharded import save_sharded
from lightning_deepcompile.checkpoint.staging import staging_path

FAILS_AT = 3

# Arguments of the strategy and of ModelCheckpoint.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {"save_last": True}),
    "plugin": ({"checkpoint_io": AsyncCheckpointIO}, {"save_last": "link"}),
    "sharded": ({"state_dict_type": "sharded"}, {"save_last": True}),
    "async_link": ({"state_dict_type": "sharded", "async_save": True}, {"save_last": "link"}),
}
RESUMED = ["async_link"]
if "TEST_ALL" in os.environ:
    RUNS["async"] = {"state_dict_type": "sharded", "async_save": True}, {}
    RUNS["async_last"] = {"state_dict_type": "sharded", "async_save": True}, {"save_last": True}
    RESUMED += ["plugin", "async"]


class NoRoom(pl.Callback):
    """Limits the size of files of one rank to a few bytes from one step on, as on a full disk."""

    def __init__(self, rank: int, step: int, before: Path) -> None:
        self.rank, self.step, self.whole = rank, step, before
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step + 1 == self.step:
            trainer.strategy._checkpoints.finish()
            while self.whole.is_symlink() or not self.whole.exists():  # Lightning's plugin writes it
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, self.before[1]))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("lightning_deepcompile").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _run(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    messages = Messages()
    losses = fit(ours())[0].losses
    for name, (options, saving) in RUNS.items():
        options = {key: value() if isinstance(value, type) else value for key, value in options.items()}
        kind = options.pop("state_dict_type", "full")
        room = NoRoom(0 if kind == "full" else 1, FAILS_AT, folder / name / f"step={FAILS_AT - 1}.ckpt")
        checkpoints = ModelCheckpoint(folder / name, "{step}", every_n_train_steps=1, **saving)
        messages.texts.clear()
        with pytest.raises(Exception, match="it needs .* and .* are free") as raised:
            fit(ours(kind, **options), room, checkpoints)
        room.lift()
        text = str(raised.value)
        # Lightning's plugin raises the error of a save when the next one begins, or the run ends.
        failed = range(FAILS_AT, STEPS) if name == "plugin" else [FAILS_AT]
        assert "File too large" in text and any(f"step={step}.ckpt" in text for step in failed), text
        assert "\n" not in text and "Traceback" not in text
        torch.distributed.barrier()
        left = {path.name for path in (folder / name).iterdir()}
        expected = {f"step={FAILS_AT - 1}.ckpt"} | ({"last.ckpt"} if "save_last" in saving else set())
        if saving.get("save_last") == "link":
            # Lightning's link leads to the checkpoint that is whole.
            left -= {f"step={step}.ckpt" for step in failed}
            assert (folder / name / "last.ckpt").resolve() == folder / name / f"step={FAILS_AT - 1}.ckpt"
        assert left == expected, name
        if rank == 0 and name not in ("full", "sharded"):
            kept = [text for text in messages.texts if "is kept" in text]
            assert [f"step={FAILS_AT - 1}.ckpt" in text for text in kept] == [True], (name, messages.texts)
        torch.distributed.barrier()
        if name in RESUMED:
            again = ModelCheckpoint(folder / name, "{step}", save_last=True)
            resumed = fit(ours(kind), again, resume="last" if saving else folder / name / f"step={FAILS_AT - 1}.ckpt")
            assert resumed[0].losses == losses[FAILS_AT - 1 :], name
    assert len(losses) == STEPS


@pytest.mark.timeout(300)
def test_a_save_without_room_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    run_ranks(_run, 2, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("remote", [True, False])
def test_what_a_failed_save_wrote_is_removed(tmp_path: Path, remote: bool) -> None:
    path = f"memory://{tmp_path.name}/a.ckpt" if remote else str(tmp_path / "a.ckpt")
    save_sharded({"state_dict": {"weight": torch.ones(3)}}, path, is_global_zero=True)
    bad = {"state_dict": {"weight": torch.ones(3), "extra": lambda: 0}}
    with pytest.raises(RuntimeError, match=r"a\.ckpt' failed on rank 0: .*lambda") as raised:
        save_sharded(bad, path, is_global_zero=True)
    assert "\n" not in str(raised.value)
    assert find_kind(path) == "sharded"  # the old one
    assert remote or [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
    with pytest.raises(Exception, match="lambda"):
        FileCheckpointIO().save_checkpoint(bad, tmp_path / "b.ckpt")
    assert not (tmp_path / "b.ckpt").exists() and not list(tmp_path.glob(".*"))


def test_after_a_failed_save_later_ones_are_followed_by_removals(tmp_path: Path) -> None:
    io, paths = FileCheckpointIO(), [tmp_path / f"{number}.ckpt" for number in range(4)]
    io.save_checkpoint({"weight": torch.ones(3)}, paths[0])
    with pytest.raises(Exception, match="lambda"):
        io.save_checkpoint({"extra": lambda: 0}, paths[1])
    io.remove_after(2, paths[0])
    assert paths[0].exists()
    io.save_checkpoint({"weight": torch.ones(3)}, paths[2])
    io.remove_after(4, paths[2])
    io.save_checkpoint({"weight": torch.ones(3)}, paths[3])
    assert [path.exists() for path in paths] == [True, False, False, True]


def _staged_by(folder: Path, process: int, *, elsewhere: bool = False) -> Path:
    """A file that a save of a process would write, on this host or on another one."""
    digest, writer, suffix = staging_path(folder / "a.ckpt").name.lstrip(".").split(".")
    host, _, random = writer.split("-")
    number = f"{process:x}".translate(str.maketrans("0123456789abcdef", "abcdefghijklmnop"))
    path = folder / f".{digest}.{host[::-1] if elsewhere else host}-{number}-{random}.{suffix}"
    path.mkdir()
    (path / "__0_0.distcp").touch()
    return path


def test_a_save_leaves_alone_what_other_jobs_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive = _staged_by(tmp_path, ended.pid), _staged_by(tmp_path, os.getppid())
    elsewhere = _staged_by(tmp_path, ended.pid, elsewhere=True)
    users = tmp_path / ".notes.saving"
    users.mkdir()
    FileCheckpointIO().save_checkpoint({"epoch": 1}, tmp_path / "b.ckpt")
    assert not dead.exists()
    assert alive.exists() and elsewhere.exists() and users.exists()
    # Other hosts' processes are not seen: what does not change for an hour is of none.
    later = time.time() + 3700
    monkeypatch.setattr(time, "time", lambda: later)
    FileCheckpointIO().save_checkpoint({"epoch": 1}, tmp_path / "b.ckpt")
    assert not elsewhere.exists() and alive.exists() and users.exists()
