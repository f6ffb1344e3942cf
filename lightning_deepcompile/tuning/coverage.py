"""The programs and batches that a plan was made for."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from lightning_deepcompile.capture.frames import Frames

_FAR = 1.25
"""How many times as large, or as small, batches are for which a plan is made anew."""


class Coverage:
    """Tracks which programs and batches of a training step were measured for a plan, and whether others run.

    Knows programs by their contents, as plan files do.

    Ranks may meet other shapes: what it answers must be exchanged before anything follows from it.

    Args:
        frames: The captured graphs.

    Attributes:
        measured: Elements of the smallest and of the largest measured batch; zeros if unknown.
    """

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self.measured = 0, 0
        self._known: set[str] = set()
        self._batches: list[tuple[int, int]] = []  # elements, and the uncovered runs of programs before each

    def adopt(self, contents: Iterable[str]) -> None:
        """Sets which programs the loaded plan covers."""
        self._known, self._batches = set(contents), []

    def note(self, elements: int) -> None:
        """Call before each of the last batches before a look.

        Args:
            elements: Of this rank's batch.
        """
        self._batches.append((elements, self._uncovered))

    def look(self) -> bool:
        """Returns whether most of the batches noted ran programs that no plan covers, or all of them are far off.

        A rare batch, such as a single row, is none to plan for: steps that are measured would rarely have it.
        """
        batches, self._batches = self._batches, []
        before = [*(count for _, count in batches), self._uncovered]
        uncovered = sum(count < after for count, after in itertools.pairwise(before))
        return 2 * uncovered > len(batches) or self._far_off([elements for elements, _ in batches])

    def adds(self, names: Collection[str], elements: Sequence[int]) -> bool:
        """Returns whether measured steps ran what was not measured before.

        Args:
            names: The programs that most of them ran.
            elements: Of this rank's batches.
        """
        return not self._contents(names) <= self._known or self._far_off(elements)

    def add(self, names: Collection[str], elements: Sequence[int]) -> None:
        """Marks programs that measured steps ran as covered by a plan, which is made for these steps' batches.

        Args:
            names: The programs.
            elements: Of this rank's batches.
        """
        self._known |= self._contents(names)
        self.measured = min(elements, default=0), max(elements, default=0)

    @property
    def _uncovered(self) -> int:
        """The number of runs of programs that no plan covers."""
        return sum(e.calls for e in self._frames.training if e.program.schedule.content not in self._known)

    def _far_off(self, elements: Sequence[int]) -> bool:
        """Returns whether all batches are much larger, or all much smaller, than those that the plan is made for."""
        fewest, most = self.measured
        if not elements or not most:
            return False
        return min(elements) > most * _FAR or max(elements) < fewest / _FAR

    def _contents(self, names: Collection[str]) -> set[str]:
        return {e.program.schedule.content for e in self._frames.training if e.program.name in names}
