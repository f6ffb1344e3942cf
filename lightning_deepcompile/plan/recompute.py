"""Decides how much of what a model checkpoints is recomputed: as much as memory requires.

Activation checkpointing is written for the memory that a model might need. If memory is free, the last blocks can keep
their activations: they are the first that backward is done with. This saves the time of their forward pass, which a
plan weighs against other uses of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.optimize import PassEffect
from lightning_deepcompile.plan.state_trade import Planned
from lightning_deepcompile.program.printer import format_bytes

__all__ = ["Checkpoint", "Recompute", "choose_recompute"]

_GAIN = 0.01  # of a step: the least gain for which it is traced again


@dataclass(frozen=True)
class Checkpoint:
    """A block that is recomputed in backward, and could keep its activations instead.

    Args:
        bytes: Of these activations.
        gathered: Bytes of the parameters that it reads: its part of the forward pass, as far as is known.
    """

    bytes: int
    gathered: int


@dataclass(frozen=True)
class Recompute:
    """The decision.

    Args:
        uncheckpointed: How many of the last blocks of each graph keep their activations.
        effects: The step as measured, and as predicted with a plan for them.
    """

    uncheckpointed: int
    effects: tuple[PassEffect, PassEffect]


def choose_recompute(
    profile: Profile,
    blocks: Mapping[int, Sequence[Checkpoint]],
    plan: Callable[[Profile], Planned],
    *,
    doubles: bool,
) -> Recompute | None:
    """Chooses by simulated time between as many blocks as fit, and half of them.

    Args:
        profile: Of a step that computes all of them again.
        blocks: Of each graph, by number and in the order in which they run.
        plan: Makes a plan with a profile.
        doubles: Whether room is to be left for batches twice as large.

    Returns:
        The choice that saves time over recomputing all; None if there is none.
    """
    if profile.budget is None or not any(blocks.values()):
        return None
    budget = profile.budget

    def needed(count: int) -> int:
        return sum(sum(block.bytes for block in some[-count:]) for some in blocks.values())

    _, effects = plan(profile)
    start, best = effects[0], effects[-1].prediction.seconds
    chosen: Recompute | None = None
    reserve = 2 if doubles else 1
    counts = range(1, max(map(len, blocks.values())) + 1)
    most = max((n for n in counts if start.prediction.peak_bytes + reserve * needed(n) <= budget), default=0)
    for count in sorted({most, most // 2} - {0}):
        left = budget - reserve * needed(count)
        _, effects = plan(replace(profile, budget=left))
        prediction = effects[-1].prediction
        seconds = prediction.seconds - _forward_seconds(profile, blocks, count)
        if prediction.peak_bytes <= left and seconds < (1 - _GAIN) * best:
            best, peak = seconds, prediction.peak_bytes + needed(count)
            text = f"blocks that keep activations: 0 become {count}, with {format_bytes(needed(count))}"
            effect = PassEffect("recompute", text, replace(prediction, seconds=seconds, peak_bytes=peak))
            chosen = Recompute(count, (start, effect))
    return chosen


def _forward_seconds(profile: Profile, blocks: Mapping[int, Sequence[Checkpoint]], count: int) -> float:
    """Seconds that the last `count` blocks compute in the forward passes of a step."""
    total = 0.0
    for schedule in profile.schedules:
        some = blocks.get(schedule.frame, ())
        if schedule.kind == "forward" and some:
            gathered = sum(gather.bytes for gather in schedule.groups())
            share = sum(block.gathered for block in some[-count:]) / max(gathered, 1)
            total += min(share, 1.0) * profile.clock(schedule)[-1]
    return total * profile.micro_batches
