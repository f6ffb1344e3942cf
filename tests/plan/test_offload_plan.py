"""Decisions about offloading, without ranks: bytes that leave, host memory, and the states of optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from lightning_deepcompile.offload.chunks import make_chunks
from lightning_deepcompile.offload.host_memory import available_host_memory
from lightning_deepcompile.offload.leaving_states import probe_states
from lightning_deepcompile.offload.temporaries import probe_temporaries, step_bytes


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
    ("make", "each", "together"),
    [
        (lambda p: AdamW(p, foreach=True), 4, 4),  # denominators of all parameters
        (lambda p: AdamW(p, foreach=False), 12, 0),  # a loop has at most those of a parameter and of the one before
        (lambda p: AdamW(p, fused=True), 0, 0),
        (lambda p: SGD(p, 0.1, foreach=True), 0, 0),
        (lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.1, foreach=True), 4, 4),
        (lambda p: torch.optim.Adadelta(p, foreach=True), 8, 8),
    ],
)
def test_an_optimizer_is_asked_what_its_steps_take_besides(make: Any, each: int, together: int) -> None:
    parameters = [nn.Parameter(torch.ones(n)) for n in (400, 30, 100)]
    optimizer: Optimizer = make(parameters)
    (found,) = probe_temporaries(optimizer, torch.device("cpu"))
    assert getattr(optimizer, "_need_device_dtype_check_for_fused", True), "the first step has yet to check"
    assert found == (each, together) and not optimizer.state and optimizer.param_groups[0]["params"] == parameters
    whole = max(each * 400, together * 530)
    assert step_bytes([found], [[400, 30, 100]], 200) == (whole, min(whole, max(200, each * 400)))
    optimizer.param_groups[0]["foreach"] = None
    (on_lists,) = probe_temporaries(optimizer, torch.device("cpu"), lists=True)
    assert on_lists.together == together or not together


def test_chunks_of_what_stays_are_as_large_as_what_a_step_takes_besides() -> None:
    groups: list[dict[str, Any]] = [{"params": [torch.ones(n) for n in group]} for group in ((2, 2, 9), (1, 2))]
    size = lambda group, p: p.numel()  # noqa: E731
    undivided = make_chunks(groups, lambda p: False, size, 4)
    divided = make_chunks(groups, lambda p: False, size, 4, size)
    assert [[[p.numel() for p in group] for group in chunk.params] for chunk in undivided] == [[[2, 2, 9], [1, 2]]]
    assert [[[p.numel() for p in group] for group in chunk.params] for chunk in divided] == [
        [[2, 2], []], [[9], []], [[], [1, 2]]
    ]  # fmt: skip


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
