"""A rank that dies: every other one raises within the timeout, with the operation, the parameter and the rank."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import queue
import random
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from multiprocess import _free_port, join, own_environment, rank_context, run_ranks

TIMEOUT = 6.0
MOMENTS = [0.0, 0.002, 0.007, 0.013, 0.029, 0.053, 0.107, 0.211, 0.401, 0.809]


def _endless(rank: int, world: int, port: int, backend: str, results: Any) -> None:
    os.environ.update(
        own_environment(rank, world), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    faulthandler.enable()
    torch.set_num_threads(1)
    from lightning_deepcompile import dc

    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
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
    context = rank_context()
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


@pytest.mark.parametrize(
    "delay", [pytest.param(delay, marks=[] if delay in MOMENTS[::4] else [pytest.mark.extensive]) for delay in MOMENTS]
)
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
        # The first step compares what was registered, which takes a while on a GPU that ranks share.
        assert f"on rank {rank}" in message and ("'param" in message or "'registration'" in message), message


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


def _step(dc: Any, ds_ids: list[int]) -> None:
    ops, empty = torch.ops.dc, torch.empty(0)
    dc.start_forward()
    for i in ds_ids:
        ops.wait_allgather(ops.allgather_param(empty, 0, i), 0, i)
        ops.release_param(empty, 0, i, 1)
    dc.end_forward()


def _open(rank: int, world: int, device: torch.device, timeout: float) -> Any:
    """A runtime with one parameter."""
    from lightning_deepcompile import dc

    dc.init(dist.group.WORLD, {}, 1000, device=device, timeout=timedelta(seconds=timeout))
    dc.register_z3_param(0, [8 * world, 4], torch.ones(8, 4, device=device), None)
    dc.register_graph_z3(0, [0])
    _step(dc, [0])
    return dc


def _capture_beside_steps() -> None:
    device = join("cuda")
    dc = _open(0, 1, device, 5.0)  # the watchdog looks twice per second
    x = torch.zeros(8, device=device)
    for count in range(1, 4):
        _step(dc, [0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
            time.sleep(1.2)
        graph.replay()
        assert x.eq(count).all()
    dc.cleanup()


@pytest.mark.gpu
def test_graphs_are_captured_beside_steps() -> None:
    run_ranks(_capture_beside_steps, 1)


def _idle(rank: int, port: int, results: Any, peer_is_dead: Any) -> None:
    os.environ.update(own_environment(rank, 2), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    faulthandler.enable()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    dc = _open(rank, 2, device, TIMEOUT)
    torch.cuda.synchronize()
    results.put("idle")
    peer_is_dead.wait()
    try:
        dc.cleanup()
        answer = "ended"
    except RuntimeError as error:
        answer = f"{type(error).__name__} {error}"
    results.put(answer)
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.mark.gpu
def test_the_end_waits_for_no_dead_rank() -> None:
    context, port = mp.get_context("spawn"), _free_port()
    results = [context.Queue() for _ in range(2)]
    dead = [context.Event() for _ in range(2)]  # one each: to wake all would wait for the killed one
    processes = [
        context.Process(target=_idle, args=(rank, port, results[rank], dead[rank]), daemon=True) for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        for rank in range(2):
            assert _answer(processes[rank], results[rank], 120) == "idle"
        processes[1].kill()
        processes[1].join()
        dead[0].set()
        answer = _answer(processes[0], results[0], TIMEOUT + 15)
        assert answer == "ended" or "was aborted while it was ended" in answer, answer
        processes[0].join(10)
        assert processes[0].exitcode == 0
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def _alone() -> str:
    from lightning_deepcompile.runtime import load_extension

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:  # gets the number of the communicator, and creates none
        dist.broadcast(torch.empty(128, dtype=torch.uint8), 0)
        dist.barrier()
        return ""
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError) as raised:
        load_extension().Runtime(dist.group.WORLD, dist.group.WORLD, torch.device("cuda", 0), timeout=3.0)
    assert time.monotonic() - begun < 20
    dist.barrier()
    return str(raised.value)


@pytest.mark.gpu
def test_communicators_wait_for_no_rank_that_creates_none() -> None:
    message, _ = run_ranks(_alone, 2)
    assert "of 2 ranks were not there within 3 s on rank 0" in message, message


STOPS = """
#include <signal.h>

int ncclCommSplit(void) {
  raise(SIGSTOP);
  return 1;
}
"""


def _creates(rank: int, port: int, results: Any) -> None:
    os.environ.update(own_environment(rank, 2), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    faulthandler.enable()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    results.put("begins")
    answer = "no error"
    try:
        _open(rank, 2, device, TIMEOUT)
    except RuntimeError as error:
        answer = f"{type(error).__name__} {error}"
    assert torch.ones(1000, device=device).sum().item() == 1000  # the device is as it was
    results.put(answer)
    results.close()
    results.join_thread()


@pytest.mark.gpu
def test_a_rank_that_stops_between_two_communicators_crashes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stops.c").write_text(STOPS)
    library = tmp_path / "stops.so"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", tmp_path / "stops.c", "-o", library], check=True)
    context, port = mp.get_context("spawn"), _free_port()
    results = [context.Queue() for _ in range(2)]
    processes = [context.Process(target=_creates, args=(rank, port, results[rank]), daemon=True) for rank in range(2)]
    try:
        processes[0].start()
        monkeypatch.setenv("LD_PRELOAD", str(library))  # its function is found before NCCL's
        processes[1].start()
        monkeypatch.delenv("LD_PRELOAD")
        for rank in range(2):
            assert _answer(processes[rank], results[rank], 120) == "begins"
        answer = _answer(processes[0], results[0], TIMEOUT + 60)
        assert answer.startswith("DistBackendError") and "ncclCommSplit" in answer, answer
        assert f"of 2 ranks were not there within {TIMEOUT:.0f} s on rank 0" in answer, answer
        processes[0].join(30)
        assert processes[0].exitcode == 0
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def _forks(device_type: str) -> None:
    device = join(device_type)
    dc = _open(0, 1, device, 60.0)
    child = os.fork()
    if child == 0:
        dc.cleanup()  # and drops it, as the interpreter's end does
        os._exit(0)
    ended, until = (0, -1), time.monotonic() + 30
    while ended[0] == 0 and time.monotonic() < until:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0), "the forked process waits for a thread that it does not have"
    _step(dc, [0])
    dc.cleanup()


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_forked_process_ends(device_type: str) -> None:
    run_ranks(_forks, 1, device_type)
