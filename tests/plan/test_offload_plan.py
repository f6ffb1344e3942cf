"""How much leaves, how much host memory there is, and what an optimizer keeps: without ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from lightning_deepcompile.offload.chunks import make_chunks
from lightning_deepcompile.offload.host_memory import available_host_memory
from lightning_deepcompile.offload.probe import probe_states
from lightning_deepcompile.plan.budget import MemoryBudgetError
from lightning_deepcompile.plan.offload import OffloadNeed, decide_offload, with_least_buffers

NEED = OffloadNeed(peak=60, stepping=40, states=50, buffers=12, budget=100, host=1000)


@pytest.mark.parametrize(
    ("changes", "leaving"),
    [
        ({"budget": 110}, 0),  # all of it fits
        ({"budget": 109}, 1),
        ({}, 10),
        ({"stepping": 55}, 17),  # now the optimizer's buffers are what is too much
        ({"stepping": 55, "budget": 110}, 0),  # none are needed where nothing leaves
        ({"budget": 60}, 50),
        ({"states": 0, "budget": 10}, 0),
    ],
)
def test_what_exceeds_the_budget_leaves(changes: dict[str, int], leaving: int) -> None:
    need = replace(NEED, **changes)
    assert decide_offload("auto", need, "100B", None).bytes == leaving
    assert decide_offload("all", need, "100B", None).bytes == need.states


def test_what_cannot_fit_is_said_with_the_least_that_does() -> None:
    with pytest.raises(MemoryBudgetError, match="memory_budget='59B'.* still needs 60 "):
        decide_offload("auto", replace(NEED, budget=59), "59B", None)
    assert decide_offload("auto", replace(NEED, budget=59), None, None).bytes == 50  # of a default nobody was sure
    for mode, leaving in (("auto", 10), ("all", 50)):
        with pytest.raises(MemoryBudgetError, match=f"9 bytes of host memory, but optimizer states of {leaving} bytes"):
            decide_offload(mode, replace(NEED, host=9), None, 9)


@pytest.mark.parametrize(
    ("make", "bytes_each"),
    [
        (lambda groups: AdamW(groups, foreach=True), (8, 4)),
        (lambda groups: AdamW(groups, fused=True, amsgrad=True), (12, 6)),
        (lambda groups: AdamW(groups, lr=torch.tensor(0.1), capturable=False, foreach=False), (8, 4)),
        (lambda groups: SGD(groups, 0.1), (0, 0)),
        (lambda groups: SGD([{**groups[0], "momentum": 0.9}, groups[1]], 0.1), (4, 0)),
        (lambda groups: torch.optim.RMSprop(groups, momentum=0.9, centered=True), (12, 6)),
    ],
)
def test_an_optimizer_is_asked_what_it_keeps(make: Any, bytes_each: tuple[int, int]) -> None:
    parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    optimizer: Optimizer = make([{"params": [p]} for p in parameters])
    before = [dict(group) for group in optimizer.param_groups]
    sizes = probe_states(optimizer, torch.device("cpu"))
    assert tuple(sizes.of(i, p.dtype, 1) for i, p in enumerate(parameters)) == bytes_each
    assert optimizer.param_groups == before and not optimizer.state
    assert all(bool((p == 1).all()) for p in parameters)


def test_states_of_other_sizes_stay() -> None:
    optimizer = Adafactor([nn.Parameter(torch.ones(4, 6))])  # rows and columns
    assert probe_states(optimizer, torch.device("cpu")).of(0, torch.float32, 24) == 0


def test_chunks_keep_the_groups_and_the_limit() -> None:
    sizes = ((3, 4, 9, 6), (1, 2, 1))
    groups: list[dict[str, Any]] = [{"params": [torch.ones(n) for n in group]} for group in sizes]
    staying = {groups[0]["params"][1]}
    chunks = make_chunks(groups, lambda p: p not in staying, lambda group, p: p.numel(), limit=4)

    def shape(params: list[list[Tensor]]) -> list[list[int]]:
        return [[p.numel() for p in group] for group in params]

    assert [(c.offloaded, shape(c.params)) for c in chunks] == [
        (False, [[4], []]),
        (True, [[3], [1]]),
        (True, [[], [2, 1]]),
        (True, [[6], []]),  # larger than a chunk may be, so alone, and last
        (True, [[9], []]),
    ]


@pytest.mark.parametrize(
    ("peak", "buffers", "leaving"),
    [
        (60, 6, 15),  # what has to leave fits into chunks of 2
        (50, 6, 5),
        (75, 30, 30),  # some of the larger ones leave, too, but not the largest
        (105, 90, 85),  # all, the largest one through buffers of its size
    ],
)
def test_buffers_are_for_what_leaves(peak: int, buffers: int, leaving: int) -> None:
    sizes = [30, 1, 2, 10, 2, 10, 10, 10, *[1] * 10]
    need = OffloadNeed(peak=peak, stepping=40, states=sum(sizes), buffers=90, budget=130, host=1000)
    lean = with_least_buffers(need, sizes, chunk=2)
    assert lean == replace(need, buffers=buffers)
    assert decide_offload("auto", lean, "130B", None).bytes == leaving


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_host_memory_is_what_the_tightest_group_leaves(tmp_path: Path) -> None:
    meminfo = {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:     1000 kB\n"}
    write(tmp_path, meminfo)
    assert available_host_memory(tmp_path) == 1000 * 1024
    second = {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "5\n",
        "sys/fs/cgroup/job/memory.max": "500000\n",
        "sys/fs/cgroup/job/memory.current": "300000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 7\ninactive_file 100000\n",
    }
    write(tmp_path, second)
    assert available_host_memory(tmp_path) == 300_000
    first = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/from/outside\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "90000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "20000\n",
    }
    write(tmp_path, first)
    assert available_host_memory(tmp_path) == 70_000
