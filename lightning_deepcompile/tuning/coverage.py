"""The programs and batches that a plan was made for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lightning_deepcompile.capture.frames import Frames

__all__ = ["Coverage"]

_FAR = 1.25
"""How many times as large, or as small, batches are for which a plan is made anew."""


class Coverage:
    """Tracks which programs and batches of a training step were measured for a plan, and whether others run.

    Knows programs by their contents, as plan files do.

    Ranks may meet other shapes: what it answers must be exchanged before anything follows from it.

    Args:
        frames: The captured graphs.

    Attributes:
        last: The elements of this rank's latest batch before a look; 0 if unknown.
        measured: Elements of the smallest and of the largest measured batch; zeros if unknown.
    """

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self.last = 0
        self.measured = 0, 0
        self._known: set[str] = set()
        self._calls: dict[str, int] = {}  # at the last look or plan, by the program's name

    def adopt(self, contents: Iterable[str]) -> None:
        """Sets which programs the loaded plan covers."""
        self._known = set(contents)

    def look(self) -> bool:
        """Returns whether a program that was not measured has run since the last look, or the last batch is far off."""
        before, self._calls = self._calls, self._count()
        ran = {name for name, count in self._calls.items() if count > before.get(name, 0)}
        return not self._contents(ran) <= self._known or self._far_off([self.last] if self.last else [])

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
        self.measured, self._calls = (min(elements, default=0), max(elements, default=0)), self._count()

    def _count(self) -> dict[str, int]:
        return {executable.program.name: executable.calls for executable in self._frames.training}

    def _far_off(self, elements: Sequence[int]) -> bool:
        """Returns whether all batches are much larger, or all much smaller, than those that the plan is made for."""
        fewest, most = self.measured
        if not elements or not most:
            return False
        return min(elements) > most * _FAR or max(elements) < fewest / _FAR

    def _contents(self, names: Collection[str]) -> set[str]:
        return {e.program.schedule.content for e in self._frames.training if e.program.name in names}
