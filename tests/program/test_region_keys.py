"""Keys tell regions apart by what they compute, and equal regions are compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Graph, aten
from torch import Tensor, fx, nn
from tracing import capture

from lightning_deepcompile import compat
from lightning_deepcompile.program.extract import extract_region
from lightning_deepcompile.program.lower import RegionCompiler
from lightning_deepcompile.program.regions import cut_regions


def _key(write: Callable[[Graph], fx.Node]) -> str:
    g = Graph()
    (region,) = g.regions(write(g))
    return extract_region(fx.GraphModule(nn.Module(), g.graph), region).key


def _layer(
    size: int = 4, scale: float = 2.0, op: Any = aten.exp.default, ds_id: int = 0, dtype: torch.dtype = torch.float32
) -> Callable[[Graph], fx.Node]:
    def write(g: Graph) -> fx.Node:
        x = g.call(aten.mul.Tensor, g.input(f"x{ds_id}", size, dtype=dtype), g.gather(ds_id, size))
        return g.call(aten.mul.Tensor, g.call(op, x), scale)

    return write


def test_equal_regions_share_a_key() -> None:
    assert _key(_layer(ds_id=0)) == _key(_layer(ds_id=7))


@pytest.mark.parametrize("change", [{"size": 5}, {"scale": 3.0}, {"op": aten.sin.default}, {"dtype": torch.bfloat16}])
def test_other_shapes_operators_constants_and_dtypes_have_other_keys(change: dict[str, Any]) -> None:
    assert _key(_layer()) != _key(_layer(**change))


def test_strides_outputs_and_literals_count() -> None:
    def turned(g: Graph) -> fx.Node:
        return g.call(aten.exp.default, g.call(aten.permute.default, g.input("x", 4, 4), [1, 0]))

    def strided(g: Graph) -> fx.Node:
        x = g.input("x", 4, 4)
        x.meta["val"] = x.meta["val"].t()
        return g.call(aten.exp.default, g.call(aten.permute.default, x, [1, 0]))

    def integer(value: Any) -> Callable[[Graph], fx.Node]:
        return lambda g: g.call(aten.mul.Tensor, g.input("x", 4), value)

    assert _key(turned) != _key(strided)
    assert _key(integer(1)) != _key(integer(1.0))  # an integer keeps the dtype of integer tensors
    assert _key(integer(float("nan"))) == _key(integer(float("nan")))


def _on(first: str, second: str) -> Callable[[Graph], fx.Node]:
    def write(g: Graph) -> fx.Node:
        x = g.input("x", 4)
        with g.mode:
            x.meta["val"] = torch.empty(4, device=first)
        there = g.call(aten.full.default, [4], 1.0, device=torch.device(second))
        return g.call(aten.add.Tensor, x, g.call(aten._to_copy.default, there, device=torch.device(first)))

    return write


def test_the_number_of_a_ranks_gpu_is_no_part_of_a_key() -> None:
    """Plans are looked up by it on all ranks, and a rank that did not find its program would gather otherwise."""
    assert _key(_on("cuda:0", "cuda:0")) == _key(_on("cuda:3", "cuda:3"))
    assert _key(_on("cuda:0", "cuda:1")) == _key(_on("cuda:1", "cuda:0")) != _key(_on("cuda:0", "cuda:0"))
    assert _key(_on("cpu", "cpu")) != _key(_on("cuda:0", "cuda:0"))


def test_code_for_another_gpu_is_not_shared() -> None:
    compiler = RegionCompiler("eager")
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        g = Graph()
        (region,) = g.regions(_on(device, device)(g))
        compiler(extract_region(fx.GraphModule(nn.Module(), g.graph), region), "forward")
    assert (compiler.requested, compiler.compiled) == (3, 2)


def _constant_key(value: Tensor, device: str = "cpu") -> str:
    g = Graph()
    root = nn.Module()
    root.register_buffer("_tensor_constant0", value)
    constant = g.graph.get_attr("_tensor_constant0")
    constant.meta["val"] = g.mode.from_tensor(value)
    y = g.call(aten.mul.Tensor, g.input("x", *value.shape), constant)
    g.graph.output((y,))
    parent = fx.GraphModule(root, g.graph)
    (region,) = cut_regions(parent.graph, str)
    extracted = extract_region(parent, region)
    torch.testing.assert_close(extracted.gm(torch.full_like(value, 2.0))[0], value * 2)
    return extracted.key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_constant_tensors_count_by_their_content(dtype: torch.dtype) -> None:
    value = torch.arange(4).to(dtype)
    assert _constant_key(value) == _constant_key(value.clone())
    assert _constant_key(value) != _constant_key(value + 1)
    assert _constant_key(value[:1].squeeze()) != _constant_key(value[1:2].squeeze())  # 0-dim


def test_subgraphs_count_by_their_content() -> None:
    """Higher-order operators refer to graphs, which may hold constants of their own."""

    def key(scale: float, constant: float) -> str:
        body = fx.Graph()
        scaled = body.call_function(aten.mul.Tensor, (body.placeholder("x"), scale))
        body.output(body.call_function(aten.mul.Tensor, (body.get_attr("c"), scaled)))
        inner = nn.Module()
        inner.register_buffer("c", torch.tensor(constant))
        root = nn.Module()
        root.add_module("body", fx.GraphModule(inner, body))
        g = Graph()
        x = g.input("x", 4)
        node = g.graph.call_function(torch.ops.higher_order.invoke_subgraph, (g.graph.get_attr("body"), "body", x))
        node.meta["val"] = x.meta["val"]
        g.graph.output((node,))
        parent = fx.GraphModule(root, g.graph)
        (region,) = cut_regions(parent.graph, str)
        assert region.inputs == [x]
        return extract_region(parent, region).key

    assert key(2.0, 1.0) == key(2.0, 1.0)
    assert len({key(2.0, 1.0), key(3.0, 1.0), key(2.0, 4.0)}) == 3


def test_equal_layers_are_compiled_once() -> None:
    """Layers are equal in forward and backward, except for the first and last, whose surroundings differ."""

    def distinct(depth: int) -> tuple[int, int]:
        net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(depth)))
        captured = capture(net, torch.randn(3, 8, requires_grad=True), step=lambda m, x: m(x).sum())
        compiler = RegionCompiler("eager")
        captured.lower("forward", compiler)
        captured.lower("backward", compiler)
        return compiler.compiled, compiler.requested

    (few, regions), (many, more_regions) = distinct(4), distinct(9)
    assert few == many < regions
    assert more_regions == regions + 2 * 5


def test_symbolic_regions_are_not_shared_between_frames() -> None:
    """Inductor's code for symbolic sizes holds under the guards of one frame: another one's sizes may break them."""
    compiler = RegionCompiler("eager")
    for expected in (1, 2):
        captured = capture(nn.Linear(8, 8), torch.randn(3, 8), dynamic=True)
        captured.lower("forward", compiler)
        assert compiler.compiled == expected


def test_operators_that_need_strides_keep_those_they_were_traced_with() -> None:
    @torch.library.custom_op("region_keys::exact", mutates_args=())
    def exact(x: Tensor) -> Tensor:
        return x.clone()

    exact.register_fake(lambda x: torch.empty_like(x))
    regions: list[Any] = []
    captured = capture(nn.Linear(8, 8), torch.randn(3, 8), step=lambda m, x: m(x).sum() + exact(x.t().exp()).sum())
    captured.lower("forward", lambda extracted, kind: regions.append(extracted) or extracted.gm)
    (node,) = [n for region in regions for n in region.gm.graph.nodes if n.target is exact._opoverload]
    ((value,), _) = node.meta[compat.EXACT_STRIDES]
    assert value.stride() == (1, 8)


def test_every_symbol_of_a_region_is_an_input() -> None:
    """Inductor binds the symbols in a region's sizes to its integer inputs."""
    captured = capture(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        torch.randn(3, 5, 8),
        dynamic=True,
        step=lambda m, x: m(x.flatten(0, 1)).unflatten(0, x.shape[:2]).tanh().sum(),
    )
    for kind in ("forward", "backward"):
        compiled: list[Any] = []

        def record(extracted: Any, kind: Any, compiled: list[Any] = compiled) -> Any:
            compiled.append(extracted)
            return extracted.gm

        program = captured.lower(kind, record)
        assert program.regions
        symbolic = 0
        for extracted in compiled:
            bound = {str(v.node.expr) for v in extracted.fake_inputs if isinstance(v, torch.SymInt)}
            used = {
                str(symbol)
                for node in extracted.gm.graph.nodes
                if isinstance(node.meta.get("val"), Tensor)
                for size in node.meta["val"].shape
                if isinstance(size, torch.SymInt)
                for symbol in size.node.expr.free_symbols
            }
            assert used <= bound
            symbolic += bool(used)
        assert symbolic >= 2
