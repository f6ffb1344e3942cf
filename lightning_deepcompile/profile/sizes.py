"""Times as functions of sizes: fitted to runs of a region with batches of several sizes.

A region's time is a constant, a part in proportion to the bytes that it reads and makes, and, where runs show it, a
part in proportion to those times one more size: attention takes the square of a length. No part is negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch

__all__ = ["Curve", "Sample", "fit_curve"]

_ENOUGH = 4
"""Distinct sizes from which on a term of second degree may be told from noise."""

_BETTER = 0.5
"""The share of the squared error that such a term may leave."""


class Sample(NamedTuple):
    """A measured run of a region.

    Args:
        size: Bytes that it reads and makes.
        others: Sizes of the batch, such as its rows and its length.
        seconds: The time that it took.
    """

    size: int
    others: tuple[int, ...]
    seconds: float


class Curve(NamedTuple):
    """Seconds as a function of sizes.

    Args:
        constant: Seconds at any size.
        linear: Seconds per byte.
        square: Seconds per byte and unit of another size.
        other: Index of that size.
    """

    constant: float
    linear: float
    square: float = 0.0
    other: int = 0

    def seconds(self, size: int, others: Sequence[int]) -> float:
        """Returns the time at sizes as of a `Sample`."""
        value = self.constant + self.linear * size
        return value + self.square * size * others[self.other] if self.square else value


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
    plain = [[1.0] * len(samples), [float(one.size) for one in samples]]
    (constant, linear), error = _fit(plain, samples)
    best = Curve(constant, linear)
    if len({(one.size, one.others) for one in samples}) < _ENOUGH:
        return best
    least = _BETTER * error
    for other in range(len(samples[0].others)):
        (constant, linear, square), error = _fit(
            [*plain, [float(one.size * one.others[other]) for one in samples]], samples
        )
        if error < least:
            best, least = Curve(constant, linear, square, other), error
    return best


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
