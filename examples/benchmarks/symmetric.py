"""Gathers by NCCL's kernels and by copy engines, alone and beside matmuls: a part of ``runtime.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from beside import WIDTH, beside

from lightning_deepcompile.runtime import load_extension

MIB = 2**20
FLAT = [8 * MIB, 32 * MIB, 128 * MIB, 436 * MIB]
"""Bytes of gathered groups of one parameter; the last is about a block of Llama-3-8B."""


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
                self.runtime.setup.register_param(self._graph | number, f"p{number}", list(shape), shard)
                self._ids[-1].append(self._graph | number)
                number += 1
        self.runtime.setup.register_graph(self._graph, [id_ for ids in self._ids for id_ in ids])

    def gather(self, group: int) -> None:
        """Gathers one group, waits on the current stream, and releases it."""
        torch.ops.dc.prefetch_params_fused(self._graph, [], self._ids[group])
        torch.ops.dc.wait_allgather_fused(self._graph, self._ids[group])
        torch.ops.dc.release_params_fused(self._graph, self._ids[group])


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
        f"{'':12} {'kernels':>10}{'copies':>10} {'kernels':>14}{'copies':>10} {'kernels':>12}{'copies':>10}",
    ]
    for group, name in enumerate(names):
        alone, loaded = [], []
        for side in sides:

            def gather(side: Groups = side, group: int = group) -> None:
                side.gather(group)

            alone.append(milliseconds(gather))
            loaded.append(beside(gather, alone[-1], device, repeat=5))
        lines.append(
            f"{name:12} {alone[0]:10.3f}{alone[1]:10.3f} {loaded[0].ms:14.3f}{loaded[1].ms:10.3f} "
            f"{loaded[0].slower:12.1%}{loaded[1].slower:10.1%}"
        )
    stats = sides[1].runtime.stats()
    mib = stats["symmetric_bytes"] / MIB
    lines.append(f"{stats['symmetric_gathers']} gathers by copy engines, to {mib:.0f} MiB on each rank")
    for side in sides:
        side.runtime.close()
    return lines
