"""Operators that take rows apart and put a loss together: what a graph shows of what is computed in pieces.

Regions are cut between pieces. A partitioner sees that a loss's gradients belong to forward; it would move as much of
them into backward as saves bytes, and that is not the same for every number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_deepcompile import compat

__all__ = ["complete_loss", "piece_ops", "take_piece", "take_piece_op"]


@torch.library.custom_op("lightning_deepcompile::take_piece", mutates_args=())
def take_piece(rows: Tensor, start: int, stop: int, after: Tensor | None = None) -> Tensor:
    """Copies a piece of what is computed of rows.

    A copy, and no view: pieces of equal sizes are then equal to a compiler, which compiles what reads them once.

    Args:
        rows: Shape ``(n, ...)``.
        start: First row.
        stop: Behind the last row.
        after: What must be there first. What backward computes again depends on its gradient so: otherwise a compiler
            would take it for what forward has computed, and save that.

    Returns:
        Shape ``(stop - start, ...)``, dense.
    """
    return rows[start:stop].clone(memory_format=torch.contiguous_format)


@take_piece.register_fake
def _(rows: Tensor, start: int, stop: int, after: Tensor | None = None) -> Tensor:
    return rows.new_empty((stop - start, *rows.shape[1:]))


@torch.library.custom_op("lightning_deepcompile::complete_loss", mutates_args=())
def complete_loss(loss: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Copies a loss when its gradients are there.

    Args:
        loss: One number.
        gradients: What backward will scale.

    Returns:
        The loss.
    """
    return loss.clone()


@complete_loss.register_fake
def _(loss: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(loss)


def take_piece_op() -> compat.OpOverload:
    """`take_piece`, as it stands in graphs."""
    return torch.ops.lightning_deepcompile.take_piece.default


def piece_ops() -> tuple[compat.OpOverload, ...]:
    """All operators of this module, as they stand in graphs: they do nothing but to copy."""
    return take_piece_op(), torch.ops.lightning_deepcompile.complete_loss.default
