"""PyTorch's caching allocator of CUDA devices.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import os

import torch

__all__ = ["grow_segments"]

_KEY = "expandable_segments"


def grow_segments() -> bool:
    """Lets the allocator grow the segments that it maps from now on, as with ``expandable_segments:True``.

    Segments of a fixed size leave free pieces behind that are too small for the next value. Nothing changes where the
    environment (``PYTORCH_ALLOC_CONF``, ``PYTORCH_CUDA_ALLOC_CONF``) decides about them, or names another allocator.

    Returns:
        Whether segments grow.
    """
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if _KEY in chosen or torch.cuda.memory.get_allocator_backend() != "native":
        return f"{_KEY}:true" in chosen.lower()
    # A key that is not named goes back to its default.
    torch.cuda.memory._set_allocator_settings(",".join(filter(None, [chosen, f"{_KEY}:True"])))
    return True
