"""Finds a rank that computes longer than the others, so that all of them wait for it.

A single step proves little: a busy host, or a larger batch, makes any rank late. So if ranks computed for unequal times
in a round's measured steps, with equal work, several more steps are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_deepcompile.capture.frames import Frames
from lightning_deepcompile.profile.instrument import instrument
from lightning_deepcompile.profile.marks import StepMarks
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.ranks.exchange import maxima, number_of

MUCH = 1.2
"""How many times as long as the fastest rank a slow one computes."""

_STEPS = 5


class SlowRanks:
    """Compares how long ranks compute, over several steps.

    Args:
        group: The ranks.
        device: Where programs run.
        memory: Of that device.
        frames: The captured graphs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        memory: PeakMemory,
        frames: Frames,
    ) -> None:
        self._group, self._device, self._memory, self._frames = group, device, memory, frames
        self._steps: list[tuple[StepMarks, dict[str, Schedule]]] | None = None

    @property
    def compares(self) -> bool:
        """Returns whether steps are compared, or will be when no round is under way."""
        return self._steps is not None

    def suspect(self) -> None:
        """Starts a comparison over the next steps; call on all ranks."""
        self._steps = []

    def next_step(self) -> tuple[StepMarks | None, str]:
        """Call before a step that is to be compared, and once behind the last one, on all ranks.

        Returns:
            What marks the step, None behind the last one; and which rank is slow, "" if none is or it is not known yet.
        """
        assert self._steps is not None
        if len(self._steps) < _STEPS:
            marks = StepMarks(self._device, self._memory)
            self._steps.append((marks, instrument(self._frames.training, marks)))
            return marks, ""
        for executable in self._frames.training:
            executable.swap(executable.program)
        steps, self._steps = self._steps, None
        contents = [[schedules[run.program].content for run in marks.runs] for marks, schedules in steps]
        sizes = [[noted for _, noted in marks.work] for marks, _ in steps]
        return None, self._compare([_computed(*step) for step in steps], repr((contents, sizes)))

    def _compare(self, mine: Sequence[float], work: str) -> str:
        digest = float(number_of(work))
        told = maxima([*mine, *(-seconds for seconds in mine), digest, -digest], self._group)
        most, least = told[:_STEPS], [-seconds for seconds in told[_STEPS : 2 * _STEPS]]
        if told[-2] != -told[-1] or min(least) <= 0:
            return ""
        ratios = [slow / fast for slow, fast in zip(most, least, strict=True)]
        if min(ratios) < MUCH:
            return ""
        rank = float(self._group.rank())
        found = maxima(
            [-rank if seconds == top else -math.inf for seconds, top in zip(mine, most, strict=True)], self._group
        )
        if len(set(found)) > 1:
            return ""
        return (
            f"Rank {int(-found[0])} computes {min(ratios):.2f} to {max(ratios):.2f} times as long as the fastest, in "
            f"{_STEPS} successive steps of equal work. All wait for it, and plans are made for its times. Look for "
            "other work on that rank's device or host."
        )


def _computed(marks: StepMarks, schedules: dict[str, Schedule]) -> float:
    """Seconds of a step in which its regions computed."""
    marks.synchronize()
    total = 0.0
    for run in marks.runs:
        seconds = run.seconds()
        total += sum(seconds[position] for position in schedules[run.program].at("compute"))
    return total
