"""All ranks learn on the same step that one of them was short of memory, without a collective.

Every few optimizer steps of a planned program, each rank tells the rendezvous store that it has come so far, and
whether it was short of memory since the last time. At the next such step it reads what all have said at the one before:
by then they have come by long ago, as a rule, and nobody waits. So a step costs nothing, every eighth three messages to
the store, and the plan changes 8 to 16 steps after a shortage. Until then the short rank helps itself (`Relief`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_deepcompile.plan.leaner import Shortage

__all__ = ["ShortageWatch"]


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
        """Call when a new plan takes over: what was said of the old one counts no more."""
        self._posted = None

    def turn(self, mine: Sequence[Shortage]) -> list[Shortage]:
        """Tells the others of this rank's shortages.

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
        try:
            self.store.wait([f"{key}/all"], self.timeout)
        except (RuntimeError, dist.DistError) as error:
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
            for name in ("here", "all", "short", *map(str, range(self.world_size))):
                self.store.delete_key(f"{key}/{name}")

    def _key(self, turn: int) -> str:
        return f"{self.prefix}/shortage{turn}"
