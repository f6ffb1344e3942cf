"""Which saved tensors leave the device before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.plan.offload import Offloading, OffloadMode, pinned_bytes
from lightning_deepcompile.plan.simulate import arena_bytes
from lightning_deepcompile.profile.memory import memory_limit
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.sharding.shards import ShardedModel

__all__ = ["ActivationOffload"]


@dataclass
class ActivationOffload:
    """Decides for each captured graph which of its saved tensors are offloaded while no plan says so.

    With ``"auto"`` all do, or as many as host memory holds, where the training step was found not to fit otherwise
    before it ran, or a graph that is captured later saves more than there is room for: steps run with more copies than
    they need rather than out of memory, and planning takes back what fits. Nothing is exchanged, as copies concern no
    other rank.

    Args:
        config: What memory may be used.
        offloading: How activations, and states, are offloaded.
        model: The sharded model.
        device: Where it runs.
        stage: ZeRO stage; below 3 whole parameters stay.
        host_bytes: What this rank may take of host memory.
        has_states: Whether optimizers have made their states.
        needed: Whether the step needs it, where the settings leave that open.
    """

    config: CompileConfig
    offloading: Offloading
    model: ShardedModel
    device: torch.device
    stage: int
    host_bytes: int
    has_states: bool = False
    needed: bool = False

    @property
    def mode(self) -> OffloadMode:
        """How saved tensors are offloaded."""
        return self.offloading.activations

    @property
    def whole_bytes(self) -> int:
        """Bytes of whole parameters that stay on the device from step to step: all of them below stage 3."""
        if self.stage == 3:
            return 0
        shards = sum(p.layout.shard_numel * p.gather_dtype.itemsize for p in self.model.parameters)
        return shards * self.model.ranks.shards

    def as_many_as_fit(self, forward: Schedule) -> frozenset[int]:
        """Returns the numbers of the saved tensors that host memory has room for.

        Args:
            forward: Of the program.
        """
        leaving, total = set(), 0
        for one in forward.saved:
            total += pinned_bytes(one.size)
            if one.size > 0 and (self.mode == "all" or total <= self.host_bytes):
                leaving.add(one.number)
        return frozenset(leaving)

    def choose(self, forward: Schedule, saved_bytes: int) -> frozenset[int]:
        """The numbers of the tensors that leave.

        Args:
            forward: Of the program, as it will run but for copies.
            saved_bytes: Bytes of everything that it saves.
        """
        fits = self.mode == "auto" and not self.needed and saved_bytes <= self._room(forward)
        return frozenset() if self.mode == "none" or fits else self.as_many_as_fit(forward)

    def _room(self, forward: Schedule) -> int:
        """Bytes that saved tensors may take of the budget, as far as sizes tell."""
        trained = sum(p.local.nbytes for p in self.model.parameters if p.dtensor.requires_grad)
        present = sum(buffer.flat.untyped_storage().nbytes() for buffer in self.model.grad_buffers)
        states = (
            0 if self.offloading.states == "all" else 2 * trained
        )  # Adam's; activations leave sooner, they cost less
        if self.device.type == "cuda":
            used = torch.cuda.memory_allocated(self.device)
            states = 0 if self.has_states else states
        else:
            used = self.model.device_bytes + present
        if self.stage == 3:
            gathered = max(arena_bytes([forward])[0], default=0)
        else:
            gathered = self.whole_bytes
        coming = max(trained - present, 0) + states
        return memory_limit(self.device, self.config.memory_budget) - used - coming - gathered
