"""What a training step begins with: nothing out of date, and its first gathers under way as early as possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.capture.freshness import Freshness
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.early_gathers import EarlyGathers
from lightning_deepcompile.partwise import PartwiseStep, can_step_partwise
from lightning_deepcompile.plan.budget import parse_budget
from lightning_deepcompile.plan.costs import EarlyStart

__all__ = ["StepOpening"]


class StepOpening:
    """Follows writes to parameters, and launches the gathers that open a step; one per engine.

    They are launched, at stage 3, while the optimizer steps (`divide`), or when it has stepped (`launch`), or with the
    step that they open.

    Args:
        config: Says whether they are launched early.
        capture: Its programs say what opens a step.
        runtime: ``_C.Runtime`` that gathers.
        group: The ranks.
        device: Where the shards are.
        stage: ZeRO stage.

    Attributes:
        early: When the last gathers that open a step were launched, if not with it.
        before: The runtime's counters before the first gather of the step under way.
    """

    def __init__(
        self,
        config: CompileConfig,
        capture: Capture,
        runtime: Any,
        group: dist.ProcessGroup,
        device: torch.device,
        stage: int,
    ) -> None:
        self._runtime, self._device = runtime, device
        self._fresh = Freshness(capture.model, runtime, stage)
        self._keeps = stage == 3
        self._is_early = stage == 3 and config.early_gathers and capture.model.ranks.shards > 1
        self._early = EarlyGathers(capture, group, device)
        self._part_bytes = config.optimizer_part and parse_budget(config.optimizer_part, 1, name="optimizer_part")
        self._launching = False  # while an optimizer steps
        self._launched = False
        self.early: EarlyStart | None = None
        self.before: dict[str, int] = {}

    def begin(self, name: str) -> None:
        """Call before the step `name`, which trains nothing."""
        self._fresh.begin(name)

    def begin_training_step(self, isolated: bool) -> None:
        """Call before a training step.

        Args:
            isolated: Whether it must gather everything by itself.
        """
        if isolated:
            self._fresh.doubt()
        early, self._launched = self._launched, False
        if self._fresh.begin("training_step") and early:
            self._early.check()
        else:  # what was launched early is gone, and gathered again
            self.before = self._runtime.stats()

    def after_backward(self, last: bool) -> None:
        """Call after a backward pass; `last` before the optimizer steps."""
        if self._keeps:  # between micro-batches, plans may keep what was gathered
            self._fresh.doubt() if last else self._fresh.settle()

    # An optimizer's step ----------------------------------------------------------------------------------------------

    def divide(self, optimizer: Optimizer, when: Callable[[], bool]) -> PartwiseStep | None:
        """What lets an optimizer step in parts, whose gathers are launched meanwhile; None if it shall not, or cannot.

        Args:
            optimizer: Before its first step.
            when: Asked before each step.
        """
        if not (self._is_early and self._part_bytes and can_step_partwise(optimizer, self._device)):
            return None
        return PartwiseStep(optimizer, lambda: self._parts() if when() else [], self._launch_part)

    def _parts(self) -> list[set[Tensor]]:
        self._launching = False
        return self._early.parts(self._part_bytes)

    def _launch_part(self, number: int) -> None:
        if number == 0:
            self.before = self._runtime.stats()
            self.forget()
            self._launching = True
        self._runtime.order_gathers()
        self._early.launch_part(number)

    def written(self) -> None:
        """Call when parameters were written to, by an optimizer's step or otherwise."""
        if not self._launching:
            self.forget()

    def seal(self) -> None:
        """Call at the end of an optimizer's step: what was launched meanwhile is right as long as nobody writes."""
        if not self._launching:
            return
        self._launching = False
        if self._early.seal():
            self._fresh.settle()
            self._launched = True
            self.early = "beside" if self._early.launched else None
        else:
            self.forget()

    def launch(self) -> None:
        """Call when an optimizer's step is over and the next training step uses its parameters; may gather them."""
        if self._is_early and self._early.useful and not self._launched:
            self.before = self._runtime.stats()
            self._early.launch()
            self._fresh.settle()
            self._launched = True
            self.early = "behind" if self._early.launched else None

    def forget(self) -> None:
        """What is gathered is out of date."""
        self._fresh.doubt()
        self._runtime.invalidate()
