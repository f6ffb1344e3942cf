"""Gathers by copy engines on two GPUs: that they run, are those of kernels to the bit, and end when a rank does."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, Record, train
from multiprocess import _free_port, join, run_ranks
from test_symmetric import told
from torch import Tensor

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]

MIB = 2**20
TIMEOUT = 6.0
# Shape, dtype of the shard, dtype that is gathered. Two groups, the second with more than one part of a page.
GROUPS = [
    [((7,), torch.float32, None), ((), torch.bfloat16, None), ((1, 3), torch.float16, None)],
    [
        ((1023, 1031), torch.float32, None),
        ((2049, 333), torch.float32, torch.bfloat16),
        ((5, 3, 77), torch.float64, None),
        ((8192,), torch.bfloat16, None),
    ],
]


class _Side:
    """A runtime of its own over the given shards."""

    def __init__(self, shards: list[Tensor], shapes: list[tuple[int, ...]], **options: Any) -> None:
        from lightning_deepcompile.runtime import load_extension

        device, group = shards[0].device, dist.group.WORLD
        self.runtime = load_extension().Runtime(group, group, device, timeout=60.0, **options)
        self.graph = self.runtime.serial << 32
        self.ids = [self.graph | i for i in range(len(shards))]
        for id_, shard, shape in zip(self.ids, shards, shapes, strict=True):
            self.runtime.setup.register_param(id_, f"p{id_ - self.graph}", list(shape), shard)
        self.runtime.setup.register_graph(self.graph, self.ids)
        self.runtime.setup.validate()
        self.runtime.reset_stats()  # that was a gather, too

    def gather(self, members: list[int], dtypes: list[torch.dtype] | None = None) -> list[Tensor]:
        """One group, launched and waited for."""
        ids = [self.ids[i] for i in members]
        torch.ops.dc.prefetch_params_fused(self.graph, [], ids, dtypes)
        return torch.ops.dc.wait_allgather_fused(self.graph, ids)

    def release(self, members: list[int]) -> None:
        torch.ops.dc.release_params_fused(self.graph, [self.ids[i] for i in members])

    def stats(self) -> dict[str, int]:
        return self.runtime.stats()


def _rows(shape: tuple[int, ...]) -> list[int]:
    """The shape of a shard: half of the rows, rounded up."""
    return [-(-(shape[0] if shape else 1) // 2), *shape[1:]]


def _equal_to_nccl(steps: int) -> tuple[int, dict[str, int]]:
    device = join("cuda")
    rank = device.index
    specs = [spec for group in GROUPS for spec in group]
    generator = torch.Generator(device).manual_seed(rank)
    shards = [torch.zeros(_rows(shape), dtype=dtype, device=device) for shape, dtype, _ in specs]
    shapes = [shape for shape, *_ in specs]
    symmetric, nccl = _Side(shards, shapes, symmetric_threshold=1), _Side(shards, shapes)
    members, first = [], 0
    for group in GROUPS:
        members.append(list(range(first, first + len(group))))
        first += len(group)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(steps):
        for shard in shards:
            shard.normal_(generator=generator)
        symmetric.runtime.parameters.invalidate()
        nccl.runtime.parameters.invalidate()
        if step % 5 == rank:  # now one rank is late, now the other one
            torch.cuda._sleep(3_000_000)
        # Nothing waits for the device here: the host runs many gathers ahead, and whoever overwrites too early shows.
        for number, group in enumerate(members):
            dtypes = [specs[i][2] or specs[i][1] for i in group]
            ours, theirs = symmetric.gather(group, dtypes), nccl.gather(group, dtypes)
            for a, b in zip(ours, theirs, strict=True):
                wrong += (a != b).any()
            if (step + number) % 3:
                symmetric.release(group)
            nccl.release(group)
    torch.cuda.synchronize()
    stats = symmetric.stats()
    assert nccl.stats()["symmetric_gathers"] == 0
    for side in (symmetric, nccl):
        side.runtime.close()
    assert symmetric.stats()["symmetric_bytes"] == 0
    return int(wrong), stats


def test_equal_to_nccl_in_every_bit() -> None:
    for wrong, stats in run_ranks(_equal_to_nccl, 2, 300):
        assert wrong == 0
        assert stats["symmetric_gathers"] == stats["gather_groups"] == 600


def _threshold_and_growth() -> list[tuple[int, int]]:
    device = join("cuda")
    rank = device.index
    sizes = [MIB // 4, 3 * MIB, 40 * MIB, 5 * MIB]  # of bytes, gathered
    shards = [torch.full((size // 8,), float(rank + 1), device=device) for size in sizes]
    side = _Side(shards, [(size // 4,) for size in sizes], symmetric_threshold=MIB)
    seen = []
    for i, size in enumerate(sizes):
        before = side.stats()["symmetric_gathers"]
        full = side.gather([i])[0]
        assert full[: size // 8].eq(1).all() and full[size // 8 :].eq(2).all()
        side.release([i])
        stats = side.stats()
        seen.append((stats["symmetric_gathers"] - before, stats["symmetric_bytes"]))
    side.runtime.close()
    with pytest.raises(ValueError, match="the bound of symmetric memory differs between ranks"):
        _Side(shards, [(size // 4,) for size in sizes], symmetric_threshold=MIB + rank)
    return seen


def test_small_groups_stay_with_kernels_and_large_ones_get_memory_of_their_size() -> None:
    for seen in run_ranks(_threshold_and_growth, 2):
        assert seen == [(0, 0), (1, 4 * MIB), (1, 44 * MIB), (1, 50 * MIB)]


def _one_rank_has_no_memory() -> tuple[list[str], dict[str, int]]:
    device = join("cuda")
    rank = device.index
    size = 1024 * MIB
    shard = torch.full((size // 8,), float(rank + 1), device=device)
    side = _Side([shard], [(size // 4,)], symmetric_threshold=1 + MIB)
    if rank == 1:  # what is left belongs to torch, which cannot give it back as some of it is in use
        room = torch.empty(size + 64 * MIB, dtype=torch.uint8, device=device)
        del room
        kept = torch.empty(32 * MIB, dtype=torch.uint8, device=device)
        free, _ = torch.cuda.mem_get_info()
        hog = torch.empty(free - size // 2, dtype=torch.uint8, device=device)
    with told() as lines:
        for _ in range(2):
            full = side.gather([0])[0]
            assert full[: size // 8].eq(1).all() and full[size // 8 :].eq(2).all()
            del full  # there is no memory for another one
            side.release([0])
            side.runtime.parameters.invalidate()
    if rank == 1:
        del hog, kept
    stats = side.stats()
    side.runtime.close()
    return lines, stats


def test_where_one_rank_cannot_all_use_nccl() -> None:
    (lines, stats), (others_lines, others) = run_ranks(_one_rank_has_no_memory, 2)
    assert len(lines) == 1 and "rank 1 has no 1024 MiB" in lines[0], lines
    assert others_lines == []
    for each in (stats, others):
        assert each["gather_groups"] == 2 and each["symmetric_gathers"] == each["symmetric_bytes"] == 0


def _train(stage: int) -> list[Record]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    return [
        train(
            CASES["gpt_tied"],
            DeepCompileStrategy(
                stage=stage,
                timeout=timedelta(seconds=60),
                compile=CompileConfig(region_backend="eager", schedule=None, symmetric_memory=bound),
            ),
            world_size=2,
            rank=int(os.environ["RANK"]),
            optimizer="adamw",
            accumulate=3,
            inspect=lambda trainer: trainer.strategy.summary(),
            accelerator="gpu",
        )
        for bound in (False, "1KiB")
    ]


@pytest.mark.parametrize("stage", [2, 3])
def test_training_is_the_same(stage: int) -> None:
    for plain, symmetric in run_ranks(_train, 2, stage):
        assert symmetric.losses == plain.losses
        assert all(torch.equal(symmetric.params[key], plain.params[key]) for key in plain.params)
        assert plain.extra.symmetric_gathers_per_step == 0
        if stage == 3:
            assert symmetric.extra.symmetric_gathers_per_step > 0
            assert "by copy engines" in str(symmetric.extra) and symmetric.extra.symmetric_bytes > 0


def _gather_for_ever(rank: int, port: int, stops: bool, results: Any, errors: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from lightning_deepcompile.runtime import load_extension

    if rank == 0:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=TIMEOUT))
    group = dist.group.WORLD
    runtime = load_extension().Runtime(group, group, device, timeout=TIMEOUT, symmetric_threshold=MIB)
    graph = runtime.serial << 32
    shard = torch.ones(4 * MIB, device=device)
    runtime.setup.register_param(graph, "layer.weight", [8 * MIB], shard)
    runtime.setup.register_graph(graph, [graph])
    done = 0
    try:
        while True:
            if stops and rank == 1 and done == 20:
                results.put((rank, "stopped"))
                time.sleep(600)
            torch.ops.dc.prefetch_params_fused(graph, [], [graph])
            torch.ops.dc.wait_allgather_fused(graph, [graph])
            torch.ops.dc.release_params_fused(graph, [graph])
            torch.cuda.synchronize()
            done += 1
            if done == 5:
                assert runtime.stats()["symmetric_gathers"] == 5
                results.put((rank, "running"))
    except RuntimeError as error:  # if the device gets on; else the process ends
        print(error, file=sys.stderr, flush=True)
        os._exit(3)


@pytest.mark.parametrize("stops", [True, False], ids=["stops", "killed"])
def test_a_rank_that_is_gone_ends_the_other(stops: bool, tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    results, port, errors = context.Queue(), _free_port(), tmp_path / "errors"
    processes = [
        context.Process(target=_gather_for_ever, args=(rank, port, stops, results, str(errors)), daemon=True)
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        for _ in range(3 if stops else 2):
            assert results.get(timeout=120)[1] in ("running", "stopped")
        if not stops:
            time.sleep(0.05)
            os.kill(processes[1].pid or 0, signal.SIGKILL)
        processes[0].join(TIMEOUT + 15)
        text = errors.read_text()
        assert processes[0].exitcode in (1, 3), text
        # The memory of a process that is gone may be gone too, for copies that were under way.
        assert "gather of 'layer.weight'" in text or (not stops and "CUDA error" in text), text
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
