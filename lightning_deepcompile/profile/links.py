"""The transfers of a step in which each ran by itself, and the model of the link that explains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from lightning_deepcompile.plan.costs import Link
from lightning_deepcompile.profile.copies import shortest_seconds
from lightning_deepcompile.profile.marks import StepMarks
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.ranks.exchange import alike, maxima

_UNKNOWN = Link(0.0, 1e12)
_ELEMENTS = 256
"""Of a rank's part of a small transfer, in float32: a transfer of ten times as many takes as long."""


class Transfer(NamedTuple):
    """A gather or a reduction with nothing beside it.

    Args:
        kind: Of the tensors that travel.
        size: Bytes of the whole tensors.
        seconds: The least of its runs: a rank that comes early waits for the others.
    """

    kind: Literal["parameters", "gradients"]
    size: int
    seconds: float


def transfers_of(isolated: StepMarks, schedules: Mapping[str, Schedule]) -> list[Transfer]:
    """Returns the transfers of a step, in the order of its programs.

    Args:
        isolated: A step whose programs waited for every gather and every reduction at once.
        schedules: Those that ran in it, by program name.

    Raises:
        ProfileError: If a run ended early.
    """
    isolated.synchronize()
    found = []
    for name in dict.fromkeys(run.program for run in isolated.runs if run.program in schedules):
        runs = [(isolated.at_boundary(run), run.seconds()) for run in isolated.runs_of(schedules[name])]
        for position, instruction in enumerate(schedules[name].instructions):
            traits = instruction.traits
            if traits.effect == ("launch", "parameters"):
                # The wait is the next instruction.
                seconds = [row[position] + row[position + 1] for _, row in runs]
                found.append(Transfer("parameters", instruction.bytes, min(seconds)))
            elif traits.effect == ("launch", "gradients"):
                # Elsewhere gradients are added up.
                seconds = [row[position] for boundary, row in runs if boundary or not traits.at_boundary]
                if seconds:
                    found.append(Transfer("gradients", instruction.bytes, min(seconds)))
    return found


def small_transfers(ds_id: int, world_size: int, device: torch.device) -> list[Transfer]:
    """Makes a few small gathers and reductions, and returns one of each kind; a collective.

    The groups of a model are often of two sizes, which do not tell a link's latency from its bandwidth.

    Args:
        ds_id: A parameter, which names the runtime.
        world_size: Ranks that share it.
        device: Where it is.
    """
    whole = torch.zeros(_ELEMENTS * world_size, device=device)
    shard, gather, reduce = whole[:_ELEMENTS], torch.ops.dc.gather, torch.ops.dc.reduce
    gathers = shortest_seconds(lambda: gather(shard, ds_id, whole.shape, whole.dtype), device, busy=True)
    reductions = shortest_seconds(lambda: reduce(whole, ds_id, shard.shape, whole.dtype), device, busy=True)
    return [Transfer("parameters", whole.nbytes, gathers), Transfer("gradients", whole.nbytes, reductions)]


def agree(mine: Sequence[Transfer], group: dist.ProcessGroup) -> Sequence[Transfer]:
    """Returns the transfers with the least time of all ranks, where all made the same ones; a collective.

    The rank that comes last to a collective waits for no other: its time is the transfer's own.

    Args:
        mine: Those of this rank.
        group: The ranks.
    """
    if not alike(repr([(one.kind, one.size) for one in mine]), group):
        return mine
    least = maxima([-one.seconds for one in mine], group)
    return [Transfer(one.kind, one.size, -seconds) for one, seconds in zip(mine, least, strict=True)]


def fit_link(transfers: Sequence[Transfer], world_size: int) -> Link:
    """Returns the latency and bandwidth that explain the transfers best, relative to their durations.

    Args:
        transfers: Of one kind.
        world_size: Number of ranks.

    Returns:
        The link. If all are of about one size, latency and bandwidth cannot be told apart: all time counts
        as bandwidth then. Without transfers, a link that costs almost nothing.
    """
    scale = (world_size - 1) / world_size
    points = [(one.size * scale, one.seconds) for one in transfers if one.size > 0 and one.seconds > 0]
    if not points:
        return _UNKNOWN
    if scale == 0:
        return Link(min(seconds for _, seconds in points), _UNKNOWN.bandwidth)
    # Least squares of (latency + bytes / bandwidth) / seconds = 1.
    s_ll = sum(1 / t**2 for _, t in points)
    s_lb = sum(b / t**2 for b, t in points)
    s_bb = sum(b * b / t**2 for b, t in points)
    s_l = sum(1 / t for _, t in points)
    s_b = sum(b / t for b, t in points)
    determinant = s_ll * s_bb - s_lb**2
    sizes = [b for b, _ in points]
    if max(sizes) < 1.5 * min(sizes) or determinant <= 1e-12 * s_ll * s_bb:
        return Link(0.0, s_bb / s_b)
    latency = (s_l * s_bb - s_b * s_lb) / determinant
    inverse = (s_ll * s_b - s_lb * s_l) / determinant
    if inverse <= 0:  # bigger transfers were not slower: all time is latency
        return Link(s_l / s_ll, max(sizes) / min(t for _, t in points) * 1e3)
    if latency < 0:
        return Link(0.0, s_bb / s_b)
    return Link(latency, 1 / inverse)
