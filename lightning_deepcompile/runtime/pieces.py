"""Operators that split rows and assemble a loss: computation in pieces, as a graph shows it.

Regions are cut between pieces. A partitioner that saw that a loss's gradients belong to forward would move as many of
them into backward as saves bytes, and that differs between numbers of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_deepcompile import compat


@torch.library.custom_op("lightning_deepcompile::take_piece", mutates_args=())
def take_piece(rows: Tensor, start: int, stop: int, after: Tensor | None = None) -> Tensor:
    """Copies a piece of a tensor of rows.

    It copies rather than returning a view, so that pieces of equal sizes are equal to a compiler, which compiles the
    code that reads them once.

    Args:
        rows: Shape ``(n, ...)``.
        start: First row.
        stop: Behind the last row.
        after: A tensor that must be computed first. It makes recomputation in backward depend on the gradient:
            otherwise a compiler would take it for what forward has computed, and save that.

    Returns:
        Shape ``(stop - start, ...)``, dense.
    """
    return rows[start:stop].clone(memory_format=torch.contiguous_format)


@take_piece.register_fake
def _(rows: Tensor, start: int, stop: int, after: Tensor | None = None) -> Tensor:
    return rows.new_empty((stop - start, *rows.shape[1:]))


@torch.library.custom_op("lightning_deepcompile::complete_loss", mutates_args=())
def complete_loss(loss: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Copies a loss once its gradients are computed.

    Args:
        loss: One number.
        gradients: The tensors that backward will scale.

    Returns:
        The loss.
    """
    return loss.clone()


@complete_loss.register_fake
def _(loss: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(loss)


def take_piece_op() -> compat.OpOverload:
    """`take_piece`, as it appears in graphs."""
    return torch.ops.lightning_deepcompile.take_piece.default


def piece_ops() -> tuple[compat.OpOverload, ...]:
    """All operators of this module, as they appear in graphs: they only copy."""
    return take_piece_op(), torch.ops.lightning_deepcompile.complete_loss.default
