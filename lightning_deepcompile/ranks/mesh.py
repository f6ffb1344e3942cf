"""Makes the device mesh that the strategy's arguments ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MeshArgument = tuple[int, int] | DeviceMesh | Literal["auto"]


def check_mesh(device_mesh: Any, *, hybrid: bool) -> None:
    """Raises for meshes on which parameters cannot be sharded, as far as that is known before processes start.

    Args:
        device_mesh: The argument.
        hybrid: Whether FSDP's name of the sharding strategy asks for a 2-D mesh.

    Raises:
        ValueError: For meshes that are not 1-D or 2-D, and if the arguments contradict each other.
    """
    if device_mesh is None or (isinstance(device_mesh, str) and device_mesh == "auto"):
        return
    if isinstance(device_mesh, DeviceMesh):
        fits = device_mesh.ndim in (1, 2)
    else:
        fits = isinstance(device_mesh, tuple | list) and len(device_mesh) == 2
        fits = fits and all(isinstance(size, int) and size >= 1 for size in device_mesh)
    if not fits:
        raise ValueError(
            f"DeepCompileStrategy(device_mesh={device_mesh!r}): use a tuple of two numbers, (how many replicas, ranks "
            "that share the parameters), a DeviceMesh of one or two dimensions, or 'auto'."
        )
    if hybrid and isinstance(device_mesh, DeviceMesh) and device_mesh.ndim == 1:
        raise ValueError(
            "DeepCompileStrategy(sharding_strategy='HYBRID_SHARD', device_mesh=...): hybrid sharding needs a 2-D mesh, "
            "and this one has a single dimension."
        )


def sharing_groups(world_size: int, per_node: int) -> list[int]:
    """Returns the numbers of neighbouring ranks that may share the parameters without splitting nodes.

    Args:
        world_size: Number of ranks, node by node.
        per_node: Ranks of a node.

    Returns:
        The ranks of 1, 2, ... nodes, ascending, as far as such groups divide all ranks evenly; the last is all ranks.
        It is the only one if nodes have one rank, or hold different numbers of ranks.
    """
    nodes, rest = divmod(world_size, per_node)
    if rest or per_node == 1:
        return [world_size]
    return [count * per_node for count in range(1, nodes + 1) if nodes % count == 0]


def smallest_that_fits(needs: Sequence[int], room: int) -> int:
    """Chooses the group of ranks that shares the parameters.

    Args:
        needs: Bytes that a rank needs with each group, from the smallest group to that of all ranks.
        room: Bytes that every rank has.

    Returns:
        The index of the first that fits; of the last if none does.
    """
    return next((index for index, need in enumerate(needs) if need <= room), len(needs) - 1)


def make_mesh(
    device_mesh: tuple[int, int] | DeviceMesh | None, *, hybrid: bool, device_type: str, world_size: int, per_node: int
) -> DeviceMesh:
    """Makes the mesh to train on; a collective of all ranks.

    Args:
        device_mesh: The strategy's argument, or what was chosen for ``"auto"``; None: all ranks share the parameters,
            or with `hybrid` those of a node.
        hybrid: Whether FSDP's name of the sharding strategy asks for a 2-D mesh.
        device_type: ``"cpu"`` or ``"cuda"``.
        world_size: Number of ranks.
        per_node: Ranks of a node.

    Returns:
        A 1-D mesh, or a 2-D one: ``(replicas, shards)``.

    Raises:
        ValueError: If the mesh is not one of all ranks, or of other devices.
    """
    if isinstance(device_mesh, DeviceMesh):
        if device_mesh.size() != world_size or device_mesh.device_type != device_type:
            raise ValueError(
                f"DeepCompileStrategy(device_mesh=...): the mesh has {device_mesh.size()} ranks of type "
                f"{device_mesh.device_type!r}, the Trainer {world_size} of type {device_type!r}. They must agree."
            )
        return device_mesh
    if device_mesh is None and not hybrid:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("data_parallel",))
    replicas, shards = device_mesh or (world_size // per_node, per_node)
    if replicas * shards != world_size:
        raise ValueError(
            f"DeepCompileStrategy(device_mesh={(replicas, shards)}): that is {replicas * shards} ranks, and there are "
            f"{world_size}, {per_node} on each node. The two numbers must multiply to that."
        )
    return init_device_mesh(device_type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
