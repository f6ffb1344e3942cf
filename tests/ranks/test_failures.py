"""The output of a failed training on the screen."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from cases import train
from interpreters import clean_environment, python_path
from multiprocess import RankError, run_ranks
from test_handover import Small

from lightning_deepcompile.ranks.failures import Failures


@pytest.mark.parametrize(
    "ranks", [*(pytest.param(ranks, marks=pytest.mark.extensive) for ranks in ("01", "1")), "01,0"]
)
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
    if ranks != "1":
        assert (
            place == len(printed) - 1 and "[rank1]: ValueError: As on rank 0, which prints it in full: mine" in printed
        )
    else:
        assert "Rank 0 was left alone" in printed[-1] and "rank 1: ValueError: mine" in printed[-1]


class _Sleeps(pl.Callback):
    """The host of the last rank is somewhere else for a while."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and os.environ["RANK"] == "2":
            time.sleep(9)


def _late(prefix: str) -> str:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = prefix
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    config = CompileConfig(region_backend="eager", schedule=None)
    strategy = DeepCompileStrategy(compile=config, timeout=timedelta(seconds=5))
    with pytest.raises(RuntimeError) as raised:
        train(Small, strategy, world_size=3, rank=int(os.environ["RANK"]), callbacks=[_Sleeps()])
    if os.environ["RANK"] == "0":
        time.sleep(10)  # it keeps the store
    return str(raised.value)


def test_a_rank_that_is_late_is_named(tmp_path: Path) -> None:
    first, second, _ = run_ranks(_late, 3, f"{tmp_path}/fr_", timeout=60)
    for message in (first, second):
        assert "Rank 2 has not failed and said nothing since: late, hanging or dead." in message, message
    # All have completed the same gathers, and hosts wait for each other: PyTorch's own tool finds nothing amiss there.
    records = [Path(tmp_path, f"fr_deepcompile_{rank}") for rank in range(3)]
    known = [pickle.loads(record.read_bytes()) for record in records]
    for record in known:
        assert {entry["state"] for entry in record["entries"]} == {"completed"}, record["pg_status"]
        assert "one_row" in record["entries"][-1]["frames"][0]["name"]
    assert "missing ranks" not in _analysed(tmp_path)
    # It would have named a rank that had not launched the last one.
    known[2]["entries"].pop()
    for path, record in zip(records, known, strict=True):
        if path != records[2]:
            record["entries"][-1]["state"] = "started"
        path.write_bytes(pickle.dumps(record))
    assert "missing ranks: {2}" in _analysed(tmp_path)


def _analysed(folder: Path) -> str:
    analyser = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    done = subprocess.run([*analyser, "--prefix", "fr_deepcompile_"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


class _Dies(pl.Callback):
    """The system kills the last rank."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _killed() -> None:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager", schedule=None))
    train(Small, strategy, world_size=2, rank=int(os.environ["RANK"]), callbacks=[_Dies()])


def test_a_rank_that_was_killed_is_named_first() -> None:
    with pytest.raises(RankError, match=r"Error: Rank 1 has gone \(killed, or out of host memory\?\)"):
        run_ranks(_killed, 2, timeout=60)


def _fails(failures: Failures, error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        failures.note_cause(caught)
        return caught


def test_the_place_of_a_rank_that_was_left_alone_stays_unless_another_one_failed_by_itself() -> None:
    for first, stays in ((RuntimeError("gloo: timed out"), True), (ValueError("mine"), False)):
        store = dist.HashStore()
        ranks = [Failures(store, rank, 2, "test") for rank in range(2)]
        store.set("test/failure/1", "")  # it is not silent
        _fails(ranks[0], first)
        alone = _fails(ranks[1], RuntimeError("gloo: timed out"))
        assert "Rank 1 was left alone" in str(alone) and (alone.__traceback__ is not None) is stays
