"""The cost of adding up whole gradients on a rank, instead of reducing each micro-batch's."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_deepcompile.profile.copies import shortest_seconds

_ELEMENTS = 8 << 20

Dtypes = tuple[torch.dtype, torch.dtype]
"""Of a parameter's gradient as it is computed, and of its sum."""


def hold_ratio(dtypes: Iterable[Dtypes]) -> float:
    """Bytes of a sum per byte of a gradient: the most of all parameters, 1.0 if there are none.

    Args:
        dtypes: Of every parameter.
    """
    return max((whole.itemsize / gradient.itemsize for gradient, whole in dtypes), default=1.0)


def measure_holds(dtypes: Iterable[Dtypes], device: torch.device) -> float:
    """Times additions of gradients to sums.

    Args:
        dtypes: Of every parameter.
        device: Where they are.

    Returns:
        Seconds per byte of a gradient, of the slowest dtypes.
    """
    slowest = 0.0
    for gradient, whole in sorted(set(dtypes), key=str):
        total = torch.zeros(_ELEMENTS, dtype=whole, device=device)
        part = torch.zeros(_ELEMENTS, dtype=gradient, device=device)
        seconds = shortest_seconds(lambda t=total, p=part: t.add_(p), device)  # type: ignore[misc]
        slowest = max(slowest, seconds / part.nbytes)
    return slowest
