"""The bytes of a device's memory that this process may use."""

from __future__ import annotations

import os

import torch

from lightning_deepcompile.plan.budget import parse_budget


def memory_limit(device: torch.device, budget: int | float | str | None, beside: int = 0, largest: int = 0) -> int:
    """Bytes that torch's allocator may hand out on `device`, and what is `beside`.

    Args:
        device: The device.
        budget: `CompileConfig.memory_budget`. Of a fraction, what others than the allocator use (communicators, other
            processes) is taken off.
        beside: Bytes that this process has besides the allocator's, and which are not taken off.
        largest: Bytes of the largest value, which needs contiguous memory.
    """
    if device.type != "cuda":
        return parse_budget(budget, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    total = torch.cuda.get_device_properties(device).total_memory
    limit = parse_budget(budget, total)
    free, _ = torch.cuda.mem_get_info(device)
    own = free + torch.cuda.memory_reserved(device) + beside
    if budget is None or isinstance(budget, float):
        limit = max(limit - max(total - own, 0), 1)
    return max(limit - scattered(largest, own - limit), 1)


def scattered(largest: int, apart: int) -> int:
    """Bytes of a budget that an allocator may find in pieces alone that are too small for the largest value.

    Where values of 15.7 GiB came and went, an H100's allocator had 20.2 GiB in such pieces when it found no more.

    Args:
        largest: Bytes of that value.
        apart: Bytes of the device beside the budget and what others use.
    """
    return max(largest + largest // 2 - max(apart, 0), 0)
