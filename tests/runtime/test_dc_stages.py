"""Stages as policies over gathers and reductions: gradients equal the unsharded ones, under every policy."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from multiprocess import GPU_RANKS, join, run_ranks
from torch import Tensor

# Rows that worlds of 2 and 3 do and do not divide, fewer rows than ranks, no dimension at all.
SHAPES = [(6, 4), (5, 3), (1, 2), (7,), ()]
TIED = 1  # reduced twice in every backward
SKIPPED = 3  # has no gradient in the last micro-batch
# Bucket size (elements; smaller than every gradient, in between, larger than all together), and one call for all
# contributions to a parameter or one call each.
WAYS = [(1, False), (16, False), (1 << 20, False), (16, True)]


def _value(*key: int) -> Tensor:
    """A gradient or parameter: the same wherever it is asked for."""
    seed = sum(k * 10**i for i, k in enumerate(key))
    return torch.randn(SHAPES[key[0]], generator=torch.Generator().manual_seed(seed))


def _contributions(param: int, rank: int, batch: int, last: bool) -> list[Tensor]:
    if param == SKIPPED and last:
        return []
    return [_value(param, rank + 1, batch + 1, use + 1) for use in range(2 if param == TIED else 1)]


def _shard(full: Tensor, rank: int, world: int, rows: bool) -> Tensor:
    full = full.reshape(1) if full.dim() == 0 else full
    if not rows:
        full = full.flatten()
    count = -(-full.shape[0] // world)
    padded = torch.cat([full, full.new_zeros(count * world - full.shape[0], *full.shape[1:])])
    return padded[rank * count : (rank + 1) * count].clone()


def _train(
    stage: int, reduce: str | None, accumulate: int, bucket: int, rows: bool, fused: bool, device: torch.device
) -> list[Tensor]:
    """Two optimizer steps of given gradients; returns the gradient shards of both."""
    from lightning_deepcompile.runtime import load_extension

    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    runtime = load_extension().Runtime(group, group, device, reduce_bucket_size=bucket, reduce_window=1)
    base, ops, empty = runtime.serial << 32, torch.ops.dc, torch.empty(0)
    grads = []
    for i in range(len(SHAPES)):
        shard = _shard(_value(i), rank, world, rows).to(device)
        grads.append(torch.full_like(shard, torch.nan))
        runtime.setup.register_param(base | i, f"p{i}", list(SHAPES[i]), shard, grads[i])
    ids = [base | i for i in range(len(SHAPES))]
    runtime.setup.register_graph(base, ids, stage=stage, reduce=reduce)
    runtime.setup.validate()
    results, batch = [], 0
    for _ in range(2):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            runtime.passes.start_forward()
            ops.prefetch_params_fused(base, [], ids[::-1])
            for i in reversed(range(len(SHAPES))):
                full = ops.wait_allgather(empty, base, ids[i])
                assert torch.equal(full.cpu(), _value(i)), (i, full)
                ops.release_param(empty, base, ids[i], 1)
            runtime.passes.end_forward()
            runtime.passes.start_backward(last)
            for i in range(len(SHAPES)):
                given = [grad.to(device) for grad in _contributions(i, rank, batch, last)]
                if fused:
                    ops.reduce_grads_fused(base, given, [ids[i]] * len(given))
                else:
                    for grad in given:
                        ops.reduce_grad(grad.double().float(), base, ids[i])
            ops.end_backward(base)
            batch += 1
        results += [g.to("cpu", copy=True) for g in grads]
    stats = runtime.stats()
    whole = stage < 3
    assert stats["gathers"] == len(SHAPES) * 2 * (1 if whole else accumulate), stats
    runtime.close()
    return results


def _expected(accumulate: int, rank: int, world: int, rows: bool) -> list[Tensor]:
    results, first = [], 0
    for _ in range(2):
        for i in range(len(SHAPES)):
            total = torch.zeros(SHAPES[i])
            for micro in range(accumulate):
                for source in range(world):
                    for grad in _contributions(i, source, first + micro, micro == accumulate - 1):
                        total += grad / world
            results.append(_shard(total, rank, world, rows))
        first += accumulate
    return results


def _policies(device_type: str, every: int = 1) -> None:
    device = join(device_type)
    rank, world = dist.get_rank(), dist.get_world_size()
    by_reduction: dict[Any, list[Tensor]] = {}
    settings = enumerate(itertools.product([1, 2, 3], [None, "every", "boundary"], [1, 3], WAYS))
    for number, (stage, reduce, accumulate, (bucket, fused)) in itertools.islice(settings, 0, None, every):
        rows = number % 2 == 0
        actual = _train(stage, reduce, accumulate, bucket, rows, fused, device)
        for i, (grad, reference) in enumerate(zip(actual, _expected(accumulate, rank, world, rows), strict=True)):
            if i % len(SHAPES) == SKIPPED and accumulate == 1:
                continue  # never had a gradient
            torch.testing.assert_close(grad, reference, rtol=1e-5, atol=1e-6)
        late = reduce == "boundary" or (reduce is None and stage == 1)
        same_order = by_reduction.setdefault((late, accumulate, bucket, fused, rows), actual)
        if accumulate > 1:
            assert all(torch.equal(a, b) for a, b in zip(actual, same_order, strict=True)), (stage, reduce)


@pytest.mark.parametrize("world", [2, 3, *(pytest.param(world, marks=pytest.mark.extensive) for world in (1, 4))])
def test_every_policy_gives_the_unsharded_gradients(world: int) -> None:
    run_ranks(_policies, world, "cpu")


@pytest.mark.gpu
def test_every_policy_gives_the_unsharded_gradients_on_gpus() -> None:
    # Communicators of ranks that share a GPU take seconds: a fifth of the settings, in which each choice is met.
    run_ranks(_policies, GPU_RANKS, "cuda", 5)


def _residency() -> None:
    from lightning_deepcompile.runtime import load_extension

    dist.init_process_group("gloo")
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    runtime = load_extension().Runtime(group, group, torch.device("cpu"))
    base, ops, empty = runtime.serial << 32, torch.ops.dc, torch.empty(0)
    ids = [base | i for i in range(3)]
    shards = [torch.full((2, 3), float(10 * i + rank)) for i in range(3)]
    for i in range(3):
        runtime.setup.register_param(ids[i], f"p{i}", [2 * world, 3], shards[i])
    runtime.setup.register_graph(base, ids, stage=2)
    runtime.setup.register_graph(base | 1, ids, stage=3)

    def use(graph: int, i: int) -> Tensor:
        ops.allgather_param(empty, graph, ids[i], torch.bfloat16)
        full = ops.wait_allgather(empty, graph, ids[i]).clone()
        ops.release_param(empty, graph, ids[i], 1)
        return full

    def counts() -> tuple[int, int]:
        stats = runtime.stats()
        runtime.reset_stats()
        return stats["gathers"], stats["gather_hits"]

    # First use decides the order; afterwards everything stays until the weights change.
    for i in (2, 0, 2, 0):
        use(base, i)
    assert counts() == (2, 2)
    for shard in shards:
        shard += 100
    runtime.parameters.invalidate()
    assert runtime.stats()["arena_bytes"] == 0  # what is gathered next may be of other sizes
    runtime.parameters.invalidate()
    runtime.parameters.refetch()
    assert counts() == (2, 0)  # both again at once, before anybody asks
    assert use(base, 0).tolist() == [[float(100 + r)] * 3 for r in range(world) for _ in range(2)]
    assert counts() == (0, 1)
    # A parameter that no step used since is not fetched again.
    runtime.parameters.invalidate()
    runtime.parameters.refetch()
    assert counts() == (1, 0)
    # A stage-3 graph frees what it releases, except persistent parameters.
    runtime.parameters.set_persistent(ids[1])
    use(base | 1, 0)
    use(base | 1, 1)
    use(base | 1, 1)
    runtime.parameters.invalidate(ids[1])
    use(base | 1, 1)
    assert counts() == (2, 2)
    runtime.close()


def test_parameters_stay_where_the_stage_says() -> None:
    run_ranks(_residency, 2)


def _no_growth() -> tuple[int, int]:
    """Bytes in the arenas after 100 and after 1000 cycles of gathers and reductions."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from lightning_deepcompile.runtime import load_extension

    group, ops = dist.group.WORLD, torch.ops.dc
    runtime = load_extension().Runtime(group, group, torch.device("cpu"), reduce_bucket_size=100)
    base = runtime.serial << 32
    ids = [base | i for i in range(8)]
    for i, id_ in enumerate(ids):
        runtime.setup.register_param(id_, f"p{i}", [10, i + 1], torch.zeros(10, i + 1), torch.zeros(10, i + 1))
    runtime.setup.register_graph(base, ids)
    peaks = []
    for cycle in range(1000):
        runtime.passes.start_forward()
        for id_ in ids:
            ops.allgather_param(torch.empty(0), base, id_, torch.bfloat16)
            ops.wait_allgather(torch.empty(0), base, id_)
            ops.release_param(torch.empty(0), base, id_, 1)
        runtime.passes.end_forward()
        runtime.passes.start_backward(cycle % 3 == 2)
        for i, id_ in enumerate(ids):
            ops.reduce_grad(torch.ones(10, i + 1, dtype=torch.bfloat16), base, id_)
        ops.end_backward(base)
        if cycle in (99, 999):
            peaks.append(runtime.stats()["arena_peak_bytes"])
    return peaks[0], peaks[1]


def test_memory_does_not_grow_over_a_thousand_cycles() -> None:
    ((early, late),) = run_ranks(_no_growth, 1)
    assert 0 < late <= early and late < 100_000, (early, late, os.environ.get("RANK"))
