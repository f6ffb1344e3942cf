"""Counts the floating-point operations of a graph: matrix products, convolutions and attention."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx
from torch.utils.flop_counter import flop_registry

from lightning_deepcompile import compat


def count_flops(nodes: Iterable[fx.Node], *, backward: bool = False) -> int:
    """Counts the floating-point operations of a graph or a part of one, by the formulas of `torch.utils.flop_counter`.

    Recomputation in a backward graph (activation checkpointing) does not count: utilization is that of the model.

    Args:
        nodes: Of a forward, backward or inference graph of ATen operators. Symbolic sizes count with their hints.
        backward: Whether it is a backward graph.
    """
    calls = [node for node in nodes if node.op == "call_function"]
    return sum(flops_of(node) for node in calls if not (backward and compat.is_of_forward(node)))


def flops_of(node: fx.Node) -> int:
    """Returns the floating-point operations of one call of an operator; 0 where there is no formula."""
    # PyTorch's formulas are of the GPUs' kernels; the CPU's take the same arguments in the same order.
    packet = node.target.overloadpacket if isinstance(node.target, compat.OpOverload) else None
    formula = flop_registry.get(compat.GPU_ATTENTION.get(packet, packet))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    count = formula(*args, **kwargs, out_val=node.meta.get("val"))
    return int(count if isinstance(count, int) else count.node.hint or 0)
