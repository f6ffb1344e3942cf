"""FSDP's names; imported by itself.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from torch.distributed.fsdp import ShardingStrategy

__all__ = ["HYBRID_SHARD_GRAD_OP"]

HYBRID_SHARD_GRAD_OP = ShardingStrategy._HYBRID_SHARD_ZERO2
"""Hybrid sharding of gradients and optimizer states."""
