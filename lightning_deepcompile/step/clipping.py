"""The norm of gradients of which every rank has a shard, and clipping them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_deepcompile import compat
from lightning_deepcompile.sharding.gradients import GradientSession
from lightning_deepcompile.sharding.shards import ShardedModel

__all__ = ["Clipping"]


@dataclass(frozen=True)
class Clipping:
    """Clips gradients in place.

    Args:
        model: The sharded model.
        gradients: Knows this rank's part of each gradient.
        device: Where they are.
    """

    model: ShardedModel
    gradients: GradientSession
    device: torch.device

    def norm(self, parameters: Iterable[Tensor], limit: float) -> Tensor:
        """Scales gradients so that their 2-norm over all ranks is at most `limit`; one collective, no host wait.

        Args:
            parameters: The module's, sharded or replicated; those without a gradient are left out.
            limit: Largest allowed norm.

        Returns:
            The norm before; a 0-dim tensor, equal on all ranks.
        """
        parameters = list(parameters)
        sharded, replicated = self._local_grads(parameters)
        norm = self._total(sharded, replicated, _norm_dtype(parameters))
        if sharded or replicated:
            # As torch.nn.utils.clip_grad_norm_: no branch on the norm, for which the host would have to wait.
            compat.scale(sharded + replicated, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm

    def total_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """The 2-norm of gradients over all ranks, which are left as they are; arguments as of `norm`."""
        parameters = list(parameters)
        return self._total(*self._local_grads(parameters), _norm_dtype(parameters))

    def value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Clamps every element of the gradients to ``[-limit, limit]``; arguments as of `norm`."""
        sharded, replicated = self._local_grads(parameters)
        if sharded or replicated:
            compat.clamp(sharded + replicated, limit)

    def _total(self, sharded: list[Tensor], replicated: list[Tensor], dtype: torch.dtype) -> Tensor:
        total = _square_sum(sharded, self.device, dtype)
        if self.model.ranks.shards > 1:
            dist.all_reduce(total, group=self.model.ranks.shard_group)
        return (total + _square_sum(replicated, self.device, dtype)).sqrt()

    @torch.no_grad()
    def _local_grads(self, parameters: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        sharded: list[Tensor] = []
        replicated: list[Tensor] = []
        for parameter in parameters:
            grad = self.gradients.local_grad(parameter)
            if grad is not None and grad.numel():
                (sharded if parameter in self.model.by_parameter else replicated).append(grad)
        return sharded, replicated


def _norm_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """What norms are computed in; of parameters, as a rank may lack gradients, and ranks must agree."""
    return torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32


def _square_sum(tensors: list[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=dtype, device=device)
    # In that dtype from the start: a norm in fp16 is infinite from 65520 on.
    return torch.stack(compat.norms(tensors, dtype)).square().sum()
