"""Which saved tensors leave the device before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_deepcompile.capture.sharding import ShardedModel
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.plan.offload import pinned_bytes
from lightning_deepcompile.profile.memory import memory_limit
from lightning_deepcompile.program.schedule import Schedule

__all__ = ["ActivationOffload"]


@dataclass(frozen=True)
class ActivationOffload:
    """Decides for each captured graph, when its forward program is compiled.

    With ``"auto"`` all of a graph's tensors, or as many as host memory holds, leave if they might not fit: the first
    steps run with more copies than they need rather than out of memory, and planning takes back what fits. Nothing is
    exchanged, as copies concern no other rank.

    Args:
        config: ``offload_activations``, and what memory may be used.
        model: The sharded model.
        device: Where it runs.
        stage: ZeRO stage.
        host_bytes: What this rank may take of host memory.
    """

    config: CompileConfig
    model: ShardedModel
    device: torch.device
    stage: int
    host_bytes: int

    def choose(self, forward: Schedule, saved_bytes: int) -> frozenset[int]:
        """The numbers of the tensors that leave.

        Args:
            forward: Of the program.
            saved_bytes: Bytes of everything that it saves.
        """
        mode = self.config.offload_activations
        if mode == "none" or (mode == "auto" and saved_bytes <= self._room()):
            return frozenset()
        leaving, total = set(), 0
        for one in forward.saved:
            total += pinned_bytes(one.size)
            if one.size > 0 and (mode == "all" or total <= self.host_bytes):
                leaving.add(one.number)
        return frozenset(leaving)

    def _room(self) -> int:
        """Bytes that saved tensors may take of the budget, as far as sizes tell."""
        parameters = self.model.parameters
        trained = sum(p.local.nbytes for p in parameters if p.dtensor.requires_grad)
        gathered: dict[str, int] = {}
        for p in parameters:
            size = p.layout.shard_numel * self.model.ranks.shards * p.gather_dtype.itemsize
            gathered[p.layout.spec.block] = gathered.get(p.layout.spec.block, 0) + size
        largest = max(gathered.values(), default=0) * (self.config.prefetch_blocks + 2)
        whole = min(largest, sum(gathered.values())) if self.stage == 3 else sum(gathered.values())
        used = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else self.model.shard_bytes
        states = 0 if self.config.offload == "all" else 2 * trained  # Adam's; activations leave sooner, they cost less
        return memory_limit(self.device, self.config.memory_budget) - used - trained - states - whole
