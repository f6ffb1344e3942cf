"""PyTorch's distributed checkpoints: reads local and remote places; imported by itself, as it needs fsspec.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

__all__ = ["FsspecReader"]
