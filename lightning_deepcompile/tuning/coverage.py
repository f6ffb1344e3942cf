"""Which programs of a training step were measured for a plan, and which others still run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from lightning_deepcompile.profile.probe import Run
from lightning_deepcompile.program.executable import Executable
from lightning_deepcompile.program.rewrite import read_schedule

__all__ = ["Coverage"]


class Coverage:
    """Knows programs by their contents, as plan files do.

    Ranks may meet other shapes: what it answers must be exchanged before anything follows from it.

    Args:
        training: The programs of a training step.
    """

    def __init__(self, training: Callable[[], list[Executable]]) -> None:
        self._training = training
        self._known: set[str] = set()
        self._calls: dict[str, int] = {}  # when a look was taken, by the program's name

    def adopt(self, contents: Iterable[str]) -> None:
        """Says which programs the plan that was read is of."""
        self._known = set(contents)

    def look(self) -> bool:
        """Whether a program that was not measured has run since the last look."""
        calls = {executable.program.name: executable.calls for executable in self._training()}
        ran = {name for name, count in calls.items() if count > self._calls.get(name, 0)}
        self._calls = calls
        return not self._contents(ran) <= self._known

    def adds(self, runs: Iterable[Run]) -> bool:
        """Whether a measured step, which did `runs`, ran a program that was not measured before."""
        return not self._contents({run.program for run in runs}) <= self._known

    def add(self, runs: Iterable[Run]) -> None:
        """Says that a plan was made of a measured step, which did `runs`."""
        self._known |= self._contents({run.program for run in runs})

    def _contents(self, names: Collection[str]) -> set[str]:
        return {read_schedule(e.program).content for e in self._training() if e.program.name in names}
