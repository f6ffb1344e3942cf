"""Graphs gather what parameters alone determine: which values these are, and that shards give the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tracing import Captured, Simulator, capture

from lightning_deepcompile.plan.known_passes import BUILTIN_PASSES
from lightning_deepcompile.plan.optimize import apply_passes
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.program.derive import derive
from lightning_deepcompile.program.graph import args_of, is_gather
from lightning_deepcompile.program.lower import RegionCompiler
from lightning_deepcompile.program.printer import format_program
from lightning_deepcompile.program.program import DerivedBlock, ParamInfo

FP8 = torch.float8_e4m3fn
SHARDS = 3


class Matrix(nn.Module):
    """A matrix without zeros or negative elements, whose seven rows three ranks cannot divide."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.rand(7, 6, generator=generator) + 0.5, requires_grad=False)


Step = Callable[[Any, Tensor], Tensor]


def scaled(weight: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    scale = (448 / amax.double().clamp(min=1e-12)).float()
    return (weight.float() * scale).clamp(-448, 448).to(FP8), scale


def tensorwise(module: Any, x: Tensor) -> Tensor:
    narrow, scale = scaled(module.weight.t(), module.weight.t().abs().max())
    return x @ (narrow.float() / scale)


def rowwise(module: Any, x: Tensor) -> Tensor:
    narrow, scale = scaled(module.weight.t(), module.weight.t().abs().amax(0, keepdim=True))
    return x @ (narrow.float() / scale)


def columnwise(module: Any, x: Tensor) -> Tensor:
    narrow, scale = scaled(module.weight, module.weight.abs().amax(0, keepdim=True))
    return x @ (narrow.float() / scale).t()


def least_and_most(module: Any, x: Tensor) -> Tensor:
    # All elements are positive: the zeros behind a rank's rows would be the least.
    least, most = module.weight.min(), module.weight.max()
    narrow = ((module.weight - least) / (most - least) * 255).round().to(torch.uint8)
    return x @ (narrow.float() * ((most - least) / 255) + least).t()


def most_of_negatives(module: Any, x: Tensor) -> Tensor:
    negative = -module.weight.view(7, 2, 3).transpose(0, 1)  # the rows are the second dimension
    narrow, scale = scaled(negative, negative.amax().abs())
    return x @ (narrow.transpose(0, 1).reshape(7, 6).float() / scale).t()


def brain_floats(module: Any, x: Tensor) -> Tensor:
    return (x.bfloat16() @ module.weight.bfloat16().t()).float()


def only_the_maximum(module: Any, x: Tensor) -> Tensor:
    return x * module.weight.abs().max()


DERIVED: list[Step] = [
    tensorwise, rowwise, columnwise, least_and_most, most_of_negatives, brain_floats, only_the_maximum
]  # fmt: skip


def also_wide(module: Any, x: Tensor) -> Tensor:
    return tensorwise(module, x) + F.linear(x, module.weight)


def scaled_by_inputs(module: Any, x: Tensor) -> Tensor:
    narrow, scale = scaled(module.weight.t(), module.weight.abs().max() * x.mean().abs())
    return x @ (narrow.float() / scale)


def scaled_by_sums(module: Any, x: Tensor) -> Tensor:  # their last bits depend on the order of addition
    narrow, scale = scaled(module.weight.t(), module.weight.abs().mean() * 4)
    return x @ (narrow.float() / scale)


def scaled_twice(module: Any, x: Tensor) -> Tensor:
    once = module.weight.t() / module.weight.abs().max()
    narrow, scale = scaled(once, (once - 1).abs().max())
    return x @ (narrow.float() / scale)


def masked(module: Any, x: Tensor) -> Tensor:
    narrow, scale = scaled(module.weight.t() * (x[:1, :1] > 0), module.weight.abs().max())
    return x @ (narrow.float() / scale)


def row_by_row(module: Any, x: Tensor) -> Tensor:
    narrow, scale = scaled(module.weight * torch.arange(7.0)[:, None], module.weight.abs().max())
    return x @ (narrow.float() / scale).t()


def no_narrower(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight / module.weight.abs().max())


PLAIN: list[Step] = [
    also_wide, scaled_by_inputs, scaled_by_sums, scaled_twice, masked, row_by_row, no_narrower
]  # fmt: skip


def compiled() -> Callable[..., Any]:
    return functools.partial(RegionCompiler("eager"), kind="inference")


def on_shards(
    captured: Captured, blocks: tuple[DerivedBlock, ...], shards: int
) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Returns the gathered values by id, and the others in the order in which programs get them."""
    whole, same = {}, []
    for block in blocks:
        parts = []
        for source in block.sources:
            full = captured.full[source]
            rows = -(-len(full) // shards)
            padded = torch.cat([full, full.new_zeros(rows * shards - len(full), *full.shape[1:])])
            parts.append((padded.split(rows), (torch.arange(rows * shards) < len(full)).split(rows)))
        maxima = []
        if block.compare is not None:
            masks = [parts[place][1] for place in block.masked]
            mine = [block.compare([*(p[0][r] for p in parts), *(m[r] for m in masks)])[0] for r in range(shards)]
            maxima = [torch.stack(mine).amax(0)]
            assert maxima[0].numel() == block.maxima
        made = []
        for rank in range(shards):
            shapes = [(parts[0][0][0].shape[0], *v.shape[1:]) if v.is_gathered else v.shape for v in block.values]
            buffers = [torch.empty(shape, dtype=v.dtype) for shape, v in zip(shapes, block.values, strict=True)]
            block.compute([*(p[0][rank] for p in parts), *maxima, *buffers])
            made.append(buffers)
        for value, *pieces in zip(block.values, *made, strict=True):
            if value.is_gathered:
                whole[value.id] = torch.cat(pieces)[: value.shape[0]]
            else:
                assert all(piece.equal(pieces[0]) for piece in pieces)
                same.append(pieces[0])
    return whole, same


@pytest.mark.parametrize("step", DERIVED, ids=lambda step: step.__name__)
@pytest.mark.parametrize("shards", [1, SHARDS, 8])  # one of eight ranks has no row
def test_shards_give_the_same_bits(step: Step, shards: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    expected = step(Matrix(), x)
    captured = capture(Matrix(), x, step=step, world=shards)
    assert captured.inference is not None
    blocks = derive(captured.inference, captured.params, shards, compiled())
    assert len(blocks) == 1
    whole, same = on_shards(captured, blocks, shards)
    assert sum(value.numel() * value.itemsize for value in whole.values()) <= 7 * 6 * 2
    simulator = Simulator({**captured.full, **whole})
    (result,) = simulator.interpret(captured.inference, [*captured.args, *same])
    assert result.equal(expected)


@pytest.mark.parametrize("step", PLAIN, ids=lambda step: step.__name__)
def test_what_is_gathered_as_it_is(step: Step) -> None:
    captured = capture(Matrix(), torch.randn(4, 6), step=step, world=SHARDS)
    assert captured.inference is not None
    assert derive(captured.inference, captured.params, SHARDS, compiled()) == ()
    gathers = [node for node in captured.inference.graph.nodes if is_gather(node)]
    assert [args_of(node)[1:] for node in gathers] == [(0, [7, 6], torch.float32)]


def test_a_quantised_parameter_that_leaves_is_a_copy() -> None:
    """The runtime overwrites derived values when parameters have changed."""

    def both(module: Any, x: Tensor) -> Any:
        amax = module.weight.abs().max()
        narrow, scale = scaled(module.weight, amax)
        return narrow.float() / scale, amax

    captured = capture(Matrix(), torch.randn(4, 6), step=both, world=SHARDS)
    assert captured.inference is not None
    blocks = derive(captured.inference, captured.params, SHARDS, compiled())
    whole, same = on_shards(captured, blocks, SHARDS)
    simulator = Simulator({**captured.full, **whole})
    made = simulator.interpret(captured.inference, [*captured.args, *same])
    assert made[1].equal(captured.full[0].abs().max())
    assert not any(one.data_ptr() == other.data_ptr() for one in made for other in same)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Matrix() for _ in range(2))
        self.bias = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(tensorwise(layer, x)[:, :6])
        return x + self.bias


def test_the_printed_program() -> None:
    captured = capture(Two().requires_grad_(False), torch.randn(4, 6), world=2)
    assert captured.inference is not None
    blocks = derive(captured.inference, captured.params, 2, compiled())
    for value in (value for block in blocks for value in block.values if value.is_gathered):
        source = captured.params[value.source]
        captured.params[value.id] = ParamInfo(value.id, f"{source.name} as FP8", source.block, 48, value.dtype)
    program = apply_passes(captured.lower("inference", derived=blocks), PlanSettings(), [BUILTIN_PASSES["zero3"]])
    assert (
        format_program(program)
        == """\
inference [lower -> zero3]: 3 regions, 3 distinct
  derive   layers.0 (1 param, 192 B float32 -> 48 B float8_e4m3fn, 1 maximum exchanged)
  derive   layers.1 (1 param, 192 B float32 -> 48 B float8_e4m3fn, 1 maximum exchanged)
  gather   layers.0 (1 param, 48 B float8_e4m3fn)
  wait     layers.0 (1 param, 48 B float8_e4m3fn)
  compute  region_0 = r0 (layers.0; 5 ops)
  release  layers.0 (1 param, 48 B float8_e4m3fn)
  gather   layers.1 (1 param, 48 B float8_e4m3fn)
  wait     layers.1 (1 param, 48 B float8_e4m3fn)
  compute  region_1 = r1 (layers.1; 6 ops)
  release  layers.1 (1 param, 48 B float8_e4m3fn)
  gather   bias (1 param, 24 B float32)
  wait     bias (1 param, 24 B float32)
  compute  region_2 = r2 (bias; 2 ops)
  release  bias (1 param, 24 B float32)"""
    )


def test_numbers_follow_from_what_is_computed() -> None:
    """Ranks, and runs, compile graphs in another order: forward and backward, training and validation."""
    numbers = []
    for step in (tensorwise, lambda module, x: tensorwise(module, 2 * x), rowwise):
        captured = capture(Matrix(), torch.randn(4, 6), step=step, world=2)
        assert captured.inference is not None
        blocks = derive(captured.inference, captured.params, 2, compiled())
        numbers.append([value.number for block in blocks for value in block.values])
    assert numbers[0] == numbers[1] and not set(numbers[0]) & set(numbers[2])
    assert all(0 < number < 1 << 31 for number in (*numbers[0], *numbers[2]))
