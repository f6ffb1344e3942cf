"""Gathers by NCCL and through symmetric memory, alone and beside matmuls: a part of ``runtime.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_deepcompile.runtime import load_extension

MIB = 2**20
FLAT = [8 * MIB, 32 * MIB, 128 * MIB, 436 * MIB]
"""Bytes of gathered groups of one parameter; the last is about a block of Llama-3-8B."""
MATMULS, WIDTH = 12, 8192
AHEAD = 40_000_000  # cycles that the device sleeps while the host queues both streams: about 20 ms
MOST_GATHERS = 48  # in one measurement, so that the queues of the device hold them


@dataclass(frozen=True)
class Beside:
    """What a gather and a stream of matmuls do to each other.

    Args:
        gather: Milliseconds of one gather while matmuls run.
        slower: By which part matmuls are slower while a gather runs.
    """

    gather: float
    slower: float


class Groups:
    """Groups of parameters, registered with a runtime of their own."""

    def __init__(self, groups: Sequence[Sequence[tuple[int, ...]]], device: torch.device, symmetric: bool) -> None:
        world = dist.get_world_size()
        self.runtime = load_extension().Runtime(
            dist.group.WORLD, dist.group.WORLD, device, symmetric_threshold=1 if symmetric else 0
        )
        self._graph = self.runtime.serial << 32
        self._ids: list[list[int]] = []
        number = 0
        for shapes in groups:
            self._ids.append([])
            for shape in shapes:
                shard = torch.zeros(-(-shape[0] // world), *shape[1:], device=device, dtype=torch.bfloat16)
                self.runtime.register_param(self._graph | number, f"p{number}", list(shape), shard)
                self._ids[-1].append(self._graph | number)
                number += 1
        self.runtime.register_graph(self._graph, [id_ for ids in self._ids for id_ in ids])

    def gather(self, group: int) -> None:
        """Gathers one group, waits on the current stream, and releases it."""
        torch.ops.dc.prefetch_params_fused(self._graph, [], self._ids[group])
        torch.ops.dc.wait_allgather_fused(self._graph, self._ids[group])
        torch.ops.dc.release_params_fused(self._graph, self._ids[group])


def beside(gather: Callable[[], None], alone_ms: float, device: torch.device, repeat: int) -> Beside:
    """Runs gathers on one stream and matmuls on another; both start together, and matmuls end last.

    Args:
        gather: Queues one.
        alone_ms: How long it takes alone.
        device: Of this rank.
        repeat: Measurements, of which the median on the slowest rank counts.
    """
    left, right = (torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    side = torch.cuda.Stream()

    def run(gathers: int) -> tuple[float, float]:
        begin, gate, matmuls, done = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(AHEAD)
        gate.record()
        side.wait_event(gate)
        with torch.cuda.stream(side):
            begin.record()
            for _ in range(gathers):
                gather()
            done.record()
        for _ in range(MATMULS):
            torch.mm(left, right, out=out)
        matmuls.record()
        torch.cuda.synchronize()
        return gate.elapsed_time(matmuls), begin.elapsed_time(done)

    def slowest(gathers: int) -> tuple[float, float]:
        run(gathers)
        times = torch.tensor([run(gathers) for _ in range(repeat)], device=device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return tuple(median(column) for column in times.T.tolist())

    alone, _ = slowest(0)
    gathers = max(1, min(MOST_GATHERS, int(0.6 * alone / alone_ms)))
    together, gathering = slowest(gathers)
    return Beside(gathering / gathers, (together - alone) / min(gathering, together))


def table(
    layer: Sequence[tuple[int, ...]], device: torch.device, milliseconds: Callable[[Callable[[], Any]], float]
) -> list[str]:
    """Lines of text. Collective.

    Args:
        layer: Shapes of the parameters of a block, which are gathered as one group.
        device: Of this rank.
        milliseconds: Times a call on the slowest rank.
    """
    groups: list[Sequence[tuple[int, ...]]] = [layer, *([(size // 2,)] for size in FLAT)]
    names = ["a layer", *(f"{size // MIB} MiB" for size in FLAT)]
    sides = [Groups(groups, device, symmetric) for symmetric in (False, True)]
    lines = [
        f"{'gathers':12} {'alone, ms':>20} {f'beside {WIDTH}² matmuls':>24} {'matmuls slower by':>22}",
        f"{'':12} {'NCCL':>10}{'symmetric':>10} {'NCCL':>14}{'symmetric':>10} {'NCCL':>12}{'symmetric':>10}",
    ]
    for group, name in enumerate(names):
        alone, loaded = [], []
        for side in sides:

            def gather(side: Groups = side, group: int = group) -> None:
                side.gather(group)

            alone.append(milliseconds(gather))
            loaded.append(beside(gather, alone[-1], device, repeat=5))
        lines.append(
            f"{name:12} {alone[0]:10.3f}{alone[1]:10.3f} {loaded[0].gather:14.3f}{loaded[1].gather:10.3f} "
            f"{loaded[0].slower:12.1%}{loaded[1].slower:10.1%}"
        )
    stats = sides[1].runtime.stats()
    lines.append(
        f"{stats['symmetric_gathers']} gathers through symmetric memory, a workspace of "
        f"{stats['symmetric_bytes'] / MIB:.0f} MiB on each rank"
    )
    for side in sides:
        side.runtime.close()
    return lines
