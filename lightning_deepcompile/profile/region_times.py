"""The times of a rank's regions in steps with batches of any sizes, from those that were measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from lightning_deepcompile.profile.marks import StepMarks
from lightning_deepcompile.profile.sizes import Curve, Sample, fit_curve
from lightning_deepcompile.program.live import traffic
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.program.sizes import Noted

_Key = tuple[str, str]  # the structure of a program, and the name of a region: graphs for other shapes share them


class RegionTimes:
    """Fits a curve to the runs of each region.

    Args:
        program: Returns a program by its name; None if it is gone.
    """

    def __init__(self, program: Callable[[str], Program | None]) -> None:
        self._program = program
        self._samples: defaultdict[_Key, list[Sample]] = defaultdict(list)
        self._curves: dict[_Key, Curve] = {}
        self._known: dict[tuple[str, Noted], tuple[dict[str, int], int]] = {}

    def add(self, marks: StepMarks, schedules: Mapping[str, Schedule]) -> None:
        """Adds the runs of a step with marks.

        Args:
            marks: Has the runs.
            schedules: Those that ran, by program name.
        """
        marks.synchronize()
        for run in marks.runs:
            sizes, schedule = self._sizes(run.program, run.noted), schedules.get(run.program)
            if sizes is None or schedule is None or len(run.marks) != len(schedule.instructions) + 1:
                continue
            for instruction, seconds in zip(schedule.instructions, run.seconds(), strict=True):
                if region := instruction.region:
                    sample = Sample(sizes[0][region], sizes[1], seconds)
                    self._samples[schedule.structure, region].append(sample)
                    self._curves.pop((schedule.structure, region), None)

    def seconds(self, name: str, noted: Noted) -> dict[_Key, float] | None:
        """Returns the time of each region in a run of a program; None if one was not measured.

        Args:
            name: The program's.
            noted: The sizes of its arguments.
        """
        program, sizes = self._program(name), self._sizes(name, noted)
        if program is None or sizes is None:
            return None
        keys = {(program.schedule.structure, region): size for region, size in sizes[0].items()}
        if any(key not in self._samples for key in keys):
            return None
        return {key: self._curve(key).seconds(size, sizes[1]) for key, size in keys.items()}

    def total(self, work: Sequence[tuple[str, Noted]]) -> float:
        """Returns the seconds for which regions compute in a step; 0 if one was not measured, or nothing ran."""
        parts = [self.seconds(name, noted) for name, noted in work]
        return 0.0 if any(part is None for part in parts) else sum(sum(part.values()) for part in parts if part)

    def _curve(self, key: _Key) -> Curve:
        if key not in self._curves:
            self._curves[key] = fit_curve(self._samples[key])
        return self._curves[key]

    def _sizes(self, name: str, noted: Noted) -> tuple[dict[str, int], int] | None:
        """Returns the bytes that each region reads and makes, and the largest symbolic size."""
        if (name, noted) not in self._known:
            program = self._program(name)
            if program is None:
                return None
            sizes = program.sizes(noted)
            self._known[name, noted] = traffic(program, sizes), int(max(sizes.values.values(), default=1))
        return self._known[name, noted]
