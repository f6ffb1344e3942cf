"""FX graphs and operators.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = ["UNSAFE_VIEW", "OpOverload", "graph_module", "schema_of"]

UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""A view that autograd does not track as one."""


def schema_of(operator: OpOverload) -> Any:
    """The ``torch.FunctionSchema`` of an operator: its name, arguments, returns, and what it writes to."""
    return operator._schema


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose Python code is written when it is run, or asked for it: most are neither."""
    return _LazyGraphModule(root, graph)
