"""Fake tensors and fake process groups: programs of many ranks, without memory and without ranks.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FakeTensorMode", "fake_ranks", "fake_tensors", "mode_of", "pretended"]


def fake_tensors() -> FakeTensorMode:
    """Returns a context in which tensors have sizes, strides and a device, but no memory and no values."""
    return FakeTensorMode()


def mode_of(tensor: Tensor) -> FakeTensorMode | None:
    """Returns the context that a fake tensor was made in; None for others."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


@contextlib.contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Makes this process, which has joined no group, the first of `count` ranks, whose collectives move nothing."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor keeps sizes that it found for a mesh, for all that equal it: there, this process may be another rank.
        _clear_sharding_prop_cache()


@contextlib.contextmanager
def pretended(group: dist.ProcessGroup, device_type: str) -> Iterator[DeviceMesh]:
    """Makes a mesh of the ranks of `group`, whose collectives return at once and move nothing; call on all of them."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 # registers the backend

    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend="fake", use_local_synchronization=True)
    try:
        # DTensor keeps what it found for a mesh, for all that equal it: those of another group must not.
        yield DeviceMesh.from_group(made, device_type, mesh_dim_names=(made.group_name,))
    finally:
        dist.destroy_process_group(made)
