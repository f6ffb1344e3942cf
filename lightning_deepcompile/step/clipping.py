"""Computes the norm of sharded gradients, and clips them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_deepcompile import compat
from lightning_deepcompile.program.replay import Replays
from lightning_deepcompile.sharding.shards import ShardedModel
from lightning_deepcompile.step.local_gradients import Found, LocalGradients
from lightning_deepcompile.step.steady import Reads, Steady


@dataclass(eq=False)
class _Work:
    """The gradients to clip on this rank.

    Args:
        sharded: Gradients of which every rank has a part.
        replicated: Gradients that are equal on all ranks.
        dtype: The dtype in which norms are computed.
        limit: Largest allowed norm.
        total: The sum of squares of `sharded` over all ranks, once it is known.
    """

    sharded: list[Tensor]
    replicated: list[Tensor]
    dtype: torch.dtype
    limit: float = 0.0
    total: Tensor | None = None


class Clipping:
    """Clips gradients in place.

    If programs are replayed as CUDA graphs, so is clipping by norm. Its collective is not part of a graph: on several
    ranks there are two graphs, before it and after it.

    Args:
        model: The sharded model.
        device: Where the gradients are.
        replays: Records and replays clipping; None: no replay.
    """

    def __init__(self, model: ShardedModel, device: torch.device, replays: Replays | None = None) -> None:
        self._ranks, self._device = model.ranks, device
        self._model, self._gradients = model, LocalGradients(model)
        self._alone = Steady("clipping", replays, self._clip_alone)
        self._before = Steady("clipping.norm", replays, self._sharded_sum)
        self._behind = Steady("clipping.scale", replays, self._scale)

    @torch.no_grad()
    def norm(self, parameters: Iterable[Tensor], limit: float) -> Tensor:
        """Scales gradients so that their 2-norm over all ranks is at most `limit`; one collective, no host wait.

        Args:
            parameters: The module's, sharded or replicated; those without a gradient are left out.
            limit: Largest allowed norm.

        Returns:
            The norm before; a 0-dim tensor, equal on all ranks.
        """
        found = self._gradients.of(parameters)
        work = _work(found, limit)
        numbers = [limit, work.dtype] if found.are_own else None
        if self._ranks.shards == 1:
            last = self._alone
        else:
            last = self._behind
            work.total = self._reduced(self._before.run(work, numbers, lambda: _reads(found, work)))
        norm = last.run(work, numbers, lambda: _reads(found, work))
        return norm.clone() if last.replayed else norm

    def total_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Returns the 2-norm of gradients over all ranks, without changing them; arguments as of `norm`."""
        work = _work(LocalGradients(self._model).of(parameters))
        work.total = self._reduced(self._sharded_sum(work))
        return self._norm(work)

    def value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Clamps every element of the gradients to ``[-limit, limit]``; arguments as of `norm`."""
        work = _work(self._gradients.of(parameters))
        if work.sharded or work.replicated:
            compat.clamp(work.sharded + work.replicated, limit)

    def _reduced(self, total: Tensor) -> Tensor:
        if self._ranks.shards > 1:
            dist.all_reduce(total, group=self._ranks.shard_group)
        return total

    def _clip_alone(self, work: _Work) -> Tensor:
        work.total = self._sharded_sum(work)
        return self._scale(work)

    def _sharded_sum(self, work: _Work) -> Tensor:
        return _square_sum(work.sharded, self._device, work.dtype)

    def _norm(self, work: _Work) -> Tensor:
        assert work.total is not None
        return (work.total + _square_sum(work.replicated, self._device, work.dtype)).sqrt()

    def _scale(self, work: _Work) -> Tensor:
        norm = self._norm(work)
        if work.sharded or work.replicated:
            # As torch.nn.utils.clip_grad_norm_: no branch on the norm, which the host would have to wait for.
            compat.scale(work.sharded + work.replicated, torch.clamp(work.limit / (norm + 1e-6), max=1.0))
        return norm


def _work(found: Found, limit: float = 0.0) -> _Work:
    sharded: list[Tensor] = []
    replicated: list[Tensor] = []
    for gradient, one in zip(found.gradients, found.sharded, strict=True):
        if gradient is not None and gradient.numel():
            (replicated if one is None else sharded).append(gradient)
    # By the dtypes of parameters: a rank may lack gradients, and ranks must agree.
    wide = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in found.parameters)
    return _Work(sharded, replicated, torch.float64 if wide else torch.float32, limit)


def _reads(found: Found, work: _Work) -> Reads:
    # A sum that is not replayed is another tensor in every step.
    return Reads(found.parameters if work.total is None else [*found.parameters, work.total], found.places)


def _square_sum(tensors: list[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=dtype, device=device)
    tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    # In that dtype from the start: a norm in fp16 is infinite from 65520 on.
    return torch.stack(compat.norms(tensors, dtype)).square().sum()
