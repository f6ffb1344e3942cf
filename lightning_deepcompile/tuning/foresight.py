"""Decides, before a training step first runs, how it is traced and what waits in host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.offload.activations import ActivationOffload
from lightning_deepcompile.plan.copy_placement import offload_all, without_copies
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.least import least_budget
from lightning_deepcompile.plan.memory_need import MemoryNeed, Standing, memory_need
from lightning_deepcompile.plan.report import Round
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.profile.forecast import forecast
from lightning_deepcompile.profile.holds import hold_ratio
from lightning_deepcompile.profile.memory import memory_limit
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.ranks.exchange import maxima
from lightning_deepcompile.tuning.retracing import Retracing

__all__ = ["Foresight", "StepRetracedError"]

_log = logging.getLogger(__name__)


class StepRetracedError(BaseException):
    """Unwinds a training step whose programs were compiled, and have not run: it is traced once more.

    Not an `Exception`, so that no handler in a user's step takes it for an error.
    """


class Foresight:
    """Looks at the programs of a training step between their compilation and their first run.

    Args:
        capture: Compiles them.
        retracing: Decides how the step is traced.
        leaving: Decides which saved tensors are offloaded.
        memory: Of the device.
        group: The ranks.
        states: Whether optimizer states may wait in host memory.

    Attributes:
        need: What the last step that was looked at needs, as it is traced; None before.
        least: The least that it could run in, on any rank.
        budget: The least that any rank may allocate.
    """

    def __init__(
        self,
        capture: Capture,
        retracing: Retracing,
        leaving: ActivationOffload,
        memory: PeakMemory,
        group: dist.ProcessGroup,
        *,
        states: bool,
    ) -> None:
        self._capture, self._retracing, self._leaving = capture, retracing, leaving
        self._memory, self._group, self._states_may_leave = memory, group, states
        self.need: MemoryNeed | None = None
        self.least = self.budget = 0

    def look(
        self, step: int, programs: list[Program], say: Callable[[str, int], None], *, restartable: bool
    ) -> Round | None:
        """Decides; call on all ranks at the same place, when programs are compiled and before they run.

        Args:
            step: Optimizer steps done.
            restartable: Whether nothing of this rank's step has run yet. Else no step is traced once more here: code
                that ran would run again.
            programs: Of a micro-batch, in the order in which they run.
            say: Logs a line, on one rank.

        Returns:
            What the report says of a step that is to be traced once more; None if it runs as it is traced.
        """
        standing = self._standing(programs[0])
        profile = self._forecast(programs, standing)
        # An allocator of the device may find as much memory as the largest value takes in smaller pieces alone.
        on_device = self._leaving.device.type == "cuda"
        regions = [program.region(name) for program in programs for name in program.regions()]
        spare = max((region.info.memory.largest for region in regions), default=0) if on_device else 0
        peak = simulate(profile.schedules, profile).peak_bytes + spare
        fewest = self._forecast(programs, replace(standing, states=0)) if self._states_may_leave else profile
        may_offload = self._leaving.mode != "none"
        schedules = offload_all(profile.schedules) if may_offload else profile.schedules
        least = least_budget(schedules, fewest) + spare
        budget = profile.budget or 0
        told = peak, least, -budget, not restartable
        highest, self.least, fewest_bytes, has_run = map(int, maxima(told, self._group))
        self.budget = -fewest_bytes
        self.need = memory_need(profile.schedules, profile, standing, spare)
        if highest <= self.budget:
            return None
        if not has_run:
            anew = self._retracing.spare(step, replace(profile, budget=self.budget), self.least)
            if anew is not None:
                return anew
        if self._leaving.mode == "auto":
            self._leaving.needed = True
            say(
                f"The step needs {format_bytes(highest)}, and {format_bytes(self.budget)} may be allocated: saved "
                "tensors are offloaded to host memory.",
                logging.INFO,
            )
            self._capture.offload_more(self._leaving.as_many_as_fit)  # which of them concerns no other rank
        if self.least > self.budget:
            say(self.shortfall(), logging.WARNING)
        return None

    def shortfall(self) -> str:
        """Returns what the step needs, where it is not expected to fit; "" where it is."""
        if self.need is None or self.least <= self.budget:
            return ""
        return (
            f"This step is not expected to fit: it needs {format_bytes(self.least)} at least, and "
            f"{format_bytes(self.budget)} may be allocated. Use a smaller batch, more ranks, or activation "
            f"checkpointing. As it is traced, it takes:\n{self.need}"
        )

    def _standing(self, first: Program) -> Standing:
        """Returns what is there before the first program runs, with what the step will add to it for good."""
        model, device = self._leaving.model, self._leaving.device
        trained = sum(p.local.nbytes for p in model.parameters if p.dtensor.requires_grad)
        states = 0 if self._leaving.has_states else 2 * trained  # Adam's
        if device.type != "cuda":  # nobody counts what is resident
            return Standing()
        shards, whole = model.device_bytes, self._leaving.whole_bytes
        there = sum(buffer.flat.untyped_storage().nbytes() for buffer in model.grad_buffers)
        inputs = forecast([first], 0, **self._fields()).regions
        read = next(iter(inputs.values())).before if inputs else 0  # counted among the values of programs
        other = max(self._memory.current - shards - there - read, 0)
        return Standing(shards + whole, max(trained, there), states, other)

    def _forecast(self, programs: list[Program], standing: Standing) -> Profile:
        plain = [replace(one, schedule=without_copies(one.schedule)) for one in programs]
        return forecast(plain, standing.total, **self._fields())

    def _fields(self) -> dict[str, object]:
        capture, device, ranks = self._capture, self._leaving.device, self._capture.model.ranks
        config = capture.config
        dtypes = {(p.gather_dtype, p.local.dtype) for p in capture.model.parameters if p.dtensor.requires_grad}
        return {
            "world_size": ranks.shards,
            "device_type": device.type,
            "hold_ratio": hold_ratio(dtypes),
            "micro_batches": 1 if capture.gradients.update else 2,
            "reduce_window": config.reduce_window,
            "pack_below": capture.pack_below,
            "packs_reductions": config.packs_reductions(device.type, max(ranks.shards, ranks.replicas)),
            "budget": memory_limit(device, config.memory_budget, self._memory.beside()),
        }
