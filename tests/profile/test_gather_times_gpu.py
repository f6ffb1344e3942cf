"""Gathers are timed alone on GPUs: behind compute, though the host is ahead of the device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from multiprocess import join, run_ranks
from test_engine import sgd
from test_oom import Deep, optimizer_step, planned_engine
from torch.distributed.device_mesh import init_device_mesh

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(200)]

WIDTH, ROWS = 4096, 8192  # a block is gathered as 64 MiB, and computes for some milliseconds
FASTEST = 1e12  # bytes a second that no link between GPUs has
LONGEST = 3e-4  # seconds: a few small kernels take less


def _bandwidth(symmetric: bool | str) -> tuple[float, float, int]:
    device = join("cuda")
    engine = planned_engine(init_device_mesh("cuda", (2,)), "kept", Deep(WIDTH, 8), symmetric_memory=symmetric)
    optimizer, rows = sgd(engine), torch.randn(ROWS, WIDTH, device=device) / (1 + dist.get_rank())
    optimizer.param_groups[0]["lr"] = 1e-3
    for _ in range(8):
        optimizer_step(engine, rows, optimizer)
    profile, stats = engine.profile(), engine.runtime.stats()
    assert profile is not None
    block = next(i.sizes for i in profile.schedules[0].instructions if i.op == "gather")
    seconds = profile.gather_seconds(block)
    engine.close()
    return sum(block) / 2 / seconds, profile.reduce.latency, stats["symmetric_gathers"]


@pytest.mark.parametrize("symmetric", [False, "1MiB"])
def test_no_gather_is_faster_than_the_link(symmetric: bool | str) -> None:
    for bandwidth, latency, by_copy_engines in run_ranks(_bandwidth, 2, symmetric, timeout=180):
        assert 1e9 < bandwidth < FASTEST and 0 < latency < LONGEST, (bandwidth, latency)
        assert (by_copy_engines > 0) == bool(symmetric)
