"""``device_mesh="auto"``: decides by sizes, before the model is sharded, how many ranks share the parameters.

Gathers inside of a node cost a fraction of those between nodes. So as few nodes as possible share, and the others hold
replicas, as far as every rank's memory allows it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.offload.host_memory import available_host_memory
from lightning_deepcompile.plan.budget import parse_budget
from lightning_deepcompile.profile.memory import memory_limit
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.ranks.exchange import maxima
from lightning_deepcompile.ranks.mesh import sharing_groups, smallest_that_fits
from lightning_deepcompile.sharding.needs import moving_bytes
from lightning_deepcompile.sharding.shards import lay_out
from lightning_deepcompile.sharding.wire_dtypes import WireDtypes

_log = logging.getLogger(__name__)

_STATES, _STATE_BYTES = 2, 4
"""Optimizer states of an element that is trained: Adam's two, of at least four bytes. Optimizers are built later."""

_ACTIVATIONS = 1 / 4
"""Part of what training may use that is left for activations, of which nothing is known before a step is traced.

A group cannot grow once the model is sharded. Where too much is left, gathers cross the network that need not, which
costs time; where too little is, a large batch ends training. So it is twice what ``offload="auto"`` leaves,
beside which activations and optimizer states may still leave the device.
"""


class _Need(NamedTuple):
    """Bytes of a rank: those that stay between steps, and those that are gathered and reduced within one."""

    staying: int
    moving: int


class _Room(NamedTuple):
    """Bytes of a rank's memory: the total, and the part that training may use."""

    total: int
    usable: int

    @property
    def for_shards(self) -> int:
        """Bytes without the activations' part."""
        return int(self.usable * (1 - _ACTIVATIONS))


def choose_mesh(
    module: nn.Module,
    config: CompileConfig,
    *,
    stage: int,
    dtypes: WireDtypes,
    device_type: str,
    world_size: int,
    per_node: int,
) -> tuple[int, int] | None:
    """Chooses the smallest group of whole nodes whose ranks have memory for their shards; a collective of all ranks.

    All ranks decide alike: the largest need and the least memory of any rank count. One line on rank 0 reports the
    choice, with the numbers. Tensors that may live in host memory count as if they stayed on the device, as that costs
    more than a gather between nodes.

    Args:
        module: The model, before it is sharded; one that `check_module` accepts.
        config: Its ``memory_budget`` limits the memory.
        stage: ZeRO stage.
        dtypes: The dtypes in which parameters travel.
        device_type: ``"cpu"`` or ``"cuda"``.
        world_size: Number of ranks, node by node.
        per_node: Ranks of a node. If nodes do not have equally many, all ranks share.

    Returns:
        ``(replicas, ranks that share)``; None if all ranks share.
    """
    groups = sharing_groups(world_size, per_node)
    needs = [_need(module, config, group, stage=stage, dtypes=dtypes) for group in groups]
    room = _room(config, device_type, per_node)
    agreed = [int(n) for n in maxima([*(n for need in needs for n in need), *(-n for n in room)])]
    needs = [_Need(*agreed[2 * k : 2 * k + 2]) for k in range(len(groups))]
    room = _Room(*(-n for n in agreed[-2:]))
    chosen = smallest_that_fits([sum(need) for need in needs], room.for_shards)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.info("%s", _described(groups, chosen, needs, room, per_node))
    return None if groups[chosen] == world_size else (world_size // groups[chosen], groups[chosen])


def _need(module: nn.Module, config: CompileConfig, shards: int, *, stage: int, dtypes: WireDtypes) -> _Need:
    flats = lay_out(module, shards, dtypes).flat_layouts
    trained = [flat for flat in flats if flat.is_trained]
    parameters, gradients = sum(flat.nbytes for flat in flats), sum(flat.nbytes for flat in trained)
    states = _STATES * sum(max(flat.dtype.itemsize, _STATE_BYTES) * flat.numel for flat in trained)
    reduction = config.reduction(stage)
    moving = moving_bytes(flats, shards, stage=stage, reduction=reduction)
    return _Need(parameters + gradients + states, moving)


def _room(config: CompileConfig, device_type: str, per_node: int) -> _Room:
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        return _Room(torch.cuda.get_device_properties(device).total_memory, memory_limit(device, config.memory_budget))
    total = available_host_memory() // per_node
    return _Room(total, parse_budget(config.memory_budget, total))


def _described(groups: Sequence[int], chosen: int, needs: Sequence[_Need], room: _Room, per_node: int) -> str:
    """Returns the line that reports the choice, and the reason."""
    world, group, need = groups[-1], groups[chosen], needs[chosen]
    fits = sum(need) <= room.for_shards
    if group < world:
        nodes = "a node" if group == per_node else f"{group // per_node} nodes"
        sharing = f"the {group} ranks of {nodes} share the parameters, in {world // group} replicas"
    else:
        sharing = f"all {world} ranks share the parameters" if world > 1 else "the only rank has all parameters"
        if len(groups) == 1 and world > 1:
            sharing += f", as {_why_all(world, per_node)}"
    if chosen > 0:
        sharing += f" (among {groups[chosen - 1]} a rank would need {format_bytes(sum(needs[chosen - 1]))})"
    text = (
        f"device_mesh='auto': {sharing}. A rank needs {format_bytes(sum(need))}: {format_bytes(need.staying)} for its "
        "shards of parameters, gradients and optimizer states (Adam's two, in fp32 at least), "
        f"{format_bytes(need.moving)} for what is gathered and reduced at a time. The smallest device has "
        f"{format_bytes(room.total)}, of which these may take {format_bytes(room.for_shards)}"
    )
    if fits:
        return f"{text}."
    return (
        f"{text}, which is not enough; optimizer states may leave for the host, unless CompileConfig(offload='none')."
    )


def _why_all(world: int, per_node: int) -> str:
    if world % per_node:
        return f"they do not fill nodes of {per_node} evenly"
    return "there is one node" if world == per_node else "nodes have one rank each"
