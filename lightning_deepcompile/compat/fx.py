"""FX graphs and operators.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule

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
