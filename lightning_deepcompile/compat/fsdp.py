"""FSDP's names; imported by itself."""

from torch.distributed.fsdp import ShardingStrategy

__all__ = ["HYBRID_SHARD_GRAD_OP"]

HYBRID_SHARD_GRAD_OP = ShardingStrategy._HYBRID_SHARD_ZERO2
"""Hybrid sharding of gradients and optimizer states."""
