"""Small shards travel packed: the same bits as one by one, whatever shapes, dtypes and memory they have."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, Record, train
from hypothesis import given, settings
from hypothesis import strategies as st
from multiprocess import join, run_ranks
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
CAST = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float64}
"""Dtypes in which parameters are gathered, too; the others are not cast."""

Spec = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape, dtype, and whether the shard lies behind the one before."""


class _Side:
    """A runtime with parameters whose shards, and gradients, have memory of their own or lie one after the other."""

    def __init__(self, specs: list[Spec], **options: Any) -> None:
        from lightning_deepcompile.runtime import load_extension

        group, self.device = dist.group.WORLD, torch.device("cpu")
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.runtime = load_extension().Runtime(group, group, self.device, timeout=60.0, **options)
        self.graph = self.runtime.serial << 32
        self.ids = [self.graph | i for i in range(len(specs))]
        shards, self.grads = self._memory(specs, seed=self.rank), self._memory(specs, seed=100)
        for id_, shard, grad, (shape, *_) in zip(self.ids, shards, self.grads, specs, strict=True):
            self.runtime.setup.register_param(id_, f"p{id_ - self.graph}", list(shape), shard, grad)
        self.runtime.setup.register_graph(self.graph, self.ids)
        self.runtime.setup.validate()
        self.runtime.reset_stats()

    def _memory(self, specs: list[Spec], seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tensors: list[Tensor] = []
        block, end = torch.empty(0, dtype=torch.uint8), 0
        for shape, dtype, behind in specs:
            rows = [-(-shape[0] // self.ranks), *shape[1:]]
            elements = torch.Size(rows).numel()
            if not behind or block.dtype != dtype:
                block, end = torch.zeros(2**14, dtype=dtype), 0
            shard = block[end : end + elements].view(rows)
            end += -(-elements // 128) * 128
            tensors.append(shard.copy_(torch.randn(rows, generator=generator, dtype=torch.float64)))
        return tensors

    def _gather(self, dtypes: list[torch.dtype] | None) -> list[Tensor]:
        torch.ops.dc.prefetch_params_fused(self.graph, [], self.ids, dtypes)
        whole = [tensor.clone() for tensor in torch.ops.dc.wait_allgather_fused(self.graph, self.ids)]
        torch.ops.dc.release_params_fused(self.graph, self.ids)
        return whole

    def step(self, specs: list[Spec]) -> tuple[list[Tensor], list[Tensor]]:
        """Whole parameters, and this rank's means of gradients that two passes add up."""
        whole = self._gather(None)
        targets = [CAST.get(dtype, dtype) for _, dtype, _ in specs]
        for one, cast, target in zip(whole, self._gather(targets), targets, strict=True):
            assert cast.dtype == target and torch.equal(cast, one.to(target))
        for count in range(2):
            generator = torch.Generator().manual_seed(10 * count + self.rank)
            made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape, *_ in specs]
            self.runtime.passes.start_forward()
            self.runtime.passes.start_backward(count == 1)
            sent = [gradient.to(dtype) for gradient, (_, dtype, _) in zip(made, specs, strict=True)]
            torch.ops.dc.reduce_grads_fused(self.graph, sent, self.ids)
            self.runtime.passes.end_backward(self.graph)
        return whole, [grad.clone() for grad in self.grads]


def _both(specs: list[Spec], below: int) -> tuple[Any, Any, dict[str, int]]:
    packed = _Side(specs, pack_below=below, pack_reductions=True)
    alone = _Side(specs)
    results = packed.step(specs), alone.step(specs)
    stats = packed.runtime.stats()
    assert alone.runtime.stats()["packed"] == 0
    packed.runtime.close()
    alone.runtime.close()
    return *results, stats


def _shapes() -> st.SearchStrategy[list[Spec]]:
    shape = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
    return st.lists(st.tuples(shape, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=7)


def _random_groups(examples: int) -> int:
    join("cpu")
    seen = 0

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(_shapes(), st.sampled_from([1, 64, 10**6]))
    def equal(specs: list[Spec], below: int) -> None:
        nonlocal seen
        (whole, grads), (whole_alone, grads_alone), stats = _both(specs, below)
        for one, other in zip(whole, whole_alone, strict=True):
            assert torch.equal(one, other)
        for one, other in zip(grads, grads_alone, strict=True):
            if dist.get_world_size() == 2:
                assert torch.equal(one, other)
            else:  # the order in which gloo adds depends on where in a message an element is
                torch.testing.assert_close(one, other)
        seen += stats["packed"]

    equal()
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_packed_groups_are_those_of_single_operations(ranks: int) -> None:
    assert min(run_ranks(_random_groups, ranks, 25)) > 0


def _counts() -> list[int]:
    join("cpu")
    specs = [((8, 4), torch.float32, False), ((6,), torch.float32, True), ((64, 64), torch.float32, True)]
    counts = []
    for below in (0, 12, 64, 64 * 64 * 4):
        *_, stats = _both(specs, below)
        counts.append(stats["packed"])
    dist.destroy_process_group()
    return counts


def test_what_is_larger_than_the_bound_travels_by_itself() -> None:
    """Twice gathered and twice reduced; one small tensor alone has nothing to be packed with."""
    assert run_ranks(_counts, 2) == [[0, 0, 4 * 2, 4 * 3]] * 2


def _trained(case: str, stage: int, settings: list[dict[str, Any]]) -> list[Record]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    return [
        train(
            CASES[case],
            DeepCompileStrategy(
                stage=stage,
                compile=CompileConfig(region_backend="eager", schedule=None, **one),
            ),
            world_size=int(os.environ["WORLD_SIZE"]),
            rank=int(os.environ["RANK"]),
            accumulate=2,
            inspect=lambda trainer: trainer.strategy.engine.runtime.stats()["packed"],
        )
        for one in settings
    ]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_trains_alike_to_the_bit(ranks: int, stage: int) -> None:
    """By default, on three ranks too: gathers move bytes, and gradients are packed only where that changes none."""
    for packed, alone in run_ranks(_trained, ranks, "gpt", stage, [{}, {"pack_shards": False}]):
        assert packed.losses == alone.losses
        for name, parameter in packed.params.items():
            assert torch.equal(parameter, alone.params[name]), name
        assert packed.extra > 0 and alone.extra == 0


def test_gradients_travel_packed_where_their_last_bits_may_change() -> None:
    packed, alone = run_ranks(
        _trained, 3, "gpt", 3, [{"rounding": "any"}, {"rounding": "any", "pack_shards": False}]
    )[0]  # fmt: skip
    plain = run_ranks(_trained, 3, "gpt", 3, [{}])[0][0]
    assert packed.extra > plain.extra > alone.extra == 0
    for name, parameter in packed.params.items():
        torch.testing.assert_close(parameter, alone.params[name], rtol=1e-5, atol=1e-6)


def test_bounds() -> None:
    from lightning_deepcompile import CompileConfig

    auto = CompileConfig()
    assert [auto.pack_below(*on, tight=False) for on in (("cpu", 2), ("cuda", 8), ("cuda", 512))] == [2**17, 0, 2**17]
    assert CompileConfig(memory_budget="1GiB").pack_below("cpu", 2, tight=False) == 0
    assert auto.pack_below("cuda", 512, tight=True) == 0
    assert CompileConfig(pack_shards="1MiB").pack_below("cuda", 512, tight=True) == 2**20
    assert CompileConfig(pack_shards="1MiB").pack_below("cuda", 2, tight=False) == 2**20
    assert CompileConfig(pack_shards=False).pack_below("cpu", 2, tight=False) == 0
    assert auto.packs_reductions("cpu", 2) and not auto.packs_reductions("cpu", 3)
    assert auto.packs_reductions("cuda", 3) and CompileConfig(rounding="any").packs_reductions("cpu", 3)
