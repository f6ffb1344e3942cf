"""Lets a rank that runs out of memory in a planned program finish the step, and tells all ranks of it.

It cannot give up the step: the other ranks would wait for its collectives. So a region that failed is called again when
this rank has given memory back that no other rank knows of (``csrc/memory/retry.h``): a region is a function of its
inputs.

A region may free an input as soon as it has read it, so whoever wants to call it again must hold its inputs. This makes
the peak higher by the inputs that the region at the peak reads last. Only planned programs pay for it: those which use
memory that was free, and for which there is a leaner plan. Profiled programs do, too, so that plans count it, and those
whose loss is whole and could be computed in pieces.

Every few optimizer steps of a planned program, each rank tells the rendezvous store that it has come so far, and
whether it was short of memory since the last time. At the next such step it reads what all have said at the one before:
by then they have come by long ago, as a rule, and nobody waits. So a step costs nothing, every eighth three messages to
the store, and the plan changes 8 to 16 steps after a shortage. The leaner plan is `plan.leaner`'s.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_deepcompile import compat
from lightning_deepcompile.plan.leaner import Shortage
from lightning_deepcompile.program.program import RegionModule
from lightning_deepcompile.program.replay import Replays
from lightning_deepcompile.ranks.failures import STORE_GONE

__all__ = ["MemoryRetry", "ShortageWatch", "Shortages"]

Run = Callable[[list[Any]], Sequence[Any]]


@dataclass(eq=False, repr=False)
class MemoryRetry:
    """Calls a region again, with more memory free, when it runs out of memory on this rank.

    Args:
        runtime: ``_C.Runtime``; its ``memory.give_back`` gives memory back and says how much.
        device: Where regions run.
        rank: This rank, for the report.
        replays: Whose graphs go when the runtime has nothing left to give back; None: there are none.
    """

    runtime: Any
    device: torch.device
    rank: int
    replays: Replays | None = None
    _shortages: list[Shortage] = field(default_factory=list)
    _sent_away: int = 0

    def guard(self, program: str, region: str, module: RegionModule) -> Run:
        """Returns the function that a planned program calls for a region: like the region's own, but it retries on OOM.

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
        """Returns the shortages since the last call, including those of launches of gathers and reductions."""
        shortages, self._shortages = self._shortages, []
        stats = self.runtime.stats()
        before, self._sent_away = self._sent_away, stats["sent_away_bytes"]
        if self._sent_away > before:
            shortages = shortages or [Shortage(self.rank, "", "", "")]
            for one in shortages:  # each gave something back, on top of what was away already
                one.relieved = max(one.relieved, stats["away_peak_bytes"])
        return shortages

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


@dataclass
class ShortageWatch:
    """Exchanges shortages; call on all ranks alike, at optimizer-step boundaries.

    Args:
        store: Key-value store shared by the ranks.
        rank: This rank.
        world_size: Number of ranks.
        timeout: How long to wait for a rank that is a whole turn behind.
        prefix: Makes keys unique to one engine.
        every: Optimizer steps from turn to turn.
    """

    store: dist.Store
    rank: int
    world_size: int
    timeout: timedelta
    prefix: str
    every: int = 8
    _turn: int = 0
    _posted: int | None = None

    def forget(self) -> None:
        """Discards what ranks reported under the old plan; call when a new one takes over."""
        self._posted = None

    def turn(self, mine: Sequence[Shortage]) -> list[Shortage]:
        """Tells the other ranks of this rank's shortages.

        Args:
            mine: Those since the last turn.

        Returns:
            What all ranks told at the turn before, the same on all of them.

        Raises:
            RuntimeError: If a rank does not get to where this one was a turn ago within the timeout.
        """
        if self.world_size == 1:
            return list(mine)
        before, self._posted = self._posted, self._turn
        self._turn += 1
        key = self._key(self._posted)
        if mine:
            self.store.set(f"{key}/{self.rank}", json.dumps([asdict(one) for one in mine]))
            self.store.add(f"{key}/short", 1)
        if self.store.add(f"{key}/here", 1) == self.world_size:
            self.store.set(f"{key}/all", "")
            self._delete(self._posted - 2)  # whoever has come here has read the turn before, and is done with that
        return [] if before is None else self._read(before)

    def _read(self, turn: int) -> list[Shortage]:
        key = self._key(turn)
        begun = time.monotonic()
        try:
            self.store.wait([f"{key}/all"], self.timeout)
        except (RuntimeError, dist.DistError) as error:
            waited = time.monotonic() - begun
            if waited < self.timeout.total_seconds() * 0.9:
                raise RuntimeError(
                    f"Rank {self.rank} waited {waited:.0f} s for other ranks, then {STORE_GONE}"
                ) from error
            raise RuntimeError(
                f"Rank {self.rank} waited {self.timeout} for other ranks, which are more than {self.every} optimizer "
                "steps behind. See what they report; one may have ended or be stuck."
            ) from error
        if not self.store.check([f"{key}/short"]):
            return []
        told = [f"{key}/{rank}" for rank in range(self.world_size)]
        texts = [self.store.get(one).decode() for one in told if self.store.check([one])]
        return [Shortage(**one) for text in texts for one in json.loads(text)]

    def _delete(self, turn: int) -> None:
        if turn >= 0:
            key = self._key(turn)
            told = map(str, range(self.world_size)) if self.store.check([f"{key}/short"]) else ()
            for name in ("here", "all", "short", *told):
                self.store.delete_key(f"{key}/{name}")

    def _key(self, turn: int) -> str:
        return f"{self.prefix}/shortage{turn}"


@dataclass(eq=False, repr=False)
class Shortages:
    """Shortages of memory since the plan in use took over, on this rank and the others.

    Args:
        retry: Knows this rank's.
        watch: Tells all ranks.
    """

    retry: MemoryRetry
    watch: ShortageWatch

    def look(self, step: int) -> list[Shortage]:
        """Exchanges shortages if it is time to; call on all ranks alike, at optimizer-step boundaries.

        Args:
            step: Optimizer steps done.

        Returns:
            Those of all ranks, the same on all of them.
        """
        return self.watch.turn(self.retry.take()) if step % self.watch.every == 0 else []

    def forget(self) -> None:
        """Discards the shortages under the old plan; call when a new one takes over."""
        self.retry.take()
        self.watch.forget()
