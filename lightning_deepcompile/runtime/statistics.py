"""Operators that share batch statistics among ranks: ``nn.SyncBatchNorm`` in a graph.

They are collectives inside of compute. Operators of one graph need not depend on each other, and a compiler may reorder
them: so each takes the result of the one before it, which `program/normalize.py` fills in. If ranks ran them in
different orders, collectives of equal size would mix layers' statistics without an error.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_deepcompile import compat

_WAITS = (torch.Tag.cudagraph_unsafe,)  # for other ranks, beside what a graph would hold


@torch.library.custom_op("lightning_deepcompile::gather_statistics", mutates_args=(), tags=_WAITS)
def gather_statistics(statistics: Tensor, group: str, ranks: int, after: Tensor | None = None) -> Tensor:
    """Gathers one vector from every rank.

    Args:
        statistics: This rank's, of shape ``(n,)``.
        group: Name of the process group.
        ranks: Its size.
        after: Must have been computed before.

    Returns:
        Shape ``(ranks, n)``.
    """
    gathered = statistics.new_empty(ranks * statistics.numel())
    compat.all_gather_into(gathered, statistics.contiguous(), compat.process_group(group))
    return gathered.view(ranks, -1)


@gather_statistics.register_fake
def _(statistics: Tensor, group: str, ranks: int, after: Tensor | None = None) -> Tensor:
    return statistics.new_empty(ranks, statistics.shape[0])


@torch.library.custom_op("lightning_deepcompile::sum_statistics_gradients", mutates_args=(), tags=_WAITS)
def sum_statistics_gradients(gradients: Tensor, group: str, after: Tensor | None = None) -> Tensor:
    """The derivative of `gather_statistics`: the sum of the gradients that all ranks' losses give this rank's vector.

    Args:
        gradients: Of what was gathered, by this rank's loss, ``(ranks, n)``.
        group: Name of the process group.
        after: Must have been computed before.

    Returns:
        Shape ``(n,)``.
    """
    ranks = compat.process_group(group)
    total = gradients.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=ranks)
    return total[dist.get_rank(ranks)].clone()


@sum_statistics_gradients.register_fake
def _(gradients: Tensor, group: str, after: Tensor | None = None) -> Tensor:
    return gradients.new_empty(gradients.shape[1])


def _remember_group(ctx: Any, inputs: tuple[Tensor, str, int, Tensor | None], output: Tensor) -> None:
    ctx.group = inputs[1]


def _gather_backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None, None]:
    return sum_statistics_gradients(gradients, ctx.group), None, None, None


gather_statistics.register_autograd(_gather_backward, setup_context=_remember_group)


def statistics_ops() -> tuple[compat.OpOverload, ...]:
    """The operators of this module, as they appear in graphs."""
    names = torch.ops.lightning_deepcompile
    return names.gather_statistics.default, names.sum_statistics_gradients.default
