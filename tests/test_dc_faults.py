"""A rank that dies: every other one raises within the timeout, with the operation, the parameter and the rank."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import queue
import random
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from multiprocess import _free_port, run_ranks

TIMEOUT = 6.0
MOMENTS = [0.0, 0.002, 0.007, 0.013, 0.029, 0.053, 0.107, 0.211, 0.401, 0.809]


def _endless(rank: int, world: int, port: int, backend: str, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    faulthandler.enable()
    torch.set_num_threads(1)
    from lightning_deepcompile import dc

    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT))
    dc.init(dist.group.WORLD, {}, 1000, device=device, timeout=timedelta(seconds=TIMEOUT))
    for i in range(4):
        shard = torch.zeros(64, 64, device=device)
        dc.register_z3_param(i, [64 * world, 64], shard, torch.zeros_like(shard))
    dc.register_graph_z3(0, range(4))
    grad, empty = torch.ones(64 * world, 64, device=device), torch.empty(0, device=device)
    results.put((rank, "running", ""))
    ops, last = torch.ops.dc, time.monotonic()
    try:
        while True:
            last = time.monotonic()
            dc.start_forward()
            ops.prefetch_params_fused(0, [], [0, 1, 2, 3])
            for i in range(4):
                ops.wait_allgather(empty, 0, i)
                ops.release_param(empty, 0, i, 1)
            dc.end_forward()
            dc.start_backward(update=True)
            for i in range(4):
                ops.reduce_grad(grad, 0, i)
            dc.end_backward(0)
            if backend == "nccl":
                torch.cuda.synchronize()
    except RuntimeError as error:
        results.put((rank, type(error).__name__, f"{time.monotonic() - last:.1f} {error}"))
        results.close()
        results.join_thread()
        os._exit(3)


def _answer(process: Any, answers: Any, limit: float) -> Any:
    """The next answer of a rank that has `limit` seconds for it; one that ends without is named."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        ended = not process.is_alive()  # before the look: what it has put there has arrived
        try:
            return answers.get(timeout=0.2)
        except queue.Empty:
            assert not ended, f"{process.name} ended with {process.exitcode}, and said nothing"
    raise AssertionError(f"{process.name} hangs")


def _kill_one(world: int, backend: str, delay: float) -> dict[int, tuple[str, str]]:
    context = mp.get_context("spawn")
    # One for each rank: who is killed may hold the lock of its own.
    results, port = [context.Queue() for _ in range(world)], _free_port()
    processes = [
        context.Process(target=_endless, args=(rank, world, port, backend, results[rank]), daemon=True)
        for rank in range(world)
    ]
    try:
        for process in processes:
            process.start()
        for rank in range(world):
            assert _answer(processes[rank], results[rank], 120)[1] == "running"
        time.sleep(delay)
        victim = random.Random(delay).randrange(world)
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        killed = time.monotonic()
        answers = {}
        for rank in (rank for rank in range(world) if rank != victim):
            answers[rank] = _answer(processes[rank], results[rank], TIMEOUT + 10)[1:]
        assert time.monotonic() - killed < TIMEOUT + 10
        for rank, process in enumerate(processes):
            process.join(10)
            assert process.exitcode not in (None, 0), rank
        return answers
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


@pytest.mark.parametrize("delay", MOMENTS)
def test_a_killed_rank_ends_the_others(delay: float) -> None:
    for rank, (kind, message) in _kill_one(3, "gloo", delay).items():
        assert kind == "DistBackendError", message
        assert f"failed on rank {rank} of 3" in message and "'param" in message, message
        assert "gather of" in message or "reduction of" in message


@pytest.mark.gpu
@pytest.mark.parametrize("delay", MOMENTS)
def test_the_watchdog_frees_a_rank_whose_peer_was_killed(delay: float) -> None:
    for rank, (kind, message) in _kill_one(2, "nccl", delay).items():
        assert kind == "DistBackendError", message
        assert f"on rank {rank}" in message and "'param" in message, message


def _in_flight() -> None:
    from lightning_deepcompile import dc

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dc.init(dist.group.WORLD, {}, 1000)
    for i in range(16):
        dc.register_z3_param(i, (8, 4), torch.full((8, 4), float(i)), torch.zeros(8, 4))
    dc.register_graph_z3(0, list(range(16)))
    ops = torch.ops.dc
    for _ in range(4000):
        for i in range(0, 16, 2):
            ops.prefetch_params_fused(0, [], [i, i + 1], None)
        fulls = ops.wait_allgather_fused(0, list(range(16)))
        assert fulls[15][7, 3] == 15
        ops.release_params_fused(0, list(range(16)))


def test_many_groups_in_flight_do_not_end_the_process() -> None:
    """Gloo's threads used to free a string twice, about every ten thousand groups."""
    run_ranks(_in_flight, 1)
