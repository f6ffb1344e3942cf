"""Divides a device's memory over a predicted step by kind of content."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.simulate import Prediction, Span
from lightning_deepcompile.program.schedule import Schedule

KINDS = ("shards", "optimizer states", "other", "gathered parameters", "gradients", "activations")
"""From the bottom of a stack to its top. ``other``: what stays and belongs to none, such as batches and buffers."""


class MemoryAt(NamedTuple):
    """The memory at one moment.

    Args:
        seconds: From the beginning of the step.
        sizes: Bytes of each of `KINDS`.
    """

    seconds: float
    sizes: tuple[int, ...]


def memory_by_kind(prediction: Prediction, schedules: Sequence[Schedule], profile: Profile) -> list[MemoryAt]:
    """Divides predicted memory by kind.

    The memory of a profile's regions is the allocator's count, less the runtime's part. The least of that in a step is
    permanent: shards, states, and others. The rest are activations. If the allocator does not count (CPU), regions have
    activations alone, and shards and states are added.

    Args:
        prediction: The simulator's.
        schedules: The programs of a micro-batch.
        profile: Of the step; has the sizes of shards and states.

    Returns:
        The most memory while each instruction is issued, in the host's order; and the end. A region's moment is when it
        computes, though a host that runs ahead has allocated before; instructions between two regions follow the first.
    """
    shards, states = profile.resident.shards, profile.resident.states
    rest = [point.bytes - point.arena - point.gradients - point.states + point.away for point in prediction.memory]
    stays = 0 if profile.host_computes else min(rest, default=0)
    if not profile.host_computes:  # the measurement includes them
        shards = min(shards, stays)
        states = min(states, stays - shards)
    other = max(stays - shards - states, 0)
    computed: dict[str, deque[Span]] = defaultdict(deque)
    for span in prediction.spans:
        if span.stream == "compute":
            computed[span.label].append(span)
    moments: list[MemoryAt] = []
    last: float | None = None  # the end of the region before
    for point, size in zip(prediction.memory, rest, strict=True):
        schedule = schedules[point.schedule]
        runs = computed[f"{schedule.name}/{schedule.instructions[point.instruction].region}"]
        seconds = point.seconds if last is None else last
        if runs:
            seconds, last = runs[0].start, runs[0].end
            runs.popleft()
        if moments:
            seconds = max(seconds, moments[-1].seconds)
        activations = max(size - stays - point.away, 0)
        sizes = (shards, states + point.states, other, point.arena, point.gradients, activations)
        moments.append(MemoryAt(seconds, sizes))
    end = max((span.end for span in prediction.spans), default=0.0)
    if moments and end > moments[-1].seconds:  # the optimizer's own temporary memory is not known
        moments.append(MemoryAt(end, moments[-1].sizes))
    return moments
