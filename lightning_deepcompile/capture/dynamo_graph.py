"""Small queries on Dynamo's graphs, which contain PyTorch's functions and tensors' methods as users called them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import fx
from torch.nn import functional as F

from lightning_deepcompile.program.graph import args_of

CONSTANTS: tuple[type, ...] = (int, float, bool, complex, str, type(None), type(...), torch.dtype, torch.device)
CONSTANTS += (torch.layout, torch.memory_format)
"""Types of what may stand among a node's arguments, and means the same everywhere."""

#: Functions and methods that may return their argument's memory.
VIEWS = frozenset(
    "getitem unsqueeze squeeze expand expand_as broadcast_to view view_as reshape transpose permute t swapaxes movedim "
    "flatten unflatten narrow select diagonal contiguous to type type_as bool int long float detach".split()
)


def computed(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Returns the result of the call that a node stands for.

    Args:
        node: A call of a function or of a method.
        value_of: Returns the value of each of its inputs.
    """
    args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    target: Any = node.target
    return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)


def name_of(node: fx.Node) -> str:
    """The name of the method, or of the function if it is PyTorch's or Python's own; else empty."""
    if node.op == "call_method":
        name = str(node.target)
        if name.startswith("__") and name.endswith("__"):  # torch 2.11 writes `a == b` as a call of `__eq__`
            name = name[2:-2] + ("_" if name in ("__and__", "__or__") else "")
        return name
    name = getattr(node.target, "__name__", "")
    if name == "_get_data_attr":  # Dynamo's form of `tensor.data`
        return "data"
    return name if any(getattr(owner, name, None) is node.target for owner in (torch, operator, F)) else ""


def calls_gather(node: fx.Node) -> bool:
    """Returns whether `node` gathers a parameter."""
    return node.op == "call_function" and node.target in (torch.ops.dc.gather, torch.ops.dc.gather.default)


def gathered_id(gather: fx.Node) -> int | None:
    """The id of the gathered parameter; None for a call of the user's own whose number is not a constant."""
    id_ = gather.args[1]
    return id_ if isinstance(id_, int) else None


def leaves(value: Any) -> list[Any]:
    """The values in nested lists, dicts and slices of arguments, except other nodes."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, slice):
        return [leaf for item in (value.start, value.stop, value.step) for leaf in leaves(item)]
    return [] if isinstance(value, fx.Node) else [value]


def checkpoint_body(gm: fx.GraphModule, checkpoint: fx.Node) -> fx.GraphModule:
    """The subgraph that a node of activation checkpointing runs; see `compat.is_checkpoint`."""
    return cast(fx.GraphModule, gm.get_submodule(args_of(checkpoint)[0].target))


def checkpoint_operands(gm: fx.GraphModule, checkpoint: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of a checkpointed graph's placeholder and its argument; none if others call that graph too."""
    name = args_of(checkpoint)[0].target
    calls = [user for n in gm.graph.nodes if n.op == "get_attr" and n.target == name for user in n.users]
    if len(calls) != 1:
        return []
    inner = [n for n in checkpoint_body(gm, checkpoint).graph.nodes if n.op == "placeholder"]
    return [(i, o) for i, o in zip(inner, checkpoint.args[1:], strict=True) if isinstance(o, fx.Node)]


def erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erases nodes that nothing reads, the last first.

    ``Graph.eliminate_dead_code`` would do more: it takes methods that write in place, and the begin and end of a
    ``vmap``, for unused.

    Args:
        nodes: Nodes of one graph that only compute.
    """
    for node in sorted(set(nodes), reverse=True):
        if not node.users:
            node.graph.erase_node(node)
