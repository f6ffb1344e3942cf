"""The ranks that share the parameters, and those that hold the same shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


class Ranks:
    """The data-parallel ranks: each computes on its own data.

    On a 1-D mesh they all share the parameters. On a 2-D mesh (hybrid sharding) the ranks of a row do, and every row
    holds them once: the ranks of a column are replicas of each other.

    Args:
        mesh: 1-D, or 2-D of all ranks there are: ``(replicas, shards)``.

    Attributes:
        mesh: The mesh.
        placements: The placements of parameters on it: shards of dim 0 on its last dimension.
        shards: The number of ranks among which each parameter is divided.
        shard_rank: The index of the shards that this rank holds.
        replicas: The number of ranks that hold the same shards.
        world_size: Number of all ranks.

    Raises:
        ValueError: For another mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim not in (1, 2) or (mesh.ndim == 2 and mesh.size() != dist.get_world_size()):
            raise ValueError(
                f"The device mesh has the shape {tuple(mesh.shape)}: use a 1-D mesh, or (replicas, shards) of all "
                f"{dist.get_world_size()} ranks."
            )
        self.mesh = mesh
        self.placements: tuple[Placement, ...] = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
        self.shards, self.shard_rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        self.world_size = mesh.size()
        self.replicas = self.world_size // self.shards
        self._made: list[dist.ProcessGroup] = []

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks."""
        if self.mesh.ndim == 1:
            return self.mesh.get_group()
        world = dist.group.WORLD
        assert world is not None  # a mesh exists
        return world

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The process group of the ranks with which this one shares the parameters."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that hold this one's shards; None where there are no others."""
        return self.mesh.get_group(0) if self.replicas > 1 else None

    def new_shard_groups(self, count: int, **settings: Any) -> list[dist.ProcessGroup]:
        """Makes process groups like `shard_group`; a collective of all ranks.

        Args:
            count: How many.
            **settings: As for ``torch.distributed.new_group``.
        """
        if self.mesh.ndim == 1:
            rows = [dist.get_process_group_ranks(self.group)]
        else:
            rows = self.mesh.mesh.tolist()
        found = []
        for _ in range(count):
            # All ranks must make the groups of all rows, in the same order.
            groups = [dist.new_group(row, **settings) for row in rows]
            self._made += groups
            found += [g for g, row in zip(groups, rows, strict=True) if dist.get_rank() in row]
        return found

    def new_host_group(self, *, alone: bool = False, **settings: Any) -> dist.ProcessGroup:
        """Returns a process group of all the ranks' CPUs, `group` itself if it is one; a collective.

        Args:
            alone: Whether to make a new one in any case, so that nobody else communicates in it.
            **settings: As for ``torch.distributed.new_group``.

        Raises:
            RuntimeError: If the ranks do not reach each other.
        """
        if self.world_size == 1 or (self.mesh.device_type == "cpu" and not alone):
            return self.group
        try:
            made = dist.new_group(dist.get_process_group_ranks(self.group), backend="gloo", **settings)
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {dist.get_rank()} cannot join the gloo group of the ranks' hosts ({error}). Set "
                "GLOO_SOCKET_IFNAME to the network interface to use."
            ) from error
        self._made.append(made)
        return made

    def close(self) -> None:
        """Ends the process groups that this object made, in which nothing is under way; no communication.

        PyTorch keeps a group, with three threads and its sockets, until somebody ends it.
        """
        made, self._made = self._made, []
        for group in made:
            with suppress(ValueError):  # somebody has ended all groups
                dist.destroy_process_group(group)

    def forget(self) -> None:
        """Leaves the process groups to the process: what is under way in one would be waited for."""
        self._made = []

    def distribute(self, rows: Tensor, shape: Sequence[int], stride: Sequence[int]) -> DTensor:
        """Returns a DTensor of global `shape` and `stride` of which this rank holds `rows`; no communication."""
        return DTensor.from_local(
            rows, self.mesh, self.placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )
