"""``nn.SyncBatchNorm`` inside of captured steps: operators of the graph share the statistics of all ranks' batches.

PyTorch's own forward calls collectives on the host, for GPU tensors alone: it would break the graph at every layer, and
refuses CPUs. Here one operator communicates, and traceable, differentiable arithmetic does the rest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_deepcompile import compat
from lightning_deepcompile.runtime.statistics import gather_statistics

_GROUP = "_dc_statistics_group"


class TracedSyncBatchNorm(nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` that can be traced, on any device. Statistics are kept and combined in fp32 at least."""

    # Exists whenever `running_mean` does.
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes `input` of shape ``(N, C, ...)``; while training with the statistics of all ranks' inputs."""
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group, ranks = self.__dict__[_GROUP]
        if not self.training or ranks == 1:
            return compat.BatchNorm.forward(self, input)
        values = input if input.dtype is torch.float64 else input.float()
        others = [dim for dim in range(input.dim()) if dim != 1]
        per_channel = [1, -1, *[1] * (input.dim() - 2)]

        # Each rank's mean and sum of squared distances from it: sums of squares would cancel. A rank without rows has
        # weight zero, and takes part.
        count = values.new_full((1,), input.numel() // input.shape[1])
        mean = values.sum(others) / count.clamp(min=1)
        spread = (values - mean.view(per_channel)).square().sum(others)
        gathered = gather_statistics(torch.cat([mean, spread, count]), group, ranks)
        means, spreads, counts = gathered.split([self.num_features, self.num_features, 1], dim=1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        spread = (spreads + counts * (means - mean).square()).sum(0)

        self._track(mean, spread / (total - 1))
        output = (values - mean.view(per_channel)) * torch.rsqrt(spread / total + self.eps).view(per_channel)
        if self.weight is not None:
            output = output * self.weight.view(per_channel)
        if self.bias is not None:
            output = output + self.bias.view(per_channel)
        return output.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None:
            return
        self.num_batches_tracked.add_(1)
        weight = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.float()
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_(running + (new - running) * weight)


def trace_sync_batchnorm(module: nn.Module) -> None:
    """Makes every ``nn.SyncBatchNorm`` in `module` a `TracedSyncBatchNorm`, in place; subclasses do not change.

    Args:
        module: The model, before it is sharded; a layer with a process group of its own keeps that.
    """
    for child in module.modules():
        if type(child) in (nn.SyncBatchNorm, TracedSyncBatchNorm):
            group: Any = child.process_group or dist.group.WORLD
            child.__dict__[_GROUP] = (group.group_name, dist.get_world_size(group))
            child.__class__ = TracedSyncBatchNorm
