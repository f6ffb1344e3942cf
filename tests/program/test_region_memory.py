"""Predicted memory of regions, compared with results by hand and with the allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from lightning_deepcompile.program.graph import args_of, output_node
from lightning_deepcompile.program.region_memory import RegionMemory, region_memory

ROWS, WIDTH, CLASSES = 256, 64, 4096


def loss(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Logits leave, as saved tensors do; their exponentials are read by a sum alone."""
    logits = x @ weight
    return logits, logits.float().exp().sum(-1)


def loss_backward(grad: Tensor, logits: Tensor, sums: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The gradient of logits is read by a product, and so takes memory; what it is computed with does not."""
    return (((logits.float().exp() / sums.unsqueeze(-1)) * grad).to(logits.dtype) @ weight.t(),)


def feed_forward(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    return ((F.silu(x @ gate) * (x @ up)) @ down,)


def in_turn(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """Each product's result is read by the next alone."""
    for _ in range(3):
        x = (x @ up) @ down
    return (x,)


def gated_backward(grad: Tensor, x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """One kernel makes three values of three products: it can write them to none of these."""
    gated, upped, arrived = x @ gate, x @ up, grad @ down.t()
    product = F.silu(gated) * upped
    return product.t() @ grad, x.t() @ (arrived * F.silu(gated)), x.t() @ (arrived * upped * gated)


def rows_added(grad: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    """Rows are added where the zeros were made."""
    return (torch.zeros(CLASSES, WIDTH, device=grad.device).index_put((indices,), grad, accumulate=True).exp(),)


def attention_backward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v))


def traced(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(run, tracing_mode="fake")(*inputs)


def predicted(gm: fx.GraphModule, compiled: bool) -> RegionMemory:
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    (outputs,) = args_of(output_node(gm.graph))
    return region_memory(nodes, [node for node in outputs if isinstance(node, fx.Node)], compiled=compiled)


def _bytes(memory: RegionMemory) -> tuple[int, int]:
    return memory.peak.bytes, memory.largest(None)


def test_what_is_computed_where_it_is_read_takes_no_memory() -> None:
    x, weight = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, CLASSES)
    logits = 4 * ROWS * CLASSES
    assert _bytes(predicted(traced(loss, x, weight), True)) == (logits + 4 * ROWS, logits)
    gm = traced(loss, x.bfloat16(), weight.bfloat16())
    assert _bytes(predicted(gm, True)) == (logits // 2 + 4 * ROWS, logits // 2)
    assert predicted(gm, False).peak.bytes == logits // 2 + 2 * logits, "each operator runs by itself"


def test_what_a_product_reads_takes_memory_until_then() -> None:
    grad, sums = torch.ones(()), torch.ones(ROWS)
    inputs = grad, torch.ones(ROWS, CLASSES), sums, torch.ones(WIDTH, CLASSES)
    assert _bytes(predicted(traced(loss_backward, *inputs), True)) == (4 * ROWS * (CLASSES + WIDTH), 4 * ROWS * CLASSES)
    wide, narrow = 4 * ROWS * CLASSES, 4 * ROWS * WIDTH
    gm = traced(in_turn, torch.ones(ROWS, WIDTH), torch.ones(WIDTH, CLASSES), torch.ones(CLASSES, WIDTH))
    assert _bytes(predicted(gm, True)) == (wide + narrow, wide)
    inputs = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, CLASSES), torch.ones(WIDTH, CLASSES), torch.ones(CLASSES, WIDTH)
    # Two products, and their product, which is written to where one of them was.
    assert predicted(traced(feed_forward, *inputs), True).peak.bytes == 2 * wide


def test_what_a_kernel_makes_together_takes_memory_together() -> None:
    narrow = torch.ones(ROWS, WIDTH)
    inputs = narrow, narrow, torch.ones(WIDTH, CLASSES), torch.ones(WIDTH, CLASSES), torch.ones(CLASSES, WIDTH)
    assert _bytes(predicted(traced(gated_backward, *inputs), True)) == (6 * 4 * ROWS * CLASSES, 4 * ROWS * CLASSES)


def test_many_readers_have_a_cast_computed_anew_each() -> None:
    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        wide = (x @ weight).float()
        return tuple((wide + number).sum(-1) for number in range(6))

    gm = traced(run, torch.ones(ROWS, WIDTH).bfloat16(), torch.ones(WIDTH, CLASSES).bfloat16())
    assert predicted(gm, True).peak.bytes == 2 * ROWS * CLASSES + 6 * 4 * ROWS


def test_rows_are_added_in_place_and_attention_adds_up_in_fp32() -> None:
    table = 4 * CLASSES * WIDTH
    gm = traced(rows_added, torch.ones(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long))
    assert predicted(gm, True).peak.bytes == table
    q, k, v = (torch.ones(1, 2, ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    narrow, sums, gradient = 2 * 2 * ROWS * WIDTH, 4 * 2 * ROWS, 2
    # The result, three gradients, and the queries' gradient in fp32.
    peak = predicted(traced(attention_backward, q, k, v), True).peak.bytes
    assert peak == 4 * narrow + 2 * narrow + sums + gradient


@pytest.mark.gpu
@pytest.mark.parametrize("run", [loss, loss_backward, feed_forward, in_turn, gated_backward])
def test_equals_what_the_allocator_counts(run: Callable[..., tuple[Tensor, ...]]) -> None:
    rows, width, classes = 4096, 1024, 32768
    shapes: dict[Callable[..., tuple[Tensor, ...]], list[tuple[int, ...]]] = {
        loss: [(rows, width), (width, classes)],
        loss_backward: [(), (rows, classes), (rows,), (width, classes)],
        feed_forward: [(rows, width), (width, classes), (width, classes), (classes, width)],
        in_turn: [(rows, width), (width, classes), (classes, width)],
        gated_backward: [(rows, width), (rows, width), (width, classes), (width, classes), (classes, width)],
    }
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes[run]]
    expected = predicted(traced(run, *inputs), True).peak.bytes
    region = torch.compile(run)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = region(*inputs)
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - before
        del result
    assert most == pytest.approx(expected, rel=0.05), (run.__name__, most / expected)
