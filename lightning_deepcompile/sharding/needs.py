"""Estimates from sizes the memory that a step needs beside shards, before a model is sharded and a step is traced."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_deepcompile.plan.costs import REDUCE_WINDOW
from lightning_deepcompile.plan.settings import PREFETCH_BLOCKS
from lightning_deepcompile.sharding.layout import FlatLayout


def moving_bytes(flats: Sequence[FlatLayout], shards: int, *, stage: int, reduction: str) -> int:
    """The most bytes that gathered parameters, and gradients that are not reduced yet, take on a rank at a time.

    Args:
        flats: Layouts of a rank's shards.
        shards: Ranks that share the parameters.
        stage: ZeRO stage.
        reduction: The time at which gradients are reduced; see `CompileConfig.reduction`.

    Returns:
        Bytes without a plan: a plan may use more if memory is free, and less if it is short.
    """
    wire = [flat.gathered_bytes for flat in flats]  # of a rank, in the dtype in which they travel
    blocks: dict[str, int] = {}
    for flat, size in zip(flats, wire, strict=True):
        blocks[flat.block] = blocks.get(flat.block, 0) + size
    sizes = list(blocks.values())
    window = PREFETCH_BLOCKS + 1 if stage == 3 else len(sizes)  # below stage 3 they stay whole
    gathered = max((sum(sizes[k : k + window]) for k in range(len(sizes))), default=0) * shards
    whole = [size * shards for flat, size in zip(flats, wire, strict=True) if flat.is_trained]
    # Gradients before they are reduced: of all blocks, or of those that are being reduced and the one being computed.
    pending = sum(whole) if reduction == "boundary" else (REDUCE_WINDOW + 1) * max(whole, default=0)
    return gathered + pending + max(wire, default=0)  # shards are cast before they travel
