"""FX graphs and operators.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = [
    "GPU_ATTENTION",
    "UNSAFE_VIEW",
    "OpOverload",
    "graph_module",
    "is_inductor_random",
    "is_of_forward",
    "is_seed",
    "is_tangent",
    "schema_of",
    "symbols_of",
    "write_size",
]

UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""A view that autograd does not track as one."""

GPU_ATTENTION: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operators of CPUs, and those of GPUs that compute the same of the same arguments."""


def schema_of(operator: OpOverload) -> Any:
    """The ``torch.FunctionSchema`` of an operator: its name, arguments, returns, and what it writes to."""
    return operator._schema


def symbols_of(size: torch.SymInt) -> Collection[Any]:
    """The symbols in a size's formula."""
    return size.node.expr.free_symbols


def write_size(graph: fx.Graph, size: torch.SymInt, known: Mapping[str, fx.Node]) -> fx.Node:
    """Writes the arithmetic of a size at the place where `graph` inserts; returns the node that ends it.

    Args:
        graph: The graph.
        size: A formula of more than one symbol, or with a number.
        known: Nodes of its symbols, by name.
    """
    tracer = fx.proxy.GraphAppendingTracer(graph)
    symbols = {symbol: fx.Proxy(known[str(symbol)], tracer) for symbol in symbols_of(size)}
    before = set(graph.nodes)
    written: fx.Node = sympy_interp(PythonReferenceAnalysis, symbols, size.node.expr).node
    for node in graph.nodes:
        if node not in before:
            operands = [one.meta["val"] if isinstance(one, fx.Node) else one for one in node.args]
            node.meta["val"] = node.target(*operands)
    return written


def is_of_forward(node: fx.Node) -> bool:
    """Returns whether a node was traced in the forward pass: in a backward graph, such a node is recomputed."""
    return node.meta.get("partitioner_tag") == "is_forward"


def is_tangent(node: fx.Node) -> bool:
    """Returns whether a backward graph is handed a gradient there: AOTAutograd itself tells by the name."""
    return node.op == "placeholder" and "tangents" in node.name


def is_inductor_random(operator: OpOverload) -> bool:
    """Returns whether an operator stands for random numbers since Inductor's passes have run."""
    return operator._schema.name.startswith("prims::inductor_")


def is_seed(node: fx.Node) -> bool:
    """Returns whether a node reads the seed of one random operator, as Inductor's passes write it."""
    return isinstance(node.target, OpOverload) and node.target._schema.name == "prims::inductor_lookup_seed"


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Returns a graph module whose Python code is written when it is first needed: most never need it."""
    return _LazyGraphModule(root, graph)
