"""Lets a rank that runs out of memory in a planned program finish the step.

It cannot give up the step: the other ranks would wait for its collectives. So a region that failed is called again when
this rank has given memory back that no other rank knows of (``csrc/memory/retry.h``): a region is a function of its
inputs.

A region may free an input as soon as it has read it, so whoever wants to call it again must hold its inputs. This makes
the peak higher by the inputs that the region at the peak reads last. Only programs pay for it that use memory which was
free: planned ones, and those without checkpoints that the model asks for. So do profiled ones, so that plans count it.

In the next step the hosts tell each other. In the step after it, all ranks decide again with the memory that was there
(`tuning.foresight`), and a plan follows that is made for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_deepcompile import compat
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.program import CompiledRegion
from lightning_deepcompile.program.replay import Replays, Run
from lightning_deepcompile.program.schedule import Schedule

_MARGIN = 0.05  # of memory that is known from a failure: it comes in pieces


@dataclass
class Shortage:
    """A region that found no memory.

    Args:
        rank: The rank that was short.
        program: The program that ran; "" if the runtime itself was short, between regions.
        region: The region's name in it.
        asked: The request, as the allocator puts it; "" if it does not say.
        free: Bytes that the device had left; None where the allocator does not count.
        allocated: Bytes that were allocated; None where the allocator does not count.
        relieved: Bytes that the rank gave back to go on.
    """

    rank: int
    program: str
    region: str
    asked: str
    free: int | None = None
    allocated: int | None = None
    relieved: int = 0

    def __str__(self) -> str:
        """The shortage as a sentence."""
        where = f" in {self.region} of {self.program}" if self.program else " when it launched communication"
        asked = f"; {self.asked} were asked for" if self.asked else ""
        free = "" if self.free is None else f"; {format_bytes(self.free)} were free"
        return f"Rank {self.rank} ran out of memory{where}{asked}{free}."


def room_after(shortages: Sequence[Shortage], schedules: Sequence[Schedule], profile: Profile) -> int:
    """Returns the room in which the shortages would not have happened.

    It is the predicted memory where a rank was short, less what that rank gave back: that memory was in use,
    whatever was predicted. The memory that was allocated when the request failed was available, too.

    Args:
        shortages: Of all ranks.
        schedules: Those that ran.
        profile: What memory is predicted by.
    """
    prediction = simulate(schedules, profile)
    limits = [prediction.peak_bytes]
    for shortage in shortages:
        there = [
            point.bytes
            for point in prediction.memory
            if schedules[point.schedule].name == shortage.program
            and schedules[point.schedule].instructions[point.instruction].region == shortage.region != ""
        ]
        limits.append(max(there, default=prediction.peak_bytes) - shortage.relieved)
        if shortage.allocated is not None:
            limits.append(shortage.allocated)
    return max(int(min(limits) * (1 - _MARGIN)), 1)


@dataclass(eq=False, repr=False)
class MemoryRetry:
    """Calls a region again, with more memory free, when it runs out of memory on this rank.

    Args:
        runtime: ``_C.Runtime``; its ``memory.give_back`` gives memory back and says how much.
        device: Where regions run.
        rank: This rank, for the report.
        replays: Whose graphs go when the runtime has nothing left to give back; None: there are none.
        told: Whether a rank has told the others that it was short of memory.
    """

    runtime: Any
    device: torch.device
    rank: int
    replays: Replays | None = None
    told: bool = False
    _shortages: list[Shortage] = field(default_factory=list)
    _sent_away: int = 0

    def guard(self, program: str, name: str, region: CompiledRegion) -> Run:
        """Returns the function that a planned program calls for a region: like the region's own, but it retries on OOM.

        Args:
            program: The program's name.
            name: The region's name in it.
            region: The region.
        """
        run = region.run
        if not region.info.repeatable:
            return run
        # Programs outlive the engine; see `held_weakly`.
        describe, call_again = compat.held_weakly(self._describe), compat.held_weakly(self._call_again)

        def call(inputs: list[Any]) -> Sequence[Any]:
            held = inputs.copy()
            try:
                return run(inputs)
            except torch.OutOfMemoryError as error:
                shortage = describe(program, name, error)
            # Out of the handler: the error's frames, and what their variables hold, are gone.
            inputs.clear()
            return call_again(run, held, shortage)

        return call

    @property
    def short(self) -> bool:
        """True if this rank was short of memory since `take` was called."""
        return bool(self._shortages) or self.runtime.stats()["sent_away_bytes"] > self._sent_away

    def take(self) -> list[Shortage]:
        """Returns the shortages since the last call, including those of launches of gathers and reductions."""
        shortages, self._shortages = self._shortages, []
        stats = self.runtime.stats()
        before, self._sent_away = self._sent_away, stats["sent_away_bytes"]
        if self._sent_away > before:
            shortages = shortages or [Shortage(self.rank, "", "", "")]
            for one in shortages:  # each gave something back, on top of what was away already
                one.relieved = max(one.relieved, stats["away_peak_bytes"])
        return shortages

    def forget(self) -> None:
        """Discards the shortages under programs that are gone."""
        self.take()
        self.told = False

    def _call_again(self, run: Run, held: list[Any], shortage: Shortage) -> Sequence[Any]:
        while given := self._give_back():
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

    def _give_back(self) -> int:
        return self.runtime.memory.give_back() or (0 if self.replays is None else self.replays.give_back())

    def _describe(self, program: str, region: str, error: torch.OutOfMemoryError) -> Shortage:
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        shortage = Shortage(self.rank, program, region, asked[1] if asked else "")
        if self.device.type == "cuda":
            shortage.free, _ = torch.cuda.mem_get_info(self.device)
            shortage.allocated = torch.cuda.memory_allocated(self.device)
        return shortage
