"""Engines of one process group meet under one number, however many of them a rank has begun before."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from multiprocess import join, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.engine import Engine


def _explained() -> str:
    """Returns this rank's error of communication after rank 1 has failed with one of its own."""
    join("cpu")
    rank, config = dist.get_rank(), CompileConfig(region_backend="eager")
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("group", "alone"))["alone"]
    if rank == 1:  # as one that fails half-way and begins again
        Engine(nn.Linear(3, 2), alone, config).close()
    engine = Engine(nn.Linear(3, 2), init_device_mesh("cpu", (2,)), config, timeout=timedelta(seconds=20))
    error = RuntimeError("gloo: Connection closed by peer")
    if rank == 1:
        engine.failures.note_cause(ValueError("no such column"))
    dist.barrier()
    if rank == 0:
        engine.failures.note_cause(error)
    engine.close()
    return str(error)


@pytest.mark.timeout(120)
def test_a_rank_that_has_begun_more_engines_tells_its_peers_of_its_failure() -> None:
    explained, _ = run_ranks(_explained, 2, timeout=100)
    assert "the rank that failed first, rank 1: ValueError: no such column" in explained
