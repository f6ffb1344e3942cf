"""Symmetric memory where there is none: one warning, and everything goes on over the process group."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from multiprocess import run_ranks

from lightning_deepcompile import CompileConfig

LINE = "instead of symmetric memory"


@contextmanager
def told() -> Iterator[list[str]]:
    """The lines that the runtime writes about symmetric memory, to standard error or as Python's warnings."""
    lines: list[str] = []
    with tempfile.TemporaryFile("w+") as file, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += [line for line in [*file, *(str(w.message) for w in caught)] if LINE in line]


def _without() -> tuple[list[str], list[str], dict[str, int]]:
    from lightning_deepcompile import dc
    from lightning_deepcompile.runtime import load_extension

    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    with told() as lines:
        runtime = load_extension().Runtime(group, group, torch.device("cpu"), symmetric_threshold=1)
        id_ = runtime.serial << 32
        runtime.setup.register_param(id_, "w", [6, 2], torch.full((3, 2), float(rank)))
        runtime.setup.register_graph(id_, [id_])
        for _ in range(2):
            torch.ops.dc.prefetch_params_fused(id_, [], [id_])
            full = torch.ops.dc.wait_allgather_fused(id_, [id_])[0]
            assert full[:3].eq(0).all() and full[3:].eq(1).all()
            torch.ops.dc.release_params_fused(id_, [id_])
    stats = runtime.stats()
    with told() as from_dc:
        dc.init(group, {"symmetric_memory": True}, 1000)
    dc.cleanup()
    runtime.close()
    return lines, from_dc, stats


def test_without_gpus_one_line_says_why() -> None:
    first, second = run_ranks(_without, 2)
    for lines in first[:2]:
        assert len(lines) == 1 and "the process group" in lines[0] and "device is cpu" in lines[0], lines
    assert second[:2] == ([], [])
    for *_, stats in (first, second):
        assert stats["gather_groups"] == 2 and stats["symmetric_gathers"] == stats["symmetric_bytes"] == 0


@pytest.mark.parametrize(
    ("value", "threshold"), [(False, 0), (True, 32 << 20), (4096, 4096), ("1.5MiB", 3 << 19), ("64 MiB", 64 << 20)]
)
def test_the_bound(value: Any, threshold: int) -> None:
    assert CompileConfig(symmetric_memory=value).symmetric_threshold(False, tight=False) == threshold


def test_by_default_on_one_host_that_has_memory() -> None:
    assert CompileConfig().symmetric_threshold(True, tight=False) == 32 << 20
    assert CompileConfig().symmetric_threshold(False, tight=False) == 0
    assert CompileConfig(memory_budget="8GiB").symmetric_threshold(True, tight=False) == 0
    assert CompileConfig().symmetric_threshold(True, tight=True) == 0
    assert CompileConfig(cuda_graphs=True).symmetric_threshold(True, tight=False) == 0


def test_a_bound_below_zero_is_refused() -> None:
    from lightning_deepcompile.runtime import load_extension

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match="`symmetric_threshold` must not be negative, got -1"):
        load_extension().Runtime(dist.group.WORLD, dist.group.WORLD, torch.device("cpu"), symmetric_threshold=-1)
