"""`device_mesh="auto"`: the smallest group of whole nodes that fits, decided alike on all ranks, told in one line."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
from cases import Record, assert_same_training, train
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from multiprocess import run_ranks
from test_handover import Small
from torch import nn

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.ranks.mesh import sharing_groups, smallest_that_fits
from lightning_deepcompile.sharding.wire_dtypes import WireDtypes
from lightning_deepcompile.trainer import auto_mesh
from lightning_deepcompile.trainer.auto_mesh import choose_mesh

LOGGER = "lightning_deepcompile"


@given(nodes=st.integers(1, 600), per_node=st.integers(1, 16), missing=st.integers(0, 15), data=st.data())
def test_the_smallest_group_of_whole_nodes_that_fits_or_all_ranks(
    nodes: int, per_node: int, missing: int, data: st.DataObject
) -> None:
    world = max(nodes * per_node - missing, 1)
    groups = sharing_groups(world, per_node)
    if per_node == 1 or world % per_node:
        assert groups == [world]
    else:
        assert groups == [group for group in range(per_node, world + 1, per_node) if world % group == 0]
    sizes = st.lists(st.integers(0, 1 << 50), min_size=len(groups), max_size=len(groups))
    needs, room = data.draw(sizes), data.draw(st.integers(1, 1 << 50))
    index = smallest_that_fits(needs, room)
    assert all(need > room for need in needs[:index])
    assert needs[index] <= room or index == len(groups) - 1


def _needed(layers: int, rows: int, columns: int, shards: int, stage: int) -> int:
    """Bytes of a rank for equal layers in fp32: the sizes written out once more, of matrices alone."""
    shard = -(-(-(-rows // shards) * columns) // 128) * 128
    gathered = min(layers, 3) if stage == 3 else layers  # the one in use and two ahead
    unreduced = layers if stage == 1 else 3  # the one that is computed and two that wait
    # Parameters, gradients and two states; whole layers; one that is cast on its way.
    return 4 * (4 * layers * shard + (gathered + unreduced) * shard * shards + shard)


@given(
    nodes=st.sampled_from([1, 2, 3, 4, 6, 12]),
    per_node=st.integers(1, 8),
    layers=st.integers(1, 5),
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    stage=st.sampled_from([1, 2, 3]),
    target=st.integers(0, 5),
    beside=st.integers(-4, 4),
)
@settings(deadline=None)
def test_the_choice_follows_from_sizes(
    nodes: int, per_node: int, layers: int, shape: tuple[int, int], stage: int, target: int, beside: int
) -> None:
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(*shape, bias=False) for _ in range(layers))
    world, (columns, rows) = nodes * per_node, shape
    groups = [count * per_node for count in range(1, nodes + 1) if nodes % count == 0]
    needs = [_needed(layers, rows, columns, group, stage) for group in groups]
    budget = max(int(needs[target % len(groups)] / 0.75) + beside, 1)  # a few bytes decide
    chosen = choose_mesh(
        model,
        CompileConfig(memory_budget=f"{budget}B"),
        stage=stage,
        dtypes=WireDtypes(),
        device_type="cpu",
        world_size=world,
        per_node=per_node,
    )
    fitting = [group for group, need in zip(groups, needs, strict=True) if need <= int(budget * 0.75)]
    group = fitting[0] if fitting and per_node > 1 else world
    assert chosen == (None if group == world else (world // group, group))


def _told(caplog: pytest.LogCaptureFixture, world: int, per_node: int, **settings: Any) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, LOGGER):
        choose_mesh(
            nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(3)),
            CompileConfig(**settings),
            stage=3,
            dtypes=WireDtypes(torch.bfloat16),
            device_type="cpu",
            world_size=world,
            per_node=per_node,
        )
    (record,) = caplog.records
    return record.getMessage()


def test_the_line_says_what_why_and_by_which_numbers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 16 bytes of each of 48 Ki elements stay, over the ranks; three layers in bf16 are gathered, three gradients wait.
    monkeypatch.setattr(auto_mesh, "available_host_memory", lambda: 4 << 30)
    line = _told(caplog, 16, 4)
    assert "the 4 ranks of a node share the parameters, in 4 replicas. " in line
    assert "A rank needs 392.0 KiB: 192.0 KiB for its shards of parameters, gradients and optimizer states" in line
    assert line.endswith("The smallest device has 1.0 GiB, of which these may take 691.2 MiB.")  # 0.9 · 0.75 of it
    line = _told(caplog, 16, 4, memory_budget="400KiB")
    assert "the 8 ranks of 2 nodes share the parameters, in 2 replicas (among 4 a rank would need 392.0 KiB)" in line
    assert line.endswith("of which these may take 300.0 KiB.")
    assert "all 16 ranks share the parameters (among 8 " in (line := _told(caplog, 16, 4, memory_budget="330KiB"))
    assert "not enough" not in line
    line = _told(caplog, 16, 4, memory_budget="300KiB")
    assert "all 16 ranks share the parameters" in line and "225.0 KiB, which is not enough" in line
    for world, per_node, reason in [(4, 4, "there is one node"), (4, 1, "one rank each"), (8, 3, "nodes of 3 evenly")]:
        assert f"all {world} ranks share the parameters, as " in (line := _told(caplog, world, per_node))
        assert reason in line and "not enough" not in line


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "device_mesh" in record.getMessage():
            self.lines.append(record.getMessage())


def _inspect(trainer: Trainer) -> Any:
    ranks = trainer.strategy.engine.model.ranks
    assert trainer.strategy.sharding_strategy.name == ("HYBRID_SHARD" if ranks.replicas > 1 else "FULL_SHARD")
    return ranks.replicas, ranks.shards, ranks.shard_rank


def _on_two_nodes() -> tuple[list[Record], list[str]]:
    """Trains as on two hosts of two ranks each: once with enough memory, once with too little on the last rank."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler := _Lines())
    records = []
    for budget in ("1GiB", "20KiB" if rank == 3 else "1GiB"):
        config = CompileConfig(region_backend="eager", schedule=None, memory_budget=budget)
        strategy = DeepCompileStrategy(sharding_strategy="HYBRID_SHARD", device_mesh="auto", compile=config)
        records.append(
            train(
                Small,
                strategy,
                world_size=4,
                rank=rank,
                steps=3,
                accumulate=2,
                gradient_clip_val=0.05,
                inspect=_inspect,
                devices=2,
                num_nodes=2,
            )
        )
    logger.removeHandler(handler)
    return records, handler.lines


@pytest.mark.timeout(240)
def test_two_nodes_train_as_one_process() -> None:
    ranks = run_ranks(_on_two_nodes, 4)
    expected = train(Small, "auto", world_size=1, rank=0, data_world=4, steps=3, accumulate=2, gradient_clip_val=0.05)
    for rank, (records, lines) in enumerate(ranks):
        assert [record.extra for record in records] == [(2, 2, rank % 2), (1, 4, rank)]
        for record in records:
            assert_same_training(record, expected, params=True)
        assert len(lines) == (2 if rank == 0 else 0)
    roomy, narrow = ranks[0][1]
    assert "the 2 ranks of a node share the parameters, in 2 replicas." in roomy
    assert "all 4 ranks share the parameters (among 2 a rank would need" in narrow and "take 15.0 KiB" in narrow


def test_one_process_and_what_cannot_be_sharded() -> None:
    strategy = DeepCompileStrategy(device_mesh="auto", compile=CompileConfig(region_backend="eager"))
    record = train(Small, strategy, world_size=1, rank=0, steps=1, inspect=_inspect)
    assert record.extra == (1, 1, 0)

    def lazy() -> Any:
        module = Small()
        module.unused = nn.LazyLinear(3)
        return module

    with pytest.raises(ValueError, match=r"'unused\.weight' is lazy"):
        train(lazy, DeepCompileStrategy(device_mesh="auto"), world_size=1, rank=0, steps=1)


@pytest.mark.parametrize(("mesh", "meant"), [("nodes", ""), ("Auto", " Did you mean 'auto'\\?")])
def test_another_word_is_refused(mesh: Any, meant: str) -> None:
    choices = r"expected a tuple of two numbers, a DeviceMesh, 'auto' or None\."
    with pytest.raises(ValueError, match=rf"DeepCompileStrategy\(device_mesh='{mesh}'\): {choices}{meant}$"):
        DeepCompileStrategy(device_mesh=mesh)
