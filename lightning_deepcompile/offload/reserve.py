"""Takes host memory for optimizer states on all ranks at once, before anything relies on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_deepcompile.ranks.exchange import exchange, on_any


def reserve(runtime: Any, leaving: Iterable[tuple[Tensor, int]], group: dist.ProcessGroup) -> str:
    """Takes memory for states that are about to leave. A collective.

    Args:
        runtime: ``_C.Runtime`` that keeps them.
        leaving: Shards, and bytes of each one's states; all that are about to, as only the last call counts.
        group: The ranks.

    Returns:
        Which rank has not got it and why, the same text on all ranks; "" if all have.
    """
    sizes: list[int] = []
    for local, size in leaving:
        if each := local.nbytes:  # a shard's states are placed one by one, most of them as large as it is
            sizes += [min(each, size - start) for start in range(0, size, each)]
    reason = ""
    try:
        runtime.states.reserve(sizes)
    except torch.OutOfMemoryError as error:
        reason = str(error)
    if not on_any(bool(reason), group):
        return ""
    failed = [(rank, text) for rank, text in enumerate(exchange(reason, group)) if text]
    runtime.states.reserve([])  # gives back what was taken in vain
    runtime.states.synchronize()
    rank, text = failed[0]
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"Rank {rank}{others} of {group.size()} could not take {sum(sizes)} bytes for optimizer states: {text}"
