"""Decides by sizes, before the model is sharded, which shards live in host memory, and whether states may have to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.plan.fit import MemoryPlan, Move, Need, fit, move_all
from lightning_deepcompile.plan.offload import Offloading, check_host, chunk_bytes
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.ranks.exchange import maxima
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.sharding.layout import FlatLayout
from lightning_deepcompile.sharding.needs import moving_bytes
from lightning_deepcompile.sharding.shards import lay_out
from lightning_deepcompile.sharding.wire_dtypes import WireDtypes

_log = logging.getLogger(__name__)

_ROOMY = 1 / 2
"""Part of the budget up to which shards, gradients and states stay in any case: activations leave before them."""

_SLOTS = 2
"""Of the arena, for shards on their way to a gather: one arrives while the one before is gathered."""

_ACTIVATIONS = 1 / 8
"""Part of the budget that is left for activations, of which nothing is known before the step is traced."""


@dataclass(frozen=True)
class HostedShards:
    """The decision about shards and states in host memory.

    Args:
        offloading: How each kind is offloaded: as `CompileConfig.offload` says, but ``"none"`` for parameters where all
            may stay and do, and for states where sizes say that all may stay.
        flat_layouts: Indices of the layouts whose shards live in host memory.
        plan: Why, and how much; None where none may leave.
    """

    offloading: Offloading = Offloading()
    flat_layouts: frozenset[int] = frozenset()
    plan: MemoryPlan | None = None

    @property
    def bytes(self) -> int:
        """Bytes of each rank's shards in host memory."""
        return 0 if self.plan is None else self.plan.bytes("parameters")

    def describe(self) -> str:
        """Describes what is in host memory and why; "" if nothing is."""
        return "" if self.plan is None else self.plan.describe("parameters")


def decide_hosted(
    config: CompileConfig,
    module: nn.Module,
    ranks: Ranks,
    memory: PeakMemory,
    *,
    stage: int,
    dtypes: WireDtypes,
    host_bytes: int,
) -> HostedShards:
    """Decides before the model is sharded; a collective unless the settings alone decide.

    Args:
        config: What may be offloaded, and what memory may be used.
        module: The model.
        ranks: The data-parallel ranks.
        memory: Of the device where it will run.
        stage: ZeRO stage.
        dtypes: The dtypes in which parameters travel.
        host_bytes: What this rank may take of host memory.

    Raises:
        ValueError: If ``offload`` names parameters below stage 3, where the device has them unsharded in any case.
        MemoryBudgetError: If what leaves does not fit into host memory.
    """
    offloading = config.offloading
    if stage != 3:
        if isinstance(config.offload, list) and "parameters" in config.offload:
            raise ValueError(
                f"CompileConfig(offload={config.offload!r}): parameters can be offloaded at stage 3 alone: at stage "
                f"{stage} the device holds them unsharded. Use stage=3, or leave 'parameters' out."
            )
        offloading = replace(offloading, parameters="none")
    mode, states = offloading.parameters, offloading.states
    if mode == "none" and states != "auto":
        return HostedShards(offloading)
    flats = lay_out(module, ranks.shards, dtypes).flat_layouts
    (least,) = maxima([-memory.limit(config.memory_budget)], ranks.group)
    budget, shards = int(-least), [flat.nbytes for flat in flats]
    if states == "auto" and sum(shards) + _others(config, flats, ranks, stage, leave=False) <= _ROOMY * budget:
        offloading = replace(offloading, states="none")
    if mode == "none":
        return HostedShards(offloading)
    # A buffer travels while the blocks before it compute, which need the link themselves if they left: of equal ones,
    # as layers are, those go that lie far apart.
    order = sorted(range(len(shards)), key=lambda index: (-shards[index], _spread(index)))
    leaving = Move("parameters", tuple(shards[index] for index in order), slots=_SLOTS)
    others = _others(config, flats, ranks, stage, leave=config.offloading.states != "none")
    need, room = Need({"step": others + sum(shards)}, (leaving,)), int(budget * (1 - _ACTIVATIONS))
    plan = move_all(need, room, f"offload={config.offload!r}") if mode == "all" else fit(need, room, "same")
    hosted = frozenset(order[unit] for unit in plan.gone("parameters"))
    decided = HostedShards(replace(offloading, parameters=mode if hosted else "none"), hosted, plan)
    check_host(decided.bytes, host_bytes, config.host_memory_budget, "parameters")
    if ranks.group.rank() == 0:
        level = logging.INFO if hosted else logging.DEBUG
        _log.log(level, "%s", decided.describe() or f"All parameters stay on the device: {plan.why}")
    return decided


def _others(config: CompileConfig, flats: Sequence[FlatLayout], ranks: Ranks, stage: int, *, leave: bool) -> int:
    """Returns the most bytes that everything but shards takes at a time, with Adam's states.

    Args:
        config: When gradients are reduced.
        flats: Layouts of the shards.
        ranks: The ranks.
        stage: ZeRO stage.
        leave: Whether all states wait in host memory.
    """
    gradients = sum(flat.nbytes for flat in flats if flat.is_trained)
    states, stepping = 2 * gradients, 0
    if leave:  # they are copied to the device with their parameters, through three buffers
        sizes = [shard.shard_numel * flat.dtype.itemsize for flat in flats for shard in flat.shards]
        states, stepping = 0, 3 * min(max(chunk_bytes(states), 3 * max(sizes, default=0)), gradients)
    moving = moving_bytes(flats, ranks.shards, stage=stage, reduction=config.reduction(stage))
    return gradients + states + max(moving, stepping)


def _spread(index: int) -> int:
    """Orders numbers so that the first few of them are far apart, whatever their range: by their bits, reversed."""
    return int(f"{index:032b}"[::-1], 2)
