"""Predicates and small queries on FX graphs, shared by capture, regions and lowering."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from lightning_deepcompile import compat
from lightning_deepcompile.program.sizes import tensor_bytes
from lightning_deepcompile.runtime.lookups import looked_up, lookup_ops
from lightning_deepcompile.runtime.ops import gather_op, reduce_op
from lightning_deepcompile.runtime.pieces import take_piece_op
from lightning_deepcompile.runtime.statistics import statistics_ops


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of `node`; the operator knows their types, torch's annotation is a union of all possible ones."""
    return node.args


def named_args(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator's call, by name, those that it leaves to their defaults included."""
    if not isinstance(node.target, compat.OpOverload):
        return {}
    known = compat.schema_of(node.target).arguments
    given = {argument.name: value for argument, value in zip(known, node.args, strict=False)} | node.kwargs
    return {argument.name: argument.default_value for argument in known} | given


def attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The subgraph (of a higher-order operator) or the constant that the ``get_attr`` node refers to."""
    return functools.reduce(getattr, str(node.target).split("."), gm)


def is_gather(node: fx.Node) -> bool:
    """Returns whether `node` gathers a parameter."""
    return node.op == "call_function" and node.target is gather_op()


def is_reduce(node: fx.Node) -> bool:
    """Returns whether `node` reduces a gradient."""
    return node.op == "call_function" and node.target is reduce_op()


def is_lookup(node: fx.Node) -> bool:
    """Returns whether `node` looks rows up on the ranks that hold them, or is a part of such a look-up."""
    return node.op == "call_function" and node.target in lookup_ops()


def is_of_statistics(node: fx.Node) -> bool:
    """Returns whether `node` shares statistics of the batch with all ranks."""
    return node.op == "call_function" and node.target in statistics_ops()


def is_piece(node: fx.Node) -> bool:
    """Returns whether `node` takes a piece of rows."""
    return node.op == "call_function" and node.target is take_piece_op()


def looked_up_name(node: fx.Node) -> str:
    """The name of the parameter of `node`, for which `is_lookup` holds."""
    return looked_up(node.args)


def is_view(node: fx.Node) -> bool:
    """Returns whether `node` returns (parts of) its first argument's memory under another shape."""
    if node.op != "call_function":
        return False
    if is_element(node):
        return is_view(args_of(node)[0])
    return _target_is_view(node.target)


@functools.cache
def _target_is_view(target: Any) -> bool:
    if target is compat.UNSAFE_VIEW:
        return True
    if not isinstance(target, compat.OpOverload):
        return False
    returns = compat.schema_of(target).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def storage_node(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is, or is a view of."""
    while is_view(node):
        node = args_of(node)[0]
    return node


def is_random(node: fx.Node) -> bool:
    """Returns whether `node` draws random numbers."""
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return compat.is_inductor_random(node.target)
    return named_args(node).get("dropout_p") != 0.0  # attention is tagged as random even without dropout


def is_scalar(node: fx.Node) -> bool:
    """Returns whether `node` computes sizes or other Python numbers rather than tensors."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def is_element(node: fx.Node) -> bool:
    """Returns whether `node` takes an element of a tuple that another node returns."""
    return node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node)


def is_compute(node: fx.Node) -> bool:
    """Returns whether `node` belongs into a region: it is neither communication nor arithmetic of sizes.

    Numbers that a region's tensors, or parameters, are needed for (flash attention's lengths, the size of an
    intermediate result) stay with those tensors.
    """
    if node.op != "call_function" or is_gather(node) or is_reduce(node):
        return False
    return not is_scalar(node) or any(is_gather(source) or is_compute(source) for source in node.all_input_nodes)


def nbytes(node: fx.Node) -> int:
    """Bytes of a node's tensor; 0 for anything else. Symbolic sizes count with their hints."""
    return tensor_bytes(node.meta.get("val"))


def source_gather(node: fx.Node) -> fx.Node | None:
    """The gather that `node` is a chain of views of, or None."""
    current: Any = node
    while isinstance(current, fx.Node):
        if is_gather(current):
            return current
        if not is_view(current):
            return None
        current = current.args[0]
    return None


def output_node(graph: fx.Graph) -> fx.Node:
    """The graph's output node."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")
