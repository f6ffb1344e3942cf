"""A rank that runs out of memory in a planned program helps itself, and finishes the step with the others.

It cannot give up the step: the other ranks would wait for its collectives. So a region that failed is called again when
this rank has given memory back that no other rank knows of (``csrc/memory/relief.h``): a region is a function of its
inputs. Ranks agree on a leaner plan later, at an optimizer-step boundary (`ShortageWatch`, `Tuner`).

A region may free an input as soon as it has read it, so whoever wants to call it again must hold its inputs. This makes
the peak higher by the inputs that the region at the peak reads last. Only planned programs pay for it: those which use
memory that was free, and for which there is a leaner plan. Profiled programs do, too, so that plans count it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_deepcompile import compat
from lightning_deepcompile.plan.leaner import Shortage
from lightning_deepcompile.program.program import RegionModule

__all__ = ["Relief"]

Run = Callable[[list[Any]], Sequence[Any]]


@dataclass(eq=False, repr=False)
class Relief:
    """What one rank does when a region finds no memory.

    Args:
        runtime: ``_C.Runtime``; its ``relieve`` gives memory back and says how much.
        device: Where regions run.
        rank: This rank, for the report.
    """

    runtime: Any
    device: torch.device
    rank: int
    _shortages: list[Shortage] = field(default_factory=list)
    _sent_away: int = 0

    def guard(self, program: str, region: str, module: RegionModule) -> Run:
        """The function that a planned program calls for a region: as the region's own, but it survives a shortage.

        Args:
            program: The program's name.
            region: The region's name in it.
            module: The region.
        """
        run = module.run
        if not module.info.repeatable:
            return run
        # Programs outlive the engine; see `held_weakly`.
        describe, call_again = compat.held_weakly(self._describe), compat.held_weakly(self._call_again)

        def call(inputs: list[Any]) -> Sequence[Any]:
            held = inputs.copy()
            try:
                return run(inputs)
            except torch.OutOfMemoryError as error:
                shortage = describe(program, region, error)
            # Out of the handler: the error's frames, and what their variables hold, are gone.
            inputs.clear()
            return call_again(run, held, shortage)

        return call

    def take(self) -> list[Shortage]:
        """The shortages since the last call; a launch of a gather or a reduction that was short counts as well."""
        shortages, self._shortages = self._shortages, []
        stats = self.runtime.stats()
        before, self._sent_away = self._sent_away, stats["sent_away_bytes"]
        if self._sent_away > before:
            shortages = shortages or [Shortage(self.rank, "", "", "")]
            for one in shortages:  # each gave something back, on top of what was away already
                one.relieved = max(one.relieved, stats["away_peak_bytes"])
        return shortages

    def _call_again(self, run: Run, held: list[Any], shortage: Shortage) -> Sequence[Any]:
        while given := self.runtime.relieve():
            shortage.relieved += given
            try:
                result = run(held.copy())
            except torch.OutOfMemoryError:
                continue
            self._shortages.append(shortage)
            return result
        try:
            result = run(held)  # for the last time: inputs go when they are read
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"{shortage} It gave back what it could do without ({shortage.relieved} bytes: buffers, gradients on "
                "their way, gathered parameters, which went to host memory), and that was not enough."
            )
            raise
        self._shortages.append(shortage)
        return result

    def _describe(self, program: str, region: str, error: torch.OutOfMemoryError) -> Shortage:
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        shortage = Shortage(self.rank, program, region, asked[1] if asked else "")
        if self.device.type == "cuda":
            shortage.free, _ = torch.cuda.mem_get_info(self.device)
            shortage.allocated = torch.cuda.memory_allocated(self.device)
        return shortage
