"""Which saved tensors leave the device before anything is measured."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.plan.offload import pinned_bytes
from lightning_deepcompile.plan.simulate import arena_bytes
from lightning_deepcompile.profile.memory import memory_limit
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.sharding.shards import ShardedModel

__all__ = ["ActivationOffload"]

_log = logging.getLogger(__name__)


@dataclass
class ActivationOffload:
    """Decides for each captured graph, when its forward program is compiled.

    With ``"auto"`` all of a graph's tensors, or as many as host memory holds, leave if they might not fit: the first
    steps, and those with larger batches than the plan knows, run with more copies than they need rather than out of
    memory; planning takes back what fits. Nothing is exchanged, as copies concern no other rank.

    Args:
        config: ``offload_activations``, and what memory may be used.
        model: The sharded model.
        device: Where it runs.
        stage: ZeRO stage; below 3 whole parameters stay.
        host_bytes: What this rank may take of host memory.
        has_states: Whether optimizers have made their states.
    """

    config: CompileConfig
    model: ShardedModel
    device: torch.device
    stage: int
    host_bytes: int
    has_states: bool = False

    def choose(self, forward: Schedule, saved_bytes: int) -> frozenset[int]:
        """The numbers of the tensors that leave.

        Args:
            forward: Of the program, as it will run but for copies.
            saved_bytes: Bytes of everything that it saves.
        """
        mode = self.config.offload_activations
        if mode == "none" or (mode == "auto" and saved_bytes <= self._room(forward)):
            return frozenset()
        leaving, total = set(), 0
        for one in forward.saved:
            total += pinned_bytes(one.size)
            if one.size > 0 and (mode == "all" or total <= self.host_bytes):
                leaving.add(one.number)
        if mode == "auto" and self.model.ranks.group.rank() == 0:
            _log.info(
                "Saved tensors of %s, %s, might not fit: they wait in host memory unless a plan says otherwise.",
                forward.name,
                format_bytes(saved_bytes),
            )
        return frozenset(leaving)

    def _room(self, forward: Schedule) -> int:
        """Bytes that saved tensors may take of the budget, as far as sizes tell."""
        trained = sum(p.local.nbytes for p in self.model.parameters if p.dtensor.requires_grad)
        present = sum(buffer.flat.untyped_storage().nbytes() for buffer in self.model.grad_buffers)
        states = 0 if self.config.offload == "all" else 2 * trained  # Adam's; activations leave sooner, they cost less
        if self.device.type == "cuda":
            used = torch.cuda.memory_allocated(self.device)
            states = 0 if self.has_states else states
        else:
            used = self.model.device_bytes + present
        if self.stage == 3:
            gathered = max(arena_bytes([forward])[0], default=0)
        else:
            shards = sum(p.layout.shard_numel * p.gather_dtype.itemsize for p in self.model.parameters)
            gathered = shards * self.model.ranks.shards
        coming = max(trained - present, 0) + states
        return memory_limit(self.device, self.config.memory_budget) - used - coming - gathered
