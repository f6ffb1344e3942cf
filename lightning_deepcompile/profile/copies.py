"""Measures how fast tensors are copied to host memory and back, by a few copies on all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_deepcompile.plan.costs import Link

_LARGE, _SMALL = 32 << 20, 1 << 12
_TIMES = 3
_FILLS = 64
"""Each takes a GPU twice as long as its host: the host is then some hundred microseconds ahead."""


def measure_copies(device: torch.device) -> tuple[Link, Link, float]:
    """Times copies from `device` to pinned host memory, and back.

    Args:
        device: The device; on a CPU, one place in memory stands for it and another for the host.

    Returns:
        Models of copies out and of copies in, and the factor by which they take longer at the same time.
    """
    hosts = [torch.empty(_LARGE, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
    places = [torch.zeros(_LARGE, dtype=torch.uint8, device=device) for _ in range(2)]
    ways = (hosts[0], places[0]), (places[1], hosts[1])
    links, alone = [], []
    for target, source in ways:
        latency = shortest_seconds(lambda t=target, s=source: t[:_SMALL].copy_(s[:_SMALL], non_blocking=True), device)  # type: ignore[misc]
        alone.append(shortest_seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True), device))  # type: ignore[misc]
        links.append(Link(latency, _LARGE / max(alone[-1] - latency, 1e-9)))
    if device.type != "cuda":  # a CPU makes one copy at a time
        return links[0], links[1], 1.0
    side = torch.cuda.Stream(device)

    def both() -> None:
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            ways[0][0].copy_(ways[0][1], non_blocking=True)
        ways[1][0].copy_(ways[1][1], non_blocking=True)
        current.wait_stream(side)

    return links[0], links[1], max(shortest_seconds(both, device) / max(alone), 1.0)


def shortest_seconds(work: Callable[[], object], device: torch.device, *, busy: bool = False) -> float:
    """Seconds that `work` takes: the shortest of several runs.

    Args:
        work: The function to time; its first run, which may set something up, does not count.
        device: Where it runs.
        busy: Whether a GPU has other work to do first, as in a step: else the time to launch `work` counts, too.
    """
    times = []
    filled = torch.empty(_LARGE if busy and device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    for _ in range(_TIMES + 1):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(_FILLS if busy else 0):
                filled.zero_()
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
    return min(times[1:])
