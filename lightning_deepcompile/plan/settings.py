"""Settings of passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_deepcompile.plan.offload import OffloadMode

PREFETCH_BLOCKS = 2
"""Blocks ahead of its use that a block is gathered, until a plan moves gathers by what it measured: the next block's
gather runs beside a block's compute, and one more covers what blocks differ by. Each costs the memory of one block."""

Reduction = Literal["every", "boundary"]
"""When gradients of accumulated micro-batches travel."""

Rounding = Literal["same", "needed", "any"]
"""Whether last bits may change: never, where a step does not fit otherwise, or wherever it saves time."""


@dataclass(frozen=True)
class PlanSettings:
    """The user's choices that passes follow.

    Args:
        prefetch_blocks: The number of groups by which gathers are launched ahead of their use.
        offload_activations: Which saved tensors wait in host memory: ``"none"``, ``"all"``, or what exceeds the budget.
        reduce: When gradients are reduced; ``"auto"`` starts as ``"every"``, and planning decides.
        rounding: Whether last bits may change.
    """

    prefetch_blocks: int = PREFETCH_BLOCKS
    offload_activations: OffloadMode = "none"
    reduce: Reduction | Literal["auto"] = "every"
    rounding: Rounding = "same"
