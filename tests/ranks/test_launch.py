"""Scripts as users run them: started by Lightning or by torchrun; a failure of any rank ends all of them, soon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cases import train
from interpreters import clean_environment, declare_entry_points, python_path
from multiprocess import _free_port, run_ranks
from test_handover import Small

from lightning_deepcompile import CompileConfig, DeepCompileStrategy

SCRIPT = """
import os, sys
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 3)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def on_train_start(self):
        sys.stdout.write(f"rank {self.global_rank} has {torch.get_num_threads()} threads\\n")
        sys.stdout.flush()

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2 and str(self.global_rank) == os.environ["FAILING_RANK"]:
            open("failed", "w").close()
            if os.environ["FAILURE"] == "exception":
                raise ArithmeticError("this rank gives up")
            os.kill(os.getpid(), 9)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    trainer = pl.Trainer(strategy="deepcompile", accelerator="cpu", devices=2, max_epochs=1, logger=False,
                         num_nodes=int(os.environ.get("NODES", "1")),
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.strategy.compile.region_backend = "eager"
    trainer.fit(Model(), DataLoader(torch.randn(64, 5), batch_size=4))
    # One write each: an unbuffered print of several parts mixes with the other rank's.
    sys.stdout.write(f"{type(trainer.strategy.cluster_environment).__name__} started these processes\\n")
    sys.stdout.write(f"rank {trainer.global_rank} of {trainer.world_size} is done\\n")
    sys.stdout.flush()
"""


def run_script(
    folder: Path, *launcher: str, failing: str, failure: str = "exception", threads: str = "1", **variables: str
) -> tuple[int, str, float]:
    """Runs the script, with `threads` for OpenMP ("": not said) and more environment `variables`.

    Returns:
        Its exit code, what all its processes printed, and the seconds from its failure to its end.
    """
    script = folder / "train.py"
    script.write_text(SCRIPT)
    metadata = folder / "metadata"
    metadata.mkdir()
    env = clean_environment() | {"FAILING_RANK": failing, "FAILURE": failure, "OMP_NUM_THREADS": threads} | variables
    if not threads:
        del env["OMP_NUM_THREADS"]
    env["PYTHONPATH"] = python_path(declare_entry_points(metadata))
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], env=env, cwd=folder, capture_output=True, text=True, timeout=180
    )
    failed = folder / "failed"
    seconds = time.time() - failed.stat().st_mtime if failed.exists() else 0.0
    return done.returncode, done.stdout + done.stderr, seconds


# Standalone: a port and an id of its own. By default all launches meet at one port, related or not.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.extensive
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_torchrun_trains(tmp_path: Path) -> None:
    code, output, _ = run_script(tmp_path, *TORCHRUN, failing="none")
    assert code == 0, output
    assert "rank 0 of 2 is done" in output and "rank 1 of 2 is done" in output


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("launcher", "failing"),
    [
        ((), "0"),
        pytest.param((), "1", marks=pytest.mark.extensive),
        pytest.param(TORCHRUN, "1", marks=pytest.mark.extensive),
    ],
    ids=["lightning-0", "lightning-1", "torchrun-1"],
)
def test_an_exception_ends_all_ranks(tmp_path: Path, launcher: tuple[str, ...], failing: str) -> None:
    code, output, seconds = run_script(tmp_path, *launcher, failing=failing, threads="")
    assert code != 0 and "this rank gives up" in output, output
    threads = re.findall(r"rank \d has (\d+) threads", output)
    assert len(threads) == 2 and threads[0] == threads[1]
    assert int(threads[0]) == (1 if launcher else max(len(os.sched_getaffinity(0)) // 2, 1))  # torchrun says 1
    assert "is done" not in output
    assert 0 < seconds < 45


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_rank_ends_the_other(tmp_path: Path) -> None:
    code, output, seconds = run_script(tmp_path, *TORCHRUN, failing="0", failure="kill")
    assert code != 0 and "is done" not in output, output
    assert 0 < seconds < 45


@pytest.mark.slow
@pytest.mark.extensive
@pytest.mark.timeout(240)
def test_two_nodes_train(tmp_path: Path) -> None:
    """Two groups of two processes that meet over a port, as two hosts would."""
    port = _free_port()
    meeting = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}")

    def node(rank: int) -> tuple[int, str, float]:
        folder = tmp_path / f"node{rank}"
        folder.mkdir()
        launcher = ("-m", "torch.distributed.run", *meeting, f"--node-rank={rank}")
        return run_script(folder, *launcher, failing="none", NODES="2")

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(node, (0, 1)))
    for rank, (code, output, _) in enumerate(results):
        assert code == 0, output
        for local in (0, 1):
            assert f"rank {2 * rank + local} of 4 is done" in output


@pytest.mark.extensive
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_slurm_trains(tmp_path: Path) -> None:
    """Two tasks as `srun` starts them: everything that Lightning needs to know is in the environment."""
    port = _free_port()
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "training", "SLURM_NTASKS": "2", "SLURM_NNODES": "1",
           "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "127.0.0.1", "SLURM_NODEID": "0",
           "MASTER_PORT": str(port)}  # fmt: skip

    def task(rank: int) -> tuple[int, str, float]:
        folder = tmp_path / f"task{rank}"
        folder.mkdir()
        return run_script(folder, failing="none", SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **job)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(task, (0, 1)))
    for rank, (code, output, _) in enumerate(results):
        assert code == 0, output
        assert f"rank {rank} of 2 is done" in output and f"rank {1 - rank} of 2" not in output
        assert "SLURMEnvironment started these processes" in output


def _listening() -> set[str]:
    """The addresses at which the ranks' store listens, as /proc has them."""

    def look(_: object) -> set[str]:
        entries = [
            line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()
        ]
        port = f":{int(os.environ['MASTER_PORT']):04X}"
        return {entry[1].removesuffix(port) for entry in entries if entry[1].endswith(port) and entry[3] == "0A"}

    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    found: set[str] = train(Small, strategy, world_size=2, rank=int(os.environ["RANK"]), steps=1, inspect=look).extra
    return found


def test_the_store_of_one_node_listens_on_the_main_address_alone() -> None:
    assert run_ranks(_listening, 2, timeout=100) == [{"0100007F"}] * 2


CELL = """
try:
    pl.Trainer(strategy="deepcompile", accelerator="cpu", devices=2, logger=False)
except Exception as error:
    print(type(error).__name__, error)
trainer = pl.Trainer(strategy="deepcompile", accelerator="cpu", devices=1, max_steps=2, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.strategy.compile.region_backend = "eager"
trainer.fit(Model(), DataLoader(torch.randn(64, 5), batch_size=4))
trainer.strategy.print_summary()
"""


def test_an_interactive_session_trains_on_one_device_and_says_how_several_do(tmp_path: Path) -> None:
    cell, metadata = tmp_path / "cell.py", tmp_path / "metadata"
    cell.write_text(SCRIPT.partition("if __name__")[0] + CELL)
    metadata.mkdir()
    env = clean_environment() | {"FAILING_RANK": "", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = python_path(declare_entry_points(metadata))
    done = subprocess.run(
        [sys.executable, "-i", str(cell)], env=env, cwd=tmp_path, input="", capture_output=True, text=True, timeout=180
    )
    assert "MisconfigurationException Trainer(strategy='deepcompile', devices=2) cannot start" in done.stdout, done
    assert "!python train.py" in done.stdout and "gathers a step" in done.stdout, done
