"""Launches the first gathers of a training step before it begins, from fresh parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.step.early_gathers import EarlyGathers
from lightning_deepcompile.step.freshness import Freshness, writes_to


class StepPrefetch:
    """Tracks writes to parameters, and launches the first gathers of the next step; one per engine.

    At stage 3 they are launched inside the optimizer's step, once it has stepped on their inputs
    (`launch_in_optimizer`), after the optimizer's step (`launch`), or with the step itself.

    Args:
        capture: Its programs say which gathers a step begins with.
        runtime: ``_C.Runtime`` that gathers.
        host_group: Of the ranks' CPUs.
        device: Where the shards are.
        stage: ZeRO stage.

    Attributes:
        may_be_early: Whether the first gathers may be launched before their step.
        may_be_in_optimizer: Whether that may be while the optimizer steps.
        early: Whether the first gathers of the last step were launched before it.
        in_optimizer: Whether they were launched while the optimizer stepped.
        follows: Whether a training step follows the optimizer's step directly, without users' code in between.
        before: The runtime's counters before the first gather of the step under way.
    """

    def __init__(
        self, capture: Capture, runtime: Any, host_group: dist.ProcessGroup, device: torch.device, stage: int
    ) -> None:
        self._runtime = runtime
        self._fresh = Freshness(capture.model, runtime, stage)
        self._keeps = stage == 3
        self.may_be_early = stage == 3 and capture.model.ranks.shards > 1
        self.may_be_in_optimizer = True
        self._capture = capture
        self._early = EarlyGathers(capture, host_group, device)
        self._model = capture.model
        self._launched = False
        self._rewritten = False  # whether this rank's part of gathers within the optimizer's step was written to since
        self._counts: list[int] | None = None  # of writes to what was gathered while the optimizer steps
        self._before_step: dict[str, list[int]] | None = None  # of writes to what this step found gathered
        self.early = self.in_optimizer = self.follows = False
        self.before: dict[str, int] = {}

    def begin(self, name: str) -> None:
        """Call before the step `name`, which does not train."""
        self._before_step = None
        # Ranks may evaluate different numbers of batches: none waits for another one's answer.
        self._fresh.begin(name, self._fresh.may_stay(name) and not self._fresh.written())

    def may_stay(self, isolated: bool) -> bool:
        """Returns whether a training step may use gathered parameters, unless they were `written` to on a rank.

        Args:
            isolated: Whether it must launch all gathers itself.

        Returns:
            The same on all ranks.
        """
        if isolated:
            self._fresh.doubt()
        return self._fresh.may_stay("training_step")

    def written(self) -> bool:
        """Returns whether writes to this rank's parameters were seen since they were gathered."""
        return self._rewritten or self._fresh.written()

    def begin_training_step(self, stays: bool) -> None:
        """Call before a training step.

        Args:
            stays: Whether it uses gathered parameters.
        """
        self._counts = self._before_step = None  # of steps that failed
        early, self._launched = self._launched, False
        self._rewritten = False
        self._fresh.begin("training_step", stays)
        if stays and early:
            self._early.check()
            self._before_step = self._writes_before_step()
        else:  # early gathers were dropped, and are repeated
            self.before = self._runtime.stats()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Returns a context for a step's own code.

        Raises:
            RuntimeError: If it wrote to parameters gathered before it began, other than by an optimizer.
        """
        yield
        before, self._before_step = self._before_step, None
        if before is None or before == (now := self._writes_before_step()):
            return
        name = next(name for name, counts in now.items() if before.get(name) != counts)
        raise RuntimeError(
            f"A training step wrote to the parameter {name!r}, which had been gathered before the step began: it may "
            "have computed with old values. Write in a hook, such as `on_train_batch_end` (an average of "
            "weights, or `target.load_state_dict(net.state_dict())`)."
        )

    def after_backward(self, last: bool) -> None:
        """Call after a backward pass; `last` before the optimizer steps."""
        if self._keeps:  # between micro-batches, plans may keep what was gathered
            self._fresh.doubt() if last else self._fresh.settle()

    def stepped_first(self) -> frozenset[Tensor]:
        """Local shards on which the optimizer steps first, before `launch_in_optimizer`; may be empty."""
        if not (self.may_be_early and self.may_be_in_optimizer and self.follows) or self._replays:
            return frozenset()
        shards = [shard for chunk in self._early.chunks() for shard in chunk.shards]
        return frozenset(self._model.by_name[shard.spec.name].local for shard in shards)

    def launch_in_optimizer(self) -> None:
        """Call while an optimizer steps, when it has stepped on `stepped_first`."""
        self.forget()
        before = self._runtime.stats()
        self._early.launch_in_optimizer()
        if self._early.in_optimizer:
            self.before, self._counts = before, self._writes_to_gathered()

    def stepped(self) -> None:
        """Call when an optimizer has stepped, or parameters were written to: gathered copies are out of date."""
        self._before_step = None
        if self._counts is None:  # else they were gathered since
            self.forget()

    def rewritten(self) -> None:
        """Call when code of a step has written to parameters, on all ranks: earlier gathers are out of date."""
        self._before_step = None
        self.forget()

    def launch(self) -> None:
        """Call when an optimizer's step has ended and the next training step uses its parameters; may gather them."""
        counts, self._counts = self._counts, None
        self.in_optimizer = counts is not None
        if self.in_optimizer:
            self._rewritten = counts != self._writes_to_gathered()
            self._fresh.settle()
            self._launched = self.early = True
            return
        if self.may_be_early and self._early.useful and not self._replays:
            self.before = self._runtime.stats()
            self._early.launch()
            self._fresh.settle()
            self._launched = True
            self.early = self._early.launched

    def forget(self) -> None:
        """Marks gathered parameters as out of date."""
        self._counts = None
        self._fresh.doubt()
        self._model.derived.invalidate()
        self._runtime.parameters.invalidate()

    @property
    def _replays(self) -> bool:
        """True if graphs contain the first gathers; the same on all ranks."""
        return self._capture.replays is not None and self._capture.replays.in_use

    def _writes_to_gathered(self) -> list[int]:
        names = [shard.spec.name for chunk in self._early.chunks() for shard in chunk.shards]
        return [count for name in names for count in writes_to(self._model.by_name[name])]

    def _writes_before_step(self) -> dict[str, list[int]]:
        parameters = [self._model.by_id[i] for i in self._early.ids]
        return {parameter.name: writes_to(parameter) for parameter in parameters}
