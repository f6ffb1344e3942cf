"""Times as functions of sizes: fitted to runs of a region with batches of several sizes.

A region's time is a constant, a part in proportion to the bytes that it reads and makes, and, where runs show it, a
part in proportion to those times the largest size: attention takes the square of a length. No part is negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch

_ENOUGH = 4
"""Distinct sizes from which on a term of second degree may be told from noise."""

_BETTER = 0.5
"""The share of the squared error that such a term may leave."""


class Sample(NamedTuple):
    """A measured run of a region.

    Args:
        size: Bytes that it reads and makes.
        longest: The largest size of the batch, as a rule its length.
        seconds: The time that it took.
    """

    size: int
    longest: int
    seconds: float


class Curve(NamedTuple):
    """Seconds as a function of sizes.

    Args:
        constant: Seconds at any size.
        linear: Seconds per byte.
        square: Seconds per byte and unit of the largest size.
    """

    constant: float
    linear: float
    square: float = 0.0

    def seconds(self, size: int, longest: int) -> float:
        """Returns the time at sizes as of a `Sample`."""
        return self.constant + self.linear * size + self.square * size * longest


def fit_curve(samples: Sequence[Sample]) -> Curve:
    """Returns the curve that explains samples best, relative to their times.

    Runs of one size alone do not tell a constant from what grows: all time grows then, unless there are no bytes.

    Args:
        samples: At least one. Those without time are ignored.
    """
    samples = [one for one in samples if one.seconds > 0]
    sizes = {one.size for one in samples}
    if not samples:
        return Curve(0.0, 0.0)
    if len(sizes) == 1:
        seconds = sorted(one.seconds for one in samples)[len(samples) // 2]
        (size,) = sizes
        return Curve(0.0, seconds / size) if size else Curve(seconds, 0.0)
    columns = [[1.0] * len(samples), [float(one.size) for one in samples]]
    line, error = _fit(columns, samples)
    if len({(one.size, one.longest) for one in samples}) >= _ENOUGH:
        square, left = _fit([*columns, [float(one.size * one.longest) for one in samples]], samples)
        if left < _BETTER * error:
            return Curve(*square)
    return Curve(*line)


def _fit(columns: Sequence[Sequence[float]], samples: Sequence[Sample]) -> tuple[list[float], float]:
    """Returns factors of columns, none of them negative, that give the seconds of samples, and the squared error.

    There are so few columns that every choice of those that have a factor is tried.
    """
    found, least = [0.0] * len(columns), math.inf
    scales = [max(map(abs, column)) or 1.0 for column in columns]
    for count in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), count):
            rows = [[columns[c][k] / scales[c] / one.seconds for c in chosen] for k, one in enumerate(samples)]
            matrix = torch.tensor(rows, dtype=torch.float64, device="cpu")
            ones = torch.ones(len(samples), dtype=torch.float64, device="cpu")
            factors = torch.linalg.pinv(matrix) @ ones
            error = float((matrix @ factors - ones).square().sum())
            if error < least * (1 - 1e-9) and bool((factors >= 0).all()):
                least = error
                found = [0.0] * len(columns)
                for c, factor in zip(chosen, factors.tolist(), strict=True):
                    found[c] = factor / scales[c]
    return found, least
