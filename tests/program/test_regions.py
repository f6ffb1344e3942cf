"""Graphs become regions: rewrites that keep every value, and cuts between blocks."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from graphs import Graph, aten, of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F
from tracing import Captured, Simulator, capture

from lightning_deepcompile.program.codegen import generate
from lightning_deepcompile.program.extract import symbol_sources
from lightning_deepcompile.program.graph import is_compute, is_gather, is_reduce, is_view, output_node, source_gather
from lightning_deepcompile.program.lower import RegionCompiler, lower
from lightning_deepcompile.program.normalize import normalize
from lightning_deepcompile.program.program import Program, collective_sequence
from lightning_deepcompile.program.regions import Region, cut_regions

# Rewrites -------------------------------------------------------------------------------------------------------------


def test_one_gather_per_parameter() -> None:
    g = Graph()
    x = g.input("x", 4, 4)
    a, b, other = g.gather(1, 4, 4), g.gather(1, 4, 4), g.gather(2, 4, 4)
    y = g.call(aten.mm.default, g.call(aten.mm.default, g.call(aten.mm.default, x, a), b), other)
    nodes = g.normalized(y)
    assert [n.args[1] for n in nodes if is_gather(n)] == [1, 2]


@pytest.mark.parametrize("uses", [2, 3])
def test_tied_reductions_merge(uses: int) -> None:
    g = Graph()
    grads = [g.call(aten.neg.default, g.input(f"tangents_{k}", 4, 4)) for k in range(uses)]
    total = g.reduce(grads[0], 1)
    for grad in grads[1:]:
        total = g.call(aten.add.Tensor, total, g.reduce(grad, 1))
    nodes = g.normalized(total)
    (reduction,) = [n for n in nodes if is_reduce(n)]
    assert output_node(g.graph).args[0] == (reduction,)
    assert reduction.args[0].target is aten.add.Tensor and not is_reduce(reduction.args[0].args[0])


def test_reductions_that_differ_do_not_merge() -> None:
    """Of different parameters, of different dtypes on the wire, or read by others too."""
    g = Graph()
    x = g.call(aten.neg.default, g.input("tangents_1", 4, 4))
    half = g.call(torch.ops.prims.convert_element_type.default, x, torch.bfloat16)
    two = g.call(aten.add.Tensor, g.reduce(x, 1), g.reduce(x, 2))
    wire = g.call(aten.add.Tensor, g.reduce(x, 3), g.reduce(half, 3))
    read = g.reduce(x, 4)
    more = g.call(aten.add.Tensor, read, g.reduce(x, 4))
    nodes = g.normalized(two, wire, more, read)
    assert sorted(n.args[1] for n in nodes if is_reduce(n)) == [1, 2, 3, 3, 4, 4]


def test_gradients_are_contiguous_and_not_somebody_elses_memory() -> None:
    g = Graph()
    weight, tangent = g.gather(1, 4, 6), g.input("tangents_1", 4, 6)
    made = g.call(aten.neg.default, tangent)
    grads = {
        1: made,
        2: g.call(aten.permute.default, made, [1, 0]),  # strided
        3: tangent,  # the caller's
        4: g.call(aten.view.default, made, [6, 4]),  # another value's
        5: weight,  # the runtime's, released by then
    }
    nodes = g.normalized(*(g.reduce(grad, k) for k, grad in grads.items()))
    by_id = {n.args[1]: n.args[0] for n in nodes if is_reduce(n)}
    assert by_id[1].target is aten.neg.default
    for k in (2, 3, 4, 5):
        assert by_id[k].target is aten.clone.default, k
        assert by_id[k].args[0] is grads[k] and by_id[k].meta["val"].is_contiguous()
        assert by_id[k].meta["val"].shape == grads[k].meta["val"].shape


def test_views_of_parameters_stand_before_each_use() -> None:
    """No region may hand a view of a gathered parameter to another: by then the memory may be the next parameter's."""
    g = Graph()
    x = g.input("x", 4, 4)
    packed = g.call(aten.split.Tensor, g.call(aten.permute.default, g.gather(1, 4, 8), [1, 0]), 4)
    left, right = (g.call(operator.getitem, packed, i) for i in range(2))
    y = g.call(aten.mm.default, x, left)
    z = g.call(aten.mm.default, y, right)
    again = g.call(aten.mm.default, z, left)
    nodes = g.normalized(again)
    products = of(nodes, aten.mm.default)
    assert len(of(nodes, aten.permute.default)) == len(of(nodes, aten.split.Tensor)) == 3
    for product in products:
        element = product.args[1]
        chain = [element.args[0].args[0], element.args[0], element]
        at = nodes.index(product)
        assert nodes[at - 3 : at] == chain
        assert source_gather(element) is not None


def test_constants_stand_before_each_use() -> None:
    """Hoisted or handed on, a tensor of zeros would be written and read where a kernel could just say zero."""
    g = Graph()
    x, zeros = g.input("x", 4), g.call(aten.full.default, [4], 0)
    y = g.call(aten.add.Tensor, x, zeros)
    for k in (10, 20):
        y = g.call(aten.add.Tensor, g.call(aten.mul.Tensor, y, g.gather(k, 4)), zeros)
    regions = g.regions(y)
    assert [region.blocks for region in regions] == [["block1"], ["block2"]]
    assert all(not of(region.outputs, aten.full.default) for region in regions)
    assert sum(len(of(region.nodes, aten.full.default)) for region in regions) == 3


def test_escaping_parameters_are_copied_with_the_strides_they_had() -> None:
    g = Graph()
    weight = g.gather(1, 4, 6)
    turned = g.call(aten.permute.default, weight, [1, 0])
    row = g.call(aten.select.int, turned, 0, 2)
    nodes = g.normalized(weight, turned, row)
    whole, view, part = output_node(g.graph).args[0]
    assert len(of(nodes, aten.clone.default)) == 1
    assert whole.target is aten.clone.default and whole.args[0] is weight
    assert (view.target, part.target) == (aten.permute.default, aten.select.int)
    assert view.meta["val"].stride() == turned.meta["val"].stride() == (1, 6)
    assert part.meta["val"].stride() == row.meta["val"].stride() == (6,)
    # Inductor drops a copy whose result it takes for a view of the input: the metadata must say that it is none.
    owner = weight.meta["val"].untyped_storage()._cdata
    for node in (whole, view, part):
        assert source_gather(node) is None and node.meta["val"].untyped_storage()._cdata != owner


# Whole models: every value as before ----------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Tied, escaping, split, strided, mutated, multi-output and constant things in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        self.steps += 1
        x = self.embed(tokens) * torch.tensor([0.5, 2.0] * 4)
        for layer in self.layers:
            query, key, value = F.linear(x, layer.weight, layer.bias).chunk(3, -1)
            first, _, third = layer.weight.chunk(3)
            x = x + F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
            x = x + F.linear(x, first) * F.linear(x, third).topk(1).values
        return self.head(x).logsumexp(-1).mean(), self.layers[0].weight.t(), self.layers[1].bias[2:4]


def _run(captured: Captured, program: Program, args: list[Any]) -> tuple[list[Any], Simulator]:
    simulator = Simulator(captured.full)
    return list(simulator.generate(program)(args[: len(program.inputs)])), simulator


@pytest.mark.parametrize("dynamic", [False, True])
def test_lowering_keeps_every_value(dynamic: bool) -> None:
    torch.manual_seed(0)
    captured = capture(Mixed(), torch.arange(10).view(2, 5), dynamic=dynamic)
    assert captured.forward is not None and captured.backward is not None
    buffers = [a for a in captured.args if isinstance(a, Tensor) and a.dim() == 0]
    reference = Simulator(captured.full)
    expected = list(reference.interpret(captured.forward, copy.deepcopy(captured.args)))
    args = copy.deepcopy(captured.args)
    actual, _ = _run(captured, captured.lower("forward"), args)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert [a.stride() for a in actual if isinstance(a, Tensor)] == [
        a.stride() for a in expected if isinstance(a, Tensor)
    ]
    assert [float(a) for a in args if isinstance(a, Tensor) and a.dim() == 0] == [1.0] * len(buffers) == [1.0]

    tangents = [torch.ones_like(value) for value in expected[: captured.num_outputs]]
    inputs = _backward_inputs(captured, expected, tangents)
    reference.interpret(captured.backward, inputs)
    _, simulator = _run(captured, captured.lower("backward"), inputs)
    assert simulator.grads.keys() == reference.grads.keys() == captured.full.keys()
    for ds_id, grad in reference.grads.items():
        torch.testing.assert_close(simulator.grads[ds_id], grad, rtol=1e-6, atol=1e-7)
    assert set(simulator.reductions.values()) == {1}


def _backward_inputs(captured: Captured, outputs: list[Any], tangents: list[Tensor]) -> list[Any]:
    """Saved numbers, saved tensors, tangents: the order of a backward graph's inputs."""
    saved = outputs[captured.num_outputs :]
    numbers = [value for value in saved if not isinstance(value, Tensor)]
    return [*numbers, *(value for value in saved if isinstance(value, Tensor)), *tangents]


def test_a_graph_without_parameters_and_one_without_compute() -> None:
    captured = capture(nn.Identity(), torch.arange(3.0), step=lambda module, x: (x + 1).sin())
    program = captured.lower("inference")
    assert len(program.regions) == 1 and collective_sequence(program) == []
    torch.testing.assert_close(_run(captured, program, [torch.arange(3.0)])[0], [(torch.arange(3.0) + 1).sin()])

    weight_only = capture(nn.Linear(2, 3), step=lambda module: module.weight)
    program = weight_only.lower("forward")
    (weight, *_), _ = _run(weight_only, program, weight_only.args)
    assert torch.equal(weight, next(full for full in weight_only.full.values() if full.dim() == 2))

    g = Graph()
    x = g.input("x", 2)
    assert g.regions(x) == []


# Cuts -----------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_regions_are_consecutive_pieces_that_feed_forward(data: st.DataObject) -> None:
    """Random graphs: every node is in one region, inputs come from before, outputs are what others read."""
    g = Graph()
    values = [g.input("x", 4), g.input("tangents_1", 4)]
    for _ in range(data.draw(st.integers(0, 14))):
        source = data.draw(st.sampled_from(values))
        kind = data.draw(st.sampled_from(["neg", "weight", "add", "full", "reduce"]))
        if kind == "weight":
            values.append(g.call(aten.mul.Tensor, source, g.gather(data.draw(st.integers(0, 39)), 4)))
        elif kind == "add":
            values.append(g.call(aten.add.Tensor, source, data.draw(st.sampled_from(values))))
        elif kind == "full":
            values.append(g.call(aten.full.default, [4], 1))
        else:
            values.append(g.call(aten.neg.default, source))
    reduced = data.draw(st.lists(st.sampled_from(values), max_size=3))
    outputs = [*(g.reduce(v, data.draw(st.integers(0, 39))) for v in reduced), data.draw(st.sampled_from(values))]
    regions = g.regions(*outputs)

    compute = [n for n in g.graph.nodes if is_compute(n)]
    assert sorted((n for region in regions for n in region.nodes), key=compute.index) == compute
    assert all(region.nodes for region in regions)
    done = {n for n in g.graph.nodes if n.op == "placeholder" or is_gather(n)}
    for region in regions:
        assert set(region.inputs) <= done
        assert len(region.inputs) == len(set(region.inputs))
        done |= set(region.outputs)
        inside = set(region.nodes)
        assert region.outputs == [n for n in region.nodes if set(n.users) - inside]
        # A parameter's memory is read in the region that waits for it, and in no other.
        assert not any(is_view(n) and source_gather(n) is not None for n in region.outputs)
        assert len({n.args[1] // 10 for n in region.inputs if is_gather(n)}) <= 1, "one block a region"


def test_the_cut_is_where_the_fewest_bytes_are_alive() -> None:
    g = Graph()
    x = g.call(aten.mul.Tensor, g.input("x", 4), g.gather(10, 4))  # 16 bytes
    big = g.call(aten.exp.default, g.call(aten.repeat.default, x, [100]))
    small = g.call(aten.sum.default, big)  # 4 bytes
    big = g.call(aten.repeat.default, g.call(aten.cos.default, small), [100, 4])
    y = g.call(aten.mul.Tensor, big, g.gather(20, 4))
    first, second = g.regions(y)
    assert first.outputs == [small]
    assert second.inputs[0] is small and second.outputs == [y]


def test_tuples_stay_with_their_elements() -> None:
    g = Graph()
    x = g.call(aten.mul.Tensor, g.input("x", 4), g.gather(10, 4))
    top = g.call(aten.topk.default, x, 2)
    values, indices = g.call(operator.getitem, top, 0), g.call(operator.getitem, top, 1)
    y = g.call(aten.mul.Tensor, values, g.gather(20, 2))
    regions = g.regions(y, indices)
    assert all(top not in region.outputs for region in regions)


def _shared(captured: Captured) -> Region:
    gm = captured.forward
    assert gm is not None
    normalize(gm.graph)
    symbol_sources(gm.graph)
    return cut_regions(gm.graph, lambda ds_id: captured.params[ds_id].block)[0]


def test_shared_values_move_out_of_the_first_layer() -> None:
    """Tables and masks that all layers read: in the first layer, it would be compiled apart from the others."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            table = torch.outer(torch.arange(5.0), torch.arange(8.0)).cos()
            for layer in self.layers:
                x = layer(x * table).tanh()
            return x

    captured = capture(Net(), torch.randn(2, 5, 8, requires_grad=True))
    shared = _shared(captured)
    assert not shared.blocks and [n.target for n in shared.outputs] == [aten.cos.default]
    compiler = RegionCompiler("eager")
    program = captured.lower("forward", compiler)
    assert [region.info.blocks for region in program.regions.values()] == [
        (), ("layers.0",), ("layers.1",), ("layers.2",), ("layers.3",),
    ]  # fmt: skip


def test_a_large_value_of_two_regions_is_not_computed_ahead() -> None:
    """The value may be one layer's own: then hoisting would keep that of every layer alive at once."""
    g = Graph()
    for size, readers, hoisted in ((1 << 10, 2, True), (1 << 20, 2, False), (1 << 20, 3, True)):
        g = Graph()
        x, saved = g.input("x", size), g.input("saved", size)
        value = g.call(aten.exp.default, saved)
        for k in range(readers):
            x = g.call(aten.mul.Tensor, g.call(aten.mul.Tensor, x, g.gather(10 * k, size)), value)
        regions = g.regions(x)
        assert (value in regions[0].nodes and not regions[0].blocks) == hoisted, (size, readers)


def test_many_readers_within_one_layer_share_nothing_with_others() -> None:
    """A layer that is cut into pieces reads its own values in many regions."""
    g = Graph()
    size = 1 << 22
    x, saved = g.input("x", size), g.input("saved", size)
    x = g.call(aten.mul.Tensor, x, g.gather(10, size))
    value = g.call(aten.exp.default, saved)
    piece = torch.ops.lightning_deepcompile.take_piece.default
    rows = [g.call(piece, x, start, start + size // 4) for start in range(0, size, size // 4)]
    part = g.call(aten.slice.Tensor, value, 0, 0, size // 4)
    made = [g.call(aten.mul.Tensor, g.call(aten.mul.Tensor, row, part), g.gather(11, 1)) for row in rows]
    regions = g.regions(*made)
    assert len(regions) > 3 and all(region.blocks for region in regions), "nothing is computed ahead of all"


def test_a_factor_for_each_row_is_not_computed_ahead_with_the_rows() -> None:
    """A factor is small, but its rows would be kept until all layers have read them."""
    g = Graph()
    x, saved = g.input("x", 64, 1 << 16), g.input("saved", 64, 1 << 16)
    wide = g.call(aten.exp.default, saved)
    factor = g.call(aten.mean.dim, wide, [1], True)
    alone = g.call(aten.mean.dim, g.call(aten.exp.default, g.input("other", 64, 8)), [1], True)
    for k in range(4):
        x = g.call(aten.mul.Tensor, g.call(aten.mul.Tensor, x, g.gather(10 * k, 1)), alone)
        if k < 2:
            x = g.call(aten.add.Tensor, g.call(aten.mul.Tensor, x, factor), wide)
    shared, first, *_ = g.regions(x)
    assert alone in shared.nodes and not shared.blocks
    assert wide in first.nodes and factor in first.nodes and first.blocks == ["block0"]


def test_what_is_cast_to_a_wider_dtype_is_cast_where_it_is_read() -> None:
    """A norm in fp32 of hidden states in bf16 is an example: backward reads the wide form again."""
    cast = torch.ops.prims.convert_element_type.default
    g = Graph()
    x = g.input("x", 4, 256, dtype=torch.bfloat16)
    halves, wides = [], []
    for k in range(3):
        narrow = g.call(aten.mul.Tensor, x, g.call(cast, g.gather(10 * k, 1), torch.bfloat16))
        wide = g.call(cast, narrow, torch.float32)
        x = g.call(cast, g.call(aten.exp.default, wide), torch.bfloat16)
        halves.append(narrow)
        wides.append(wide)
    x = g.call(aten.mul.Tensor, g.call(cast, x, torch.float32), g.gather(40, 1))
    for wide in wides[1:]:
        x = g.call(aten.add.Tensor, x, g.call(aten.sin.default, wide))
    regions = g.regions(x, wides[0])
    last = regions[-1]
    assert last.blocks == ["block4"] and {n for n in last.inputs if n in halves} == set(halves[1:])
    dtypes = [[n.meta["val"].dtype for n in region.outputs if n is not wides[0]] for region in regions[:-1]]
    assert {dtype for region in dtypes for dtype in region} == {torch.bfloat16}
    assert sum(wides[0] in region.outputs for region in regions) == 1, "what is returned is computed once"
    for region in regions:  # each node before what reads it
        order = {node: position for position, node in enumerate(g.graph.nodes)}
        assert [order[n] for n in region.nodes] == sorted(order[n] for n in region.nodes)
        assert all(order[s] < order[n] for n in region.nodes for s in n.all_input_nodes)
    g.graph.lint()


def test_what_is_computed_of_values_that_are_read_anyway_is_not_kept() -> None:
    """An example are hidden states over their norm: a norm's backward reads these, the hidden states and the norm."""
    g = Graph()
    h = g.call(aten.exp.default, g.call(aten.mul.Tensor, g.input("x", 8, 64), g.gather(10, 1)))
    factor = g.call(aten.rsqrt.default, g.call(aten.mean.dim, g.call(aten.mul.Tensor, h, h), [1], True))
    over = g.call(aten.mul.Tensor, h, factor)
    deep = over
    for _ in range(8):  # too long a way to go twice
        deep = g.call(aten.add.Tensor, deep, 1.0)
    y = g.call(aten.mul.Tensor, g.call(aten.exp.default, over), g.gather(10, 1))
    z = g.call(aten.mul.Tensor, g.call(aten.sin.default, y), g.gather(20, 1))
    for read in (h, factor, over, deep):
        z = g.call(aten.mul.Tensor, z, read)
    first, second = g.regions(z)
    assert set(second.inputs) >= {h, factor, deep} and over not in second.inputs
    assert over in first.nodes and first.outputs.count(factor) == 1 and over not in first.outputs
    # A norm in fp32 of hidden states in bf16: these and the factor are kept, not their wide form, nor what is over it.
    cast = torch.ops.prims.convert_element_type.default
    g = Graph()
    x = g.call(cast, g.call(aten.mul.Tensor, g.input("x", 8, 64), g.gather(10, 1)), torch.bfloat16)
    h = g.call(aten.exp.default, x)
    wide = g.call(cast, h, torch.float32)
    factor = g.call(aten.rsqrt.default, g.call(aten.mean.dim, g.call(aten.mul.Tensor, wide, wide), [1], True))
    over = g.call(cast, g.call(aten.mul.Tensor, wide, factor), torch.bfloat16)
    y = g.call(aten.mul.Tensor, g.call(aten.exp.default, over), g.gather(11, 1))
    z = g.call(aten.mul.Tensor, g.call(aten.sin.default, y), g.gather(20, 1))
    for read in (over, wide, factor):
        z = g.call(aten.mul.Tensor, z, read)
    *_, first, second = g.regions(z)
    assert {h, factor} <= set(second.inputs) and not {wide, over} & set(second.inputs)
    # Where the norm is not read, to keep what was computed with it costs no more.
    g = Graph()
    h, rows = (g.call(aten.mul.Tensor, g.input(name, 8, 64), g.gather(11, 1)) for name in ("h", "rows"))
    factor = g.call(aten.exp.default, rows)
    over = g.call(aten.mul.Tensor, h, factor)
    y = g.call(aten.mul.Tensor, g.call(aten.exp.default, over), g.gather(10, 1))
    z = g.call(aten.mul.Tensor, g.call(aten.mul.Tensor, y, g.gather(20, 1)), g.call(aten.mul.Tensor, over, h))
    _, second = g.regions(z)
    assert over in second.inputs and factor not in second.inputs


def test_a_value_that_needs_a_size_of_a_computed_tensor_stays_behind_it() -> None:
    """Sizes may be unknown until a region has run: what reads them cannot move before it."""
    captured = capture(
        nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
        torch.randn(3, 4),
        dynamic=True,
        step=lambda m, x: m[1](m[0](x) + torch.arange(m[0](x).flatten().shape[0]).sum()).sum(),
    )
    program = captured.lower("forward")
    actual, _ = _run(captured, program, captured.args)
    expected = Simulator(captured.full).interpret(captured.forward, captured.args)
    torch.testing.assert_close(actual[0], expected[0])


def test_constants_are_told_apart_by_their_names() -> None:
    g = Graph()
    root = nn.Module()
    root.a, root.a_b = nn.Module(), torch.full((2,), 2.0)
    root.a.b = torch.full((2,), 1.0)
    constants = [g.graph.get_attr(name) for name in ("a.b", "a_b")]
    for node in constants:
        node.meta["val"] = torch.empty(2, device="meta")
    g.graph.output(tuple(constants))
    graphs = fx.GraphModule(root, g.graph)
    compiler = RegionCompiler("eager")
    program = lower(graphs, name="p", kind="inference", graph_id=0, params={}, compile_region=compiler)
    assert [float(value[0]) for value in generate(program)[0]([])] == [1.0, 2.0]
