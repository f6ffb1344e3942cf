"""Transfers beside matmuls: what either costs the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

MATMULS, WIDTH = 12, 8192
AHEAD = 40_000_000  # cycles that the device sleeps while the host queues both streams: about 20 ms
MOST = 48  # transfers in one measurement, so that the queues of the device hold them


@dataclass(frozen=True)
class Beside:
    """The effect of transfers and a stream of matmuls on each other.

    Args:
        ms: Milliseconds of one transfer while matmuls run.
        slower: By which part matmuls are slower while transfers run.
    """

    ms: float
    slower: float


def beside(transfer: Callable[[], None], alone_ms: float, device: torch.device, repeat: int) -> Beside:
    """Runs transfers on one stream and matmuls on another; both start together, and matmuls end last.

    Args:
        transfer: Queues one, and has the current stream wait for it.
        alone_ms: How long it takes alone.
        device: Of this rank.
        repeat: Measurements, of which the median on the slowest rank counts.
    """
    left, right = (torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    side = torch.cuda.Stream()

    def run(transfers: int) -> tuple[float, float]:
        begin, gate, matmuls, done = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(AHEAD)
        gate.record()
        side.wait_event(gate)
        with torch.cuda.stream(side):
            begin.record()
            for _ in range(transfers):
                transfer()
            done.record()
        for _ in range(MATMULS):
            torch.mm(left, right, out=out)
        matmuls.record()
        torch.cuda.synchronize()
        return gate.elapsed_time(matmuls), begin.elapsed_time(done)

    def slowest(transfers: int) -> tuple[float, float]:
        run(transfers)
        times = torch.tensor([run(transfers) for _ in range(repeat)], device=device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return tuple(median(column) for column in times.T.tolist())

    alone, _ = slowest(0)
    transfers = max(1, min(MOST, int(0.6 * alone / alone_ms)))
    together, busy = slowest(transfers)
    return Beside(busy / transfers, (together - alone) / min(busy, together))
