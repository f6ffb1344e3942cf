"""Runs a test function on several ranks: starts them, times out, and shows every rank's traceback, of hanging ones too.

Without GPUs, ranks are forked from a server that has imported what all tests need and compiled a function, without
starting a thread: that takes longer than most tests do. Forked ranks share the seed of hashes, which ranks do not in
life: `test_launch.py` and others start interpreters of their own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing as mp
import os
import pickle
import random
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import torch
import torch.distributed as dist

__all__ = [
    "GPU_RANKS",
    "GPU_TEST",
    "SLOWEST",
    "RankError",
    "devices",
    "join",
    "own_environment",
    "rank_context",
    "run_ranks",
    "said",
]

GPU_RANKS = int(os.environ.get("GPU_RANKS", "2"))
"""Ranks of tests on GPUs that say no other number."""

GPU_TEST = "DEEPCOMPILE_GPU_TEST"
"""Environment variable that is set while a test marked `gpu` runs: its ranks share GPUs where there are too few."""

SLOWEST = 2.5
"""How many times longer than on the machine of whoever wrote a limit a test may take: virtual cores differ by that."""

_IMPORTED = [
    "torch._inductor.compile_fx",
    "lightning_deepcompile.trainer.strategy",
    "transformers.modeling_utils",
    "cases",
    "warmed",
]


class RankError(AssertionError):
    """One or more ranks failed; the message holds their tracebacks."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 180.0,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on `world_size` processes set up as torchrun would.

    Args:
        function: A module-level function.
        world_size: Number of ranks.
        *args: Its arguments; they and its result are pickled.
        timeout: Seconds after which all ranks are killed and the test fails, on a usual machine (`SLOWEST`).
        fresh: Whether each rank gets an interpreter of its own: for what is read from the environment at its start.
        **kwargs: Its keyword arguments.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankError: If a rank raises, dies or runs too long. The first failure ends all ranks within seconds.
    """
    context = rank_context(fresh)
    with tempfile.TemporaryDirectory() as folder:
        # The server has the environment of its own start.
        environment = {**os.environ, **_environment(world_size)}
        own = [own_environment(rank, world_size) for rank in range(world_size)]
        target = functools.partial(_rank_main, function, args, kwargs)
        processes = [
            context.Process(target=target, args=({**environment, **own[rank]}, folder, rank), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + SLOWEST * timeout
        try:
            while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
                if any(p.exitcode not in (None, 0) for p in processes):
                    deadline = min(deadline, time.monotonic() + 10)
                    if all(not p.is_alive() for p in processes):
                        break
                time.sleep(0.02)
            alive = _where_they_hang(processes, folder)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        errors = []
        for rank, process in enumerate(processes):
            path = Path(folder, f"error{rank}")
            if path.exists():
                errors.append(f"--- rank {rank}\n{path.read_text()}")
            elif rank in alive:
                errors.append(f"--- rank {rank} was still running and was killed:\n{alive[rank]}")
            elif process.exitcode != 0:
                crash = Path(folder, f"crash{rank}")
                where = crash.read_text() if crash.exists() else ""
                errors.append(f"--- rank {rank} died with exit code {process.exitcode}\n{where}".rstrip())
        if errors:
            raise RankError("\n".join(errors))
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(world_size)]


def rank_context(fresh: bool = False) -> Any:
    """Starts ranks: forks them from a server, or starts interpreters (`fresh`, and with GPUs)."""
    # CUDA does not work in what is forked from a process that has asked for devices, as imports may do.
    if fresh or torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    # Python 3.11's server does not take over sys.path, and ignores modules that it does not find.
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    return context


def devices(world_size: int) -> dict[str, int]:
    """Arguments of a Trainer on `world_size` ranks: those that share a GPU are nodes of one device each."""
    return {"devices": 1, "num_nodes": world_size} if _share_gpus(world_size) else {"devices": world_size}


def _share_gpus(world_size: int) -> bool:
    return GPU_TEST in os.environ and 0 < torch.cuda.device_count() < world_size


def join(device_type: str) -> torch.device:
    """Joins the ranks' process group, gloo or NCCL, from a rank; returns its device."""
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def said(error: str) -> str:
    """Returns the text of the ranks' errors; if all ranks fail alike, only rank 0 prints all of it."""
    return error.removeprefix("As on rank 0, which prints it in full: ")


def _where_they_hang(processes: list[Any], folder: str) -> dict[int, str]:
    """Describes what the threads of the ranks that still run are doing, by rank."""
    alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in alive:
        if Path(folder, f"stack{rank}").exists():  # else the signal would end it
            os.kill(processes[rank].pid, signal.SIGUSR1)
    if alive:
        time.sleep(1)
    return {rank: _text(Path(folder, f"stack{rank}")) for rank in alive}


def _keep_listening(stack: TextIO) -> None:
    """Prints every thread's stack on SIGUSR1; Lightning resets the handlers of all signals when a trainer is done."""
    while True:
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        time.sleep(0.5)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else "(it had not started yet)"


def _free_port() -> int:
    """A port for this test alone: not of those that the system gives to clients, nor of another of xdist's workers."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 10_000 + 250 * (worker % 20)
    for port in random.sample(range(first, first + 250), 250):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"All ports from {first} to {first + 249} are in use.")


def _environment(world_size: int) -> dict[str, str]:
    """The environment that torchrun would set for all ranks."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def own_environment(rank: int, world_size: int) -> dict[str, str]:
    """The environment that torchrun would set for one rank.

    NCCL takes no two ranks of one host on one GPU. Ranks that share GPUs tell it that each is a host of its own: data
    then takes the way over sockets, which is slow and right.
    """
    if not _share_gpus(world_size):
        return {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "NODE_RANK": str(rank)}
    network = {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": visible[rank % count], **alone, **network}


def _rank_main(
    function: Callable[..., Any], args: Any, kwargs: Any, environment: dict[str, str], folder: str, rank: int
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable(Path(folder, f"crash{rank}").open("w"))  # stays open: the handler writes to it
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # what Lightning goes back to; the default would end the process
    stack = Path(folder, f"stack{rank}").open("w")  # stays open: the handler writes to it
    threading.Thread(target=_keep_listening, args=(stack,), daemon=True).start()
    torch.set_num_threads(1)
    gc.freeze()  # tracing makes a lot of garbage, and each look for it would go through everything that was imported
    gc.set_threshold(100_000, 50, 1000)  # as in conftest.py
    try:
        result = function(*args, **kwargs)
        Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)
    # Leaving through the interpreter's end would wait for communication threads of ranks that are already gone.
    os._exit(0)
