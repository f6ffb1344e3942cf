"""Checkpoints in the formats of Lightning's FSDP strategy: one plain file, or a directory with every rank's shards.

Tensors travel one at a time: saving holds at most one whole parameter on the device, loading none. So it is with
folders of pretrained models; what reads and writes those is imported by itself, as it needs safetensors.
"""

from lightning_deepcompile.checkpoint.checkpoints import Checkpoints, StateDictType, with_default
from lightning_deepcompile.checkpoint.file import FileCheckpointIO

__all__ = ["Checkpoints", "FileCheckpointIO", "StateDictType", "with_default"]
