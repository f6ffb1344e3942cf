"""The report of one host at a meeting, and those of all hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple


@dataclass(frozen=True)
class HostReport:
    """The report of one host. Fields that a meeting does not need keep their defaults.

    Args:
        written: Whether parameters were written to since the last training step.
        told_to_stop: Whether this rank was told to stop training.
        cannot_record: Whether this rank may not begin to record CUDA graphs.
        failed_recordings: Recordings that have failed.
        windows: Digest of the windows that gathers have taken.
        short: Whether this rank was short of memory since its programs took over.
        new: Whether the step may run what it has not run since programs were swapped.
        larger: Whether the batch is larger than all before.
        place: The place in an evaluation.
        block: The block of parameters that uncompiled code needs next.
    """

    written: bool = False
    told_to_stop: bool = False
    cannot_record: bool = False
    failed_recordings: int = 0
    windows: int = 0
    short: bool = False
    new: bool = False
    larger: bool = False
    place: int = 0
    block: int = 0

    def numbers(self) -> list[int]:
        """Returns the numbers of which ranks exchange the maxima."""
        values = [int(value) for value in astuple(self)]
        return [*values, *(-value for value in values)]


class HostReports(NamedTuple):
    """The reports of all hosts.

    Args:
        most: The largest value of each field: a flag is set if any rank's is.
        least: The smallest value of each field.
    """

    most: HostReport
    least: HostReport

    @classmethod
    def of(cls, maxima: Sequence[int]) -> HostReports:
        """Returns the reports whose `numbers` have these maxima."""
        count = len(fields(HostReport))
        return cls(_report(maxima[:count]), _report([-value for value in maxima[count:]]))


def _report(values: Sequence[int]) -> HostReport:
    named: dict[str, Any] = dict(zip((field.name for field in fields(HostReport)), values, strict=True))
    flags = {field.name for field in fields(HostReport) if isinstance(field.default, bool)}
    return HostReport(**{name: bool(value) if name in flags else value for name, value in named.items()})
