"""Decides which saved tensors are offloaded before anything is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_deepcompile.plan.offload import Offloading, OffloadMode
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.sharding.shards import ShardedModel


@dataclass
class ActivationOffload:
    """Says for each captured graph which of its saved tensors are offloaded while no plan does.

    With ``"all"`` all are; with ``"auto"`` as many as a training step needs that was found not to fit otherwise before
    it ran (`plan.fit`).

    Args:
        offloading: How each kind is offloaded.
        model: The sharded model.
        device: Where it runs.
        stage: ZeRO stage; below 3 whole parameters stay.
        host_bytes: What this rank may take of host memory.
        free_host_bytes: Returns what of that saved tensors may take; None where none may leave.
        plans: Whether plans decide which of them leave.
        has_states: Whether optimizers have made their states.
        states: Bytes of the states that they will make; None: not known.
        stepping: Bytes that their steps take besides.
        needed: Whether a step was found not to fit otherwise, where the settings leave it open.
    """

    offloading: Offloading
    model: ShardedModel
    device: torch.device
    stage: int
    host_bytes: int
    free_host_bytes: Callable[[], int] | None = None
    plans: bool = False
    has_states: bool = False
    states: int | None = None
    stepping: int = 0
    needed: bool = False

    @property
    def mode(self) -> OffloadMode:
        """The mode in which saved tensors are offloaded."""
        return self.offloading.activations

    @property
    def room(self) -> Callable[[], int] | None:
        """Returns the bytes of host memory that a plan may fill with saved tensors; None where it may move none."""
        return self.free_host_bytes if self.plans else None

    @property
    def whole_bytes(self) -> int:
        """Bytes of whole parameters that stay on the device from step to step: all of them below stage 3."""
        if self.stage == 3:
            return 0
        return sum(p.info.gathered_bytes for p in self.model.parameters)

    def choose(self, forward: Schedule) -> frozenset[int]:
        """Returns the numbers of the saved tensors that are offloaded where nothing is decided about the step.

        Args:
            forward: Of the program, as it will run but for copies.
        """
        return frozenset(one.number for one in forward.saved if one.size > 0 and self.mode == "all")
