"""Fits the model of a link to observed transfers."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_deepcompile.plan.costs import Link

__all__ = ["fit_link"]

_UNKNOWN = Link(0.0, 1e12)


def fit_link(samples: Sequence[tuple[int, float]], world_size: int) -> Link:
    """Returns the latency and bandwidth that explain the samples best, relative to their durations.

    Args:
        samples: Bytes of the whole tensors, and seconds that their transfer took with nothing beside it.
        world_size: Number of ranks.

    Returns:
        The link. If all samples are of about one size, latency and bandwidth cannot be told apart: all time counts
        as bandwidth then. Without samples, a link that costs almost nothing.
    """
    scale = (world_size - 1) / world_size
    points = [(size * scale, seconds) for size, seconds in samples if size > 0 and seconds > 0]
    if not points:
        return _UNKNOWN
    if scale == 0:
        return Link(min(seconds for _, seconds in points), _UNKNOWN.bandwidth)
    # Least squares of (latency + bytes / bandwidth) / seconds = 1.
    s_ll = sum(1 / t**2 for _, t in points)
    s_lb = sum(b / t**2 for b, t in points)
    s_bb = sum(b * b / t**2 for b, t in points)
    s_l = sum(1 / t for _, t in points)
    s_b = sum(b / t for b, t in points)
    determinant = s_ll * s_bb - s_lb**2
    sizes = [b for b, _ in points]
    if max(sizes) < 1.5 * min(sizes) or determinant <= 1e-12 * s_ll * s_bb:
        return Link(0.0, s_bb / s_b)
    latency = (s_l * s_bb - s_b * s_lb) / determinant
    inverse = (s_ll * s_b - s_lb * s_l) / determinant
    if inverse <= 0:  # bigger transfers were not slower: all time is latency
        return Link(s_l / s_ll, max(sizes) / min(t for _, t in points) * 1e3)
    if latency < 0:
        return Link(0.0, s_bb / s_b)
    return Link(latency, 1 / inverse)
