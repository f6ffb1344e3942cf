"""What is known of computing row by row: operators, shapes, and pieces of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

__all__ = ["ELEMENTWISE", "change_between", "same_shape", "spans"]

ELEMENTWISE = frozenset(
    "add sub mul truediv div neg pos pow square sqrt rsqrt exp log log1p abs tanh sigmoid clamp "
    "float double half bfloat16 to type".split()
)
"""Functions and methods of every element alone, if the other operands are numbers."""

_WRITERS = frozenset("setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split())


def same_shape(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are the same, also where sizes are symbols; asking must not make numbers of them."""
    return len(shape) == len(other) and statically_known_true(sym_eq(tuple(shape), tuple(other)))


def change_between(first: fx.Node, last: fx.Node) -> str | None:
    """What writes to memory, or changes a mode, behind `first` and before `last`: what is moved there might see it.

    Returns:
        The name of the first such function or method; None if there is none.
    """
    node = first.next
    while node is not last:
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name in _WRITERS or "out" in node.kwargs
        if writes or name.startswith(("_enter", "_exit", "_set_grad", "set_grad")):
            return name
        node = node.next
    return None


def spans(number: Any, pieces: int) -> list[tuple[Any, Any]]:
    """Where pieces of rows begin and end: sizes differ by one at most.

    Args:
        number: Of all rows.
        pieces: How many there are.
    """
    bounds = [index * number // pieces for index in range(pieces + 1)]
    return list(zip(bounds, bounds[1:], strict=False))
