"""Checkpoints in the formats of Lightning's FSDP strategy: one plain file, or a directory with every rank's shards.

Tensors are moved one at a time: saving holds at most one whole parameter on the device, loading none. The same holds
for folders of pretrained models; the modules for these are imported by themselves, as they need safetensors.
"""

from lightning_deepcompile.checkpoint.checkpoints import Checkpoints, StateDictType, with_default
from lightning_deepcompile.checkpoint.file import FileCheckpointIO

__all__ = ["Checkpoints", "FileCheckpointIO", "StateDictType", "with_default"]
