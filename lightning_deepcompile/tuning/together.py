"""Merges the measurements of all ranks; ranks that ran the same programs exchange numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_deepcompile.plan.costs import Profile, ProfileError
from lightning_deepcompile.plan.fit_measured import Checkpoint
from lightning_deepcompile.profile.merge import frame_of, merge_profiles, numbers_of, with_numbers
from lightning_deepcompile.profile.workload import Workload
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.ranks.exchange import exchange, maxima, number_of
from lightning_deepcompile.tuning.slow_ranks import MUCH


@dataclass(frozen=True)
class Seen:
    """The measurements of a round, of one rank or merged over all.

    Args:
        profile: Of its programs.
        start: The schedules that planning starts from.
        new: Whether it ran programs that were not measured before; of all ranks: whether any did.
        checkpoints: Of each rank whose blocks differ from the others', what it computes again and could keep.
        steps: The rank's part of the workload.
        workload: The steps that were seen; None of one rank.
        unequal: Whether a rank computed much longer than another one, with the same programs in steps of equal sizes.
    """

    profile: Profile
    start: tuple[Schedule, ...]
    new: bool
    checkpoints: Sequence[list[list[Checkpoint]]]
    steps: Sequence[float] = ()
    workload: Workload | None = None
    unequal: bool = False

    @property
    def seconds(self) -> float:
        """Seconds for which its regions compute."""
        return sum(cost.seconds for cost in self.profile.regions.values())


def put_together(mine: Seen | None, error: str, unknown: Sequence[float], group: dist.ProcessGroup) -> Seen:
    """Merges the measurements of all ranks into what they all plan with; a collective.

    Args:
        mine: What this rank saw; None if that failed.
        error: Why it failed.
        unknown: This rank's part of the workload in that case.
        group: The ranks.

    Raises:
        ProfileError: If a rank failed, or ranks ran different programs in the profiled step.
    """
    frame = "" if mine is None else repr((frame_of(mine.profile), mine.start, mine.checkpoints))
    digest, seconds = float(number_of(frame)), 0.0 if mine is None else mine.seconds
    told = [float(mine is None), digest, -digest, seconds, -seconds, float(mine is not None and mine.new)]
    failed, most_digest, least_digest, most, least, new, *numbers = maxima(
        [*told, *(unknown if mine is None else mine.steps)], group
    )
    workload = Workload.merged(numbers)
    if mine is None or failed:
        errors = exchange(error, group)
        raise ProfileError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text))
    if most_digest == -least_digest:
        profile = with_numbers(mine.profile, maxima(numbers_of(mine.profile), group))
        unequal = most > -least * MUCH > 0 and not workload.varied
        return Seen(profile, mine.start, new > 0, mine.checkpoints, (), workload, unequal)
    everybody = exchange(mine, group)  # batches of different shapes
    checkpoints = [one for other in everybody for one in other.checkpoints]
    merged = merge_profiles([other.profile for other in everybody])
    return Seen(merged, everybody[0].start, new > 0, checkpoints, (), workload)
