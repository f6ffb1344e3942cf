"""Rewrites a partitioned graph so that it can be cut into regions. No rewrite changes a value.

Afterwards there is one gather per parameter; views of a gathered parameter stand right before each use, so that no
region hands a view of runtime-owned memory to another; constant tensors stand before each use, too; gradients are
contiguous and reduced once per parameter; tuple outputs are unpacked next to their producer; operators that share
statistics or look rows up with other ranks keep their order.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lightning_deepcompile.program.graph import args_of, is_gather, is_reduce, is_view, output_node, source_gather
from lightning_deepcompile.runtime.lookups import lookup_ops
from lightning_deepcompile.runtime.statistics import statistics_ops

aten = torch.ops.aten
# Filled with one value: rewriting is cheaper than reading, and Inductor can fuse it into the reader.
_CONSTANTS = (aten.full.default, aten.scalar_tensor.default)


def normalize(graph: fx.Graph) -> None:
    """Applies all rewrites of this module to `graph`, in place.

    Args:
        graph: A forward, backward or inference graph from AOTAutograd.
    """
    merge_gathers(graph)
    _merge_reductions(graph)
    _make_gradients_contiguous(graph)
    _clone_escaping_parameters(graph)
    _sink(graph, [node for node in graph.nodes if is_view(node) and source_gather(node) is not None])
    _sink(graph, [node for node in graph.nodes if node.op == "call_function" and node.target in _CONSTANTS])
    _glue_tuple_elements(graph)
    _order_collectives(graph)
    graph.eliminate_dead_code()
    graph.lint()


def merge_gathers(graph: fx.Graph) -> None:
    """Merges several gathers of one parameter into one, in place."""
    first: dict[tuple[int, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        if is_gather(node):
            kept = first.setdefault((node.args[1], node.args[3]), node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)


def _merge_reductions(graph: fx.Graph) -> None:
    """Rewrites ``reduce(a) + reduce(b)`` of one parameter (tied weights) to ``reduce(a + b)``: half the traffic."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        left, right = node.args
        if not (isinstance(left, fx.Node) and isinstance(right, fx.Node) and is_reduce(left) and is_reduce(right)):
            continue
        if left.args[1:] != right.args[1:]:
            continue
        grads = (args_of(left)[0], args_of(right)[0])
        values = [grad.meta["val"] for grad in grads]
        if values[0].dtype != values[1].dtype:
            continue  # the sum would travel in the wider dtype of the two
        with graph.inserting_before(node):
            assert callable(left.target)
            total = graph.call_function(aten.add.Tensor, grads)
            total.meta["val"] = torch.add(*values)
            merged = graph.call_function(left.target, (total, *left.args[1:]))
            merged.meta.update(left.meta)
        node.replace_all_uses_with(merged)
        graph.erase_node(node)
        for reduction in dict.fromkeys((left, right)):  # equal gradients are one node, perhaps of several sums
            if not reduction.users:
                graph.erase_node(reduction)


def _make_gradients_contiguous(graph: fx.Graph) -> None:
    """Makes gradients contiguous: collectives read dense row-major memory. The copy can be fused into the producer."""
    for node in graph.nodes:
        if is_reduce(node):
            grad = args_of(node)[0]
            if grad.op == "placeholder" or not grad.meta["val"].is_contiguous() or is_view(grad) or is_gather(grad):
                with graph.inserting_before(node):
                    copy = _contiguous_clone(graph, grad)
                node.update_arg(0, copy)


def _contiguous_clone(graph: fx.Graph, node: fx.Node) -> fx.Node:
    copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    # A fake tensor with a storage of its own: Inductor keeps a copy whose input and output do not share one.
    copy.meta["val"] = torch.empty_like(node.meta["val"], memory_format=torch.contiguous_format)
    return copy


def _clone_escaping_parameters(graph: fx.Graph) -> None:
    """Copies parameters that are graph outputs: the runtime reuses the gathered memory after the last use.

    The whole parameter is copied and its views are taken of the copy, in the metadata too: the graph's caller was
    promised their strides, and Inductor drops a copy if it believes that input and output alias.
    """
    output = output_node(graph)
    copies: dict[fx.Node, fx.Node] = {}

    def escaped(node: fx.Node) -> fx.Node:
        if node not in copies:
            if is_gather(node):
                copies[node] = _contiguous_clone(graph, node)
            else:
                source = escaped(args_of(node)[0])
                assert callable(node.target)
                view = graph.node_copy(node, lambda n: source if n is node.args[0] else n)
                operands: Any = (view.args, view.kwargs)
                args, kwargs = fx.map_arg(operands, lambda n: n.meta["val"])
                view.meta["val"] = node.target(*args, **kwargs)
                copies[node] = view
        return copies[node]

    with graph.inserting_before(output):
        for value in [n for n in output.all_input_nodes if source_gather(n) is not None]:
            output.replace_input_with(value, escaped(value))


def _sink(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Duplicates each of `nodes` for every consumer, chains of them included."""
    for node in reversed(nodes):
        first, *others = node.users or (None,)
        for user in others:
            with graph.inserting_before(user):
                copy = graph.node_copy(node)
            user.replace_input_with(node, copy)
        if first is not None:
            first.prepend(node)


def _glue_tuple_elements(graph: fx.Graph) -> None:
    """Moves every ``getitem`` right behind its tuple, so that no cut can fall between them."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            node.args[0].append(node)


def _order_collectives(graph: fx.Graph) -> None:
    """Chains collectives by data: ranks compile for other shapes, and a compiler may order them by sizes."""
    operators = (*statistics_ops(), *lookup_ops())
    before: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "call_function" and node.target in operators:
            if before is not None:
                node.kwargs = {**node.kwargs, "after": before}
            before = node
