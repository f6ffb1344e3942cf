"""Reduced gradients into wider shards, by torch and on few multiprocessors: a part of ``runtime.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from beside import WIDTH, beside

from lightning_deepcompile.runtime import load_extension

BLOCKS = (8, 16, 32, 64, 132)


def table(elements: int, device: torch.device, milliseconds: Callable[[Callable[[], Any]], float]) -> list[str]:
    """Lines of text. Collective.

    Args:
        elements: Of this rank's shard of a layer.
        device: Of this rank.
        milliseconds: Times a call on the slowest rank.
    """
    total = torch.randn(elements, device=device, dtype=torch.bfloat16)
    grad = torch.zeros(elements, device=device)
    lines = [
        f"{f'{2 * elements / 2**20:.0f} MiB of bfloat16 into float32':40} {'alone, ms':>10} "
        f"{f'beside {WIDTH}² matmuls':>22} {'matmuls slower by':>18}"
    ]
    for blocks in (None, *BLOCKS):
        merge = load_extension().GradientMerge(device, blocks=blocks or 0)

        def run(merge: Any = merge, plain: bool = blocks is None) -> None:
            grad.copy_(total) if plain else merge.merge(grad, total, False)

        alone = milliseconds(run)
        loaded = beside(run, alone, device, repeat=5)
        name = "torch's copy" if blocks is None else f"{blocks} thread blocks"
        lines.append(f"{name:40} {alone:10.3f} {loaded.ms:22.3f} {loaded.slower:18.1%}")
    return lines
