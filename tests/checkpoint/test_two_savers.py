"""Two jobs that save to one path, as a requeued one and its predecessor do, while a third loads from it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from multiprocess import run_ranks
from test_checkpoint import fit, ours

from lightning_deepcompile.checkpoint.file import FileCheckpointIO
from lightning_deepcompile.checkpoint.location import META
from lightning_deepcompile.checkpoint.sharded import save_sharded

SECONDS = 4.0


def _checkpoint(value: float, sharded: bool) -> dict[str, Any]:
    state = {f"weight{i}": torch.full((200, 50), value) for i in range(8)}
    moments = {"state": {name: {"exp_avg": tensor} for name, tensor in state.items()}, "param_groups": []}
    return {"state_dict": state, "optimizer_states": [moments], "epoch": value, "pytorch-lightning_version": "2.6"}


def _save(path: Path, number: int, pause: float) -> int:
    """Saves until time is over, full and sharded or only sharded; returns how often."""
    io, saves, end = FileCheckpointIO(), 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        checkpoint = _checkpoint(number + 2.0 * saves, True)
        if path.name == "mixed.ckpt" and saves % 3 == number:
            io.save_checkpoint(checkpoint, path)
        else:
            save_sharded(checkpoint, path, is_global_zero=True)
        saves += 1
        time.sleep(pause)
    return saves


def _look(path: Path, done: threading.Event) -> int:
    looks = 0
    while not done.is_set():
        assert os.path.lexists(path)
        looks += 1
        time.sleep(0.0005)
    return looks


def _job(folder: Path) -> int:
    rank = int(os.environ["RANK"])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    path = folder / "last.ckpt"
    if rank < 2:
        saves = _save(folder / "mixed.ckpt", rank, 0.0)  # as fast as it goes
        return saves + _save(path, rank, 0.7)
    # Readers see one checkpoint or the other.
    _, trainer = fit(ours())
    while not path.exists():
        time.sleep(0.01)
    loads, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            checkpoint = trainer.strategy.load_checkpoint(path)
        except RuntimeError as error:  # loading takes longer than saving where there is much to do
            assert "it was replaced while it was read" in str(error)
            continue
        values = [*checkpoint["state_dict"].values()]
        values += [state["exp_avg"] for state in checkpoint["optimizer_states"][0]["state"].values()]
        seen = {float(v) for value in values for v in torch.unique(getattr(value, "_local_tensor", value))}
        assert seen == {checkpoint["epoch"]} and len(values) == 16
        loads += 1
    return loads


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_jobs_save_to_one_path(tmp_path: Path) -> None:
    for name in ("last.ckpt", "mixed.ckpt"):
        save_sharded(_checkpoint(0.0, True), tmp_path / name, is_global_zero=True)
    done = threading.Event()
    counts: list[int] = []
    failures: list[BaseException] = []

    def look(path: Path) -> None:
        try:
            counts.append(_look(path, done))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look, args=(tmp_path / name,)) for name in ("last.ckpt", "mixed.ckpt")]
    for thread in threads:
        thread.start()
    try:
        saves = run_ranks(_job, 3, tmp_path)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures, "there was a moment without a checkpoint"
    assert min(saves) > 0 and min(counts) > 100, (saves, counts)
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "mixed.ckpt"}
    assert {path.name for path in (tmp_path / "last.ckpt").iterdir()} == {".metadata", META, "__0_0.distcp"}
