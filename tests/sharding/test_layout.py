"""The places of shards, for any shapes and any number of ranks, and the parameters of each block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_deepcompile.sharding.layout import ALIGNMENT, ParamSpec, assign_blocks, lay_out_flat


@st.composite
def specs(draw: Callable[..., list[ParamSpec]]) -> list[ParamSpec]:
    count = draw(st.integers(1, 8))
    return [
        ParamSpec(
            name=f"p{k}",
            shape=tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))),
            dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64])),
            requires_grad=draw(st.booleans()),
            block=draw(st.sampled_from(["a", "b"])),
            gather_dtype=torch.float32,
        )
        for k in range(count)
    ]


@settings(deadline=None)
@given(specs=specs(), world=st.integers(1, 70))
def test_shards_cover_every_parameter_and_nothing_twice(specs: list[ParamSpec], world: int) -> None:
    flats = lay_out_flat(specs, world)
    placed = [(flat, shard) for flat in flats for shard in flat.shards]
    assert sorted(shard.spec.name for _, shard in placed) == sorted(spec.name for spec in specs)
    for flat, shard in placed:
        # All ranks have the same shape, which holds the rows of each; together they are the parameter's, in order.
        rows = [shard.rows_of(rank) for rank in range(world)]
        assert [r for low, high in rows for r in range(low, high)] == list(range(shard.spec.shape[0]))
        assert max(high - low for low, high in rows) <= shard.rows_padded
        assert (shard.rows_padded - 1) * world < shard.spec.shape[0]  # no more padding than equal shapes need
        # Gathered shards, one after another, begin with the parameter: every rank but the last that has rows is full.
        assert all(low == min(rank * shard.rows_padded, shard.spec.shape[0]) for rank, (low, _) in enumerate(rows))
        assert shard.shard_shape == (shard.rows_padded, *shard.spec.shape[1:])
        assert shard.shard_numel == torch.Size(shard.shard_shape).numel()
        assert (flat.block, flat.dtype) == (shard.spec.block, shard.spec.dtype)
    for flat in flats:
        end = 0
        for shard in flat.shards:
            assert shard.offset % ALIGNMENT == 0 and shard.offset >= end
            assert shard.offset * flat.dtype.itemsize % 16 == 0
            end = shard.offset + shard.shard_numel
        assert end <= flat.numel < end + ALIGNMENT
        assert len({shard.spec.requires_grad for shard in flat.shards}) == 1
    assert len({(c.block, c.dtype, c.shards[0].spec.requires_grad) for c in flats}) == len(flats)


class Stack(nn.Module):
    """A custom module around a list of layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Layer(nn.Module):
    """A layer with a list inside: experts, or an MLP."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(experts))


class Model(nn.Module):
    """Parameters before, between and after two stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(3, 2)
        self.positions = nn.Embedding(3, 2)
        self.encoder = Stack(Layer(), Layer())
        self.between = nn.Linear(2, 2)
        self.decoder = Stack(Layer(), Layer())
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 3)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("module", "blocks"),
    [
        pytest.param(
            Model(),
            ["tokens+positions", "encoder.layers.0", "encoder.layers.1", "between", "decoder.layers.0",
             "decoder.layers.1", "norm+head"],
            id="runs between stacks",
        ),
        pytest.param(mlp(), ["0", "2"], id="a Sequential as the model"),
        pytest.param(nn.ModuleDict({"net": mlp()}), ["net.0", "net.2"], id="a Sequential inside"),
        pytest.param(Stack(mlp(), mlp()), ["layers.0", "layers.1"], id="layers that are Sequentials"),
        pytest.param(Stack(Layer(8), Layer(8)), ["layers.0", "layers.1"], id="experts stay with their layer"),
        pytest.param(Stack(mlp()), ["layers.0.0", "layers.0.2"], id="a list of one is not repeated"),
        pytest.param(nn.Linear(2, 2), ["weight+bias"], id="no list"),
        pytest.param(
            nn.Sequential(nn.Embedding(3, 2), nn.Sequential(mlp(), mlp()), nn.Linear(2, 3)),
            ["0", "1.0", "1.1", "2"],
            id="a stack in a Sequential",
        ),
        pytest.param(
            nn.Sequential(nn.Embedding(3, 2), Stack(Layer(), Layer()), nn.Linear(2, 3)),
            ["0", "1.layers.0", "1.layers.1", "2"],
            id="a stack in a module in a Sequential",
        ),
        pytest.param(
            nn.ModuleList([nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer(), Layer())]),
            ["0.0", "0.1", "1.0", "1.1", "1.2"],
            id="stages of layers",
        ),
        pytest.param(
            nn.ModuleList(nn.ModuleList([Layer(), mlp()]) for _ in range(2)), ["0", "1"], id="layers that are lists"
        ),
    ],
)  # fmt: skip
def test_blocks(module: nn.Module, blocks: list[str]) -> None:
    names = [name for name, _ in module.named_parameters()]
    assigned = assign_blocks(module, names)
    assert sorted(assigned) == sorted(names)
    assert list(dict.fromkeys(assigned[name] for name in names)) == blocks


def test_a_parameter_of_the_model_itself_joins_the_run() -> None:
    module = Model()
    module.scale = nn.Parameter(torch.ones(2))
    names = ["scale", *(name for name, _ in module.named_parameters() if name != "scale")]
    assert assign_blocks(module, names)["scale"] == assign_blocks(module, names)["tokens.weight"] == "scale+positions"


def test_a_run_interrupted_by_a_list_is_two_blocks() -> None:
    """One block would stay gathered through the whole list between its parameters."""
    blocks = assign_blocks(Model(), [name for name, _ in Model().named_parameters()])
    assert blocks["tokens.weight"] != blocks["between.weight"] != blocks["head.weight"]
