"""Shared parts of computing row by row: operators, shapes, and pieces of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

ELEMENTWISE = frozenset(
    "add sub mul truediv div neg pos pow square sqrt rsqrt exp log log1p abs tanh sigmoid clamp "
    "float double half bfloat16 to type".split()
)
"""Functions and methods of every element alone, if the other operands are numbers."""

_WRITERS = frozenset("setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split())


def same_shape(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Returns whether two shapes are the same, also with symbolic sizes; the question must not specialize them."""
    return len(shape) == len(other) and statically_known_true(sym_eq(tuple(shape), tuple(other)))


def change_between(first: fx.Node, last: fx.Node) -> str | None:
    """Finds a write to memory, or a change of mode, between `first` and `last`: a moved operator might see it.

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
    """Returns the bounds of pieces of rows; their sizes differ by at most one.

    Args:
        number: Of all rows.
        pieces: The number of pieces.
    """
    bounds = [index * number // pieces for index in range(pieces + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


class PieceGradients:
    """Gradients of piecewise computation: those of rows side by side, those of shared inputs added up.

    Sums are in fp32, or in a wider dtype of the operand's.

    Args:
        shared: The inputs that all pieces share.
        wanted: Of the rows, and of `shared`, whether their gradient is.

    Attributes:
        leaves: The tensors that pieces must use in place of `shared`.
    """

    def __init__(self, shared: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        self._of_rows, *of_shared = wanted
        self.leaves = [t.detach().requires_grad_(want) for t, want in zip(shared, of_shared, strict=True)]
        self._by_piece: list[Tensor] = []
        self._sums: dict[int, Tensor] = {}

    def leaf(self, piece: Tensor) -> Tensor:
        """Returns `piece` in the form that must be computed with."""
        return piece.detach().requires_grad_(self._of_rows)

    def add(self, result: Tensor, piece: Tensor, upstream: Tensor | None = None) -> None:
        """Differentiates the result of a piece.

        Args:
            result: The result.
            piece: The tensor that `leaf` returned.
            upstream: The gradient of `result`; None for a number's, 1.
        """
        asked = [t for t in (piece, *self.leaves) if t.requires_grad]
        found = iter(torch.autograd.grad(result, asked, upstream, allow_unused=True, materialize_grads=True))
        if self._of_rows:
            self._by_piece.append(next(found))
        for index, leaf in enumerate(self.leaves):
            if leaf.requires_grad:
                part = next(found).to(torch.promote_types(leaf.dtype, torch.float32))
                self._sums[index] = self._sums[index] + part if index in self._sums else part

    def finish(self) -> list[Tensor | None]:
        """Returns the gradients of rows and of shared inputs, in their dtypes; None for those not wanted."""
        sums = [self._sums[i].to(t.dtype) if i in self._sums else None for i, t in enumerate(self.leaves)]
        return [torch.cat(self._by_piece) if self._of_rows else None, *sums]
