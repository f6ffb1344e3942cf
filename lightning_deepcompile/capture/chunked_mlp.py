"""Computes feed-forward layers in pieces of tokens, so that their wide activations are never materialised whole.

One call replaces a linear layer with more outputs than inputs, and all that is computed of it row by row until rows are
narrow again. The call takes the rows in pieces and saves only its input; backward recomputes each piece before its
gradients. Gradients of weights are added up in fp32. Under activation checkpointing, which recomputes the layer anyway,
that costs no time.

The idea is that of the tiled MLP of Arctic Long Sequence Training (arXiv:2506.13996), which replaces the code of known
models; here layers are found in the graph of any model.
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from lightning_deepcompile import compat
from lightning_deepcompile.capture.dynamo_graph import checkpoint_body, erase_unused, name_of
from lightning_deepcompile.capture.rows import ELEMENTWISE, PieceGradients, change_between, same_shape, spans
from lightning_deepcompile.program.graph import args_of
from lightning_deepcompile.runtime.pieces import take_piece

_log = logging.getLogger(__name__)

# Of every row alone, whatever other rows or vectors they read.
_BY_ROW = ELEMENTWISE | frozenset(
    "relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign hardtanh hardswish hardsigmoid logsigmoid "
    "minimum maximum erf sin cos contiguous clone".split()
)
_ALONG_ROWS = frozenset(["softmax", "log_softmax", "sum", "mean", "glu", "chunk", "split"])
_NORMS = {"layer_norm": inspect.signature(F.layer_norm), "rms_norm": inspect.signature(F.rms_norm)}
_DROPOUT = inspect.signature(F.dropout)


def chunk_mlps(gm: fx.GraphModule, pieces: int) -> int:
    """Replaces feed-forward layers by feed-forward layers in pieces, in place.

    Args:
        gm: Dynamo's graph, before AOTAutograd; the graphs of checkpointed layers that it refers to are looked through.
        pieces: How many; 0: replaces nothing, and counts those that could be.

    Returns:
        The number of layers that were, or could be, replaced.
    """
    bodies = {args_of(n)[0].target: checkpoint_body(gm, n) for n in gm.graph.nodes if compat.is_checkpoint(n)}
    number = sum(chunk_mlps(body, pieces) for body in bodies.values())
    found: dict[fx.Node, _FeedForward | None] = {}  # by input: a gate has the same
    for linear in [n for n in gm.graph.nodes if _is_linear(n) and _widens(n)]:
        rows = args_of(linear)[0]
        if rows not in found:
            found[rows] = _find(linear)
    layers = [layer for layer in found.values() if layer is not None]
    if layers and pieces:
        for index, layer in enumerate(layers):
            layer.replace(gm, f"feed_forward_{index}", pieces)
        gm.recompile()
    return number + len(layers)


@dataclass
class _FeedForward:
    """A feed-forward layer.

    Args:
        rows: Its input.
        nodes: Its operators, in order; the last one is its output.
        shared: Its inputs that are not computed by row, in order of use: weights, for one.
    """

    rows: fx.Node
    nodes: list[fx.Node]
    shared: list[fx.Node]

    def replace(self, gm: fx.GraphModule, name: str, pieces: int) -> None:
        """Replaces the layer by a call of `run_in_pieces`.

        Args:
            gm: The graph.
            name: The name of the layer of a piece.
            pieces: How many there are.
        """
        graph = fx.Graph()
        copies = {self.rows: graph.placeholder("rows")}
        copies |= {node: graph.placeholder(f"shared_{number}") for number, node in enumerate(self.shared)}
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        result = self.nodes[-1]
        graph.output(copies[result])
        gm.add_submodule(name, compat.graph_module(nn.Module(), graph))
        with gm.graph.inserting_before(result):
            body = gm.graph.get_attr(name)
            call = gm.graph.call_function(run_in_pieces, (body, pieces, self.rows, *self.shared))
        call.meta = dict(result.meta)
        result.replace_all_uses_with(call)
        erase_unused(self.nodes)


def _find(linear: fx.Node) -> _FeedForward | None:
    """Returns the layer that begins with a linear layer that widens; None if its wide values are needed otherwise."""
    rows = args_of(linear)[0]
    example = rows.meta["example_value"]
    by_row = {rows}
    node = rows.next
    while node.op != "root":
        if not by_row.isdisjoint(node.all_input_nodes) and _is_by_row(node, by_row, example.shape[:-1]):
            by_row.add(node)
            value = node.meta["example_value"]
            if isinstance(value, Tensor) and statically_known_true(value.shape[-1] <= example.shape[-1]):
                layer = _closed(node, rows, by_row)
                if layer is not None and linear in layer.nodes:
                    change = change_between(layer.nodes[0], node)
                    if change is None:
                        return layer
                    _log.info("A feed-forward layer is not chunked: it contains `%s`.", change)
                    return None
        node = node.next
    return None


def _closed(result: fx.Node, rows: fx.Node, by_row: set[fx.Node]) -> _FeedForward | None:
    """Returns the layer that computes `result` from `rows`; None if anything else reads its values."""
    inside, shared, pending = {result}, set(), [result]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in by_row:
                shared.add(source)
            elif source is not rows and source not in inside:
                inside.add(source)
                pending.append(source)
    if any(user not in inside for node in inside if node is not result for user in node.users):
        return None
    return _FeedForward(rows, sorted(inside), sorted(shared))


def _is_linear(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is F.linear and not node.kwargs


def _widens(linear: fx.Node) -> bool:
    rows, weight = (n.meta["example_value"].shape for n in args_of(linear)[:2])
    return len(rows) > 1 and len(weight) == 2 and statically_known_true(weight[0] > weight[1])


def _is_one_row(shape: Sequence[Any]) -> bool:
    return same_shape(shape[:-1], [1] * (len(shape) - 1))


def _is_by_row(node: fx.Node, by_row: set[fx.Node], leading: Sequence[Any]) -> bool:
    """Returns whether each row of `node` depends on the same row of its inputs in `by_row`, and no random numbers."""
    value = node.meta.get("example_value")
    source, *others = args_of(node) or (None,)
    if _is_linear(node):
        return source in by_row and by_row.isdisjoint(others)
    name = name_of(node)
    if isinstance(value, Tensor) and not same_shape(value.shape[:-1], leading):
        return False
    last = (-1, value.dim() - 1) if isinstance(value, Tensor) else (-1, len(leading))
    if name in _BY_ROW:
        # Of the same rows, numbers, or vectors along rows.
        return all(
            n in by_row or (isinstance(e := n.meta.get("example_value"), Tensor) and _is_one_row(e.shape))
            for n in node.all_input_nodes
        )
    if source not in by_row:
        return False
    if name in _NORMS:
        given = _NORMS[name].bind(*node.args, **node.kwargs).arguments
        return len(given["normalized_shape"]) == 1 and set(node.all_input_nodes) & by_row == {source}
    if name == "dropout":
        dropped = _DROPOUT.bind(*node.args, **node.kwargs)
        dropped.apply_defaults()
        return dropped.arguments["p"] == 0 or not dropped.arguments["training"]
    if name in _ALONG_ROWS:
        names = ("dim",) if name in ("softmax", "log_softmax", "sum", "mean", "glu") else ("number", "dim")
        given = dict(zip(names, others, strict=False)) | node.kwargs
        summed = name in ("sum", "mean") and not given.get("keepdim", len(others) > 1 and others[1])
        return given.get("dim") in (*last, *([one] for one in last)) and not summed
    if name == "getitem" and node.target is operator.getitem:
        (index,) = others
        if not isinstance(source.meta["example_value"], Tensor):  # an element of a tuple
            return isinstance(index, int)
        return isinstance(index, tuple) and len(index) == 2 and index[0] is ... and isinstance(index[1], slice)
    return False


def run_in_pieces(layer: nn.Module, pieces: int, rows: Tensor, *shared: Tensor) -> Tensor:
    """Runs a feed-forward layer piece by piece.

    Args:
        layer: Takes rows of shape ``(n, ..., inputs)``, and `shared`; treats each row by itself.
        pieces: How many pieces there are.
        rows: Shape ``(..., inputs)``.
        *shared: The inputs that all rows share.

    Returns:
        Shape ``(..., outputs)``.
    """
    flat = rows.flatten(0, -2)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (rows, *shared)):
        result = _InPieces.apply(layer, pieces, flat, *shared)
    else:
        result = _forward(layer, pieces, flat, shared)
    return result.view(*rows.shape[:-1], result.shape[-1])


def _forward(layer: nn.Module, pieces: int, rows: Tensor, shared: Sequence[Tensor]) -> Tensor:
    # All are taken first: regions that take none with numbers of their own are equal, and compiled once.
    taken = [take_piece(rows, *span) for span in spans(rows.shape[0], pieces)]
    return torch.cat([layer(piece, *shared) for piece in taken])


class _InPieces(torch.autograd.Function):
    """A layer that backward recomputes, and differentiates, piece by piece."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, pieces: int, rows: Tensor, *shared: Tensor) -> Tensor:
        ctx.layer, ctx.pieces, ctx.cast = layer, pieces, _autocast(rows.device.type)
        ctx.save_for_backward(rows, *shared)
        return _forward(layer, pieces, rows, shared)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        rows, *shared = ctx.saved_tensors
        gradients = PieceGradients(shared, ctx.needs_input_grad[2:])
        bounds = spans(rows.shape[0], ctx.pieces)
        for piece, gradient in [(take_piece(rows, *span, upstream), take_piece(upstream, *span)) for span in bounds]:
            piece = gradients.leaf(piece)
            with torch.enable_grad(), torch.autocast(**ctx.cast):
                result = ctx.layer(piece, *gradients.leaves)
            gradients.add(result, piece, gradient)
        return None, None, *gradients.finish()


def _autocast(device_type: str) -> dict[str, Any]:
    """The state of automatic casts, as arguments of ``torch.autocast``: backward runs without them."""
    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
