"""Times as functions of sizes, and values of a program's symbolic sizes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from lightning_deepcompile.profile.sizes import Curve, Sample, fit_curve
from lightning_deepcompile.program.graph import args_of, nbytes, output_node
from lightning_deepcompile.program.region_memory import region_memory
from lightning_deepcompile.program.sizes import note, read_sizes, tensor_bytes

WIDTH = 16


def _linear(rows: int, length: int) -> float:
    return 1e-4 + 2e-9 * rows * length * WIDTH


def _attention(rows: int, length: int) -> float:
    return 1e-4 + 2e-9 * rows * length * WIDTH + 3e-11 * rows * length**2 * WIDTH


def _launch(rows: int, length: int) -> float:
    return 5e-5


def _sample(truth: Callable[[int, int], float], rows: int, length: int, noise: float = 1.0) -> Sample:
    return Sample(rows * length * WIDTH, length, truth(rows, length) * noise)


@pytest.mark.parametrize("truth", [_linear, _attention, _launch])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_finds_the_time_of_sizes_that_it_has_not_seen(truth: Callable[[int, int], float], noise: float) -> None:
    draw = random.Random(1)
    for _ in range(20):
        sizes = [(draw.randint(1, 8), draw.randint(5, 2000)) for _ in range(12)]
        curve = fit_curve([_sample(truth, *size, 1 + draw.uniform(-noise, noise)) for size in sizes])
        for rows, length in sizes:
            found = curve.seconds(rows * length * WIDTH, length)
            assert found == pytest.approx(truth(rows, length), rel=1e-6 if noise == 0 else 4 * noise)
        assert min(curve) >= 0


def test_two_sizes_make_a_line_and_one_size_grows() -> None:
    two = [_sample(_linear, 2, 100), _sample(_linear, 4, 300)]
    assert fit_curve(two).seconds(8 * 900 * WIDTH, 900) == pytest.approx(_linear(8, 900))
    one = fit_curve([_sample(_linear, 2, 100), _sample(_linear, 2, 100, 9.0), _sample(_linear, 2, 100)])
    assert one.seconds(2 * 200 * WIDTH, 200) == pytest.approx(2 * _linear(2, 100)), "a hiccup tells nothing"
    assert fit_curve([Sample(0, 1, 0.5)]) == Curve(0.5, 0.0) and fit_curve([Sample(8, 1, 0.0)]) == Curve(0.0, 0.0)
    assert fit_curve([Sample(1, 1, 2.0), Sample(9, 1, 1.0)]).linear == 0.0, "nothing is faster with more to do"


def test_bytes_and_memory_are_those_of_a_trace_with_the_sizes_themselves() -> None:
    def layer(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = torch.softmax(x @ x.transpose(1, 2), -1)
        return (F.gelu(scores @ x @ weight),)

    def traced(rows: int, length: int, mode: str) -> torch.fx.GraphModule:
        inputs = torch.ones(rows, length, WIDTH), torch.ones(WIDTH, WIDTH)
        return make_fx(layer, tracing_mode=mode)(*inputs)

    symbolic = traced(3, 20, "symbolic")
    nodes = [node for node in symbolic.graph.nodes if node.op == "call_function"]
    memory = region_memory(nodes, list(args_of(output_node(symbolic.graph))[0]), compiled=False)
    metas = [node.meta["val"] for node in symbolic.graph.nodes if node.op == "placeholder"]
    for rows, length in ((3, 20), (7, 400)):
        fixed = traced(rows, length, "fake")
        sizes = read_sizes(metas, note([torch.ones(rows, length, WIDTH), torch.ones(WIDTH, WIDTH)]))
        assert {rows, length} <= set(sizes.values.values())
        values = [tensor_bytes(node.meta["val"], sizes) for node in symbolic.graph.nodes if nbytes(node)]
        assert values == [nbytes(node) for node in fixed.graph.nodes if nbytes(node)]
        again = [node for node in fixed.graph.nodes if node.op == "call_function"]
        outputs = list(args_of(output_node(fixed.graph))[0])
        expected = region_memory(again, outputs, compiled=False)
        assert memory.peak.at(sizes) == expected.peak.bytes
        assert memory.largest(sizes) == expected.largest(None) > 0
