"""PyTorch's distributed checkpoints: a reader of local and remote places; imported by itself, as it needs fsspec."""

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

__all__ = ["FsspecReader"]
