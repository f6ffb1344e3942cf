"""Evaluation in which ranks have different numbers of batches.

Each batch of an evaluation begins with a question between the hosts: which loader is it from? As long as the answer is
the same on all ranks, compiled steps run. Once some ranks have come to the next loader, or to the end, the others
evaluate their remaining batches uncompiled, each at its own pace: a rank that reads a block announces it, and all ranks
gather it, even those that need nothing. When no rank needs anything any more, all go on together.
"""

from __future__ import annotations

import logging
import sys

from lightning_deepcompile.ranks.host_report import HostReport
from lightning_deepcompile.ranks.meetings import Meetings, Where
from lightning_deepcompile.ranks.order import Agreement
from lightning_deepcompile.sharding.uncompiled import Uncompiled
from lightning_deepcompile.step.freshness import Freshness

_log = logging.getLogger(__name__)

_END = sys.maxsize >> 1
_NOTHING = 0


class Evaluation:
    """Lets ranks evaluate different numbers of batches; one per engine.

    Args:
        meetings: Of the ranks' hosts.
        order: Compares ranks' paths, while they are the same.
        freshness: Tracks gathered parameters.
        uncompiled: Gathers for code that is not compiled.
        rank: This rank; the first one reports that steps run uncompiled.

    Attributes:
        behind: The place of ranks that lag behind others; None while all are at one place.
    """

    def __init__(
        self, meetings: Meetings, order: Agreement, freshness: Freshness, uncompiled: Uncompiled, rank: int
    ) -> None:
        self._meetings, self._order, self._freshness, self._uncompiled = meetings, order, freshness, uncompiled
        self._rank, self._told = rank, False
        self._loader = 0
        self.behind: int | None = None

    def begin_batch(self, loader: int, number: int) -> None:
        """Call before a batch, and before its hooks.

        Args:
            loader: Index of the loader that it is from.
            number: Number of the batch, from 1, for errors.
        """
        self._meetings.batches, self._loader = number, loader
        self._come_to(2 * loader, Where.EVALUATION)

    def end_loader(self) -> None:
        """Call when this rank has no more batches of the loader that it read from, and before results are reduced."""
        self._come_to(2 * self._loader + 1, Where.EVALUATED)

    def end(self) -> None:
        """Call when this rank has no more batches: it takes part in the others' gathers."""
        self._come_to(_END, Where.EVALUATED)
        self._loader = 0

    def forget(self) -> None:
        """Call after an evaluation that has failed."""
        self.behind = self._uncompiled.blocks.uneven = None
        self._loader = 0

    def _come_to(self, place: int, where: Where) -> None:
        while True:
            if self.behind is not None:
                if place == self.behind:
                    return
                self._gather_until(_NOTHING, where)
                self._change(None)
            last, first = self._meetings.meet(where, HostReport(place=place))()
            if last.place == first.place:
                return
            self._change(first.place)

    def _change(self, behind: int | None) -> None:
        """Switches, with all ranks at this place, between going on together and each at its own pace."""
        self._order.end()
        self._freshness.forget()
        self._uncompiled.clear()
        self.behind = behind
        self._uncompiled.blocks.uneven = None if behind is None else self._gather
        if behind is not None and self._rank == 0 and not self._told:
            self._told = True
            _log.info("Some ranks have fewer batches to evaluate. The others run their remaining batches uncompiled.")

    def _gather(self, wanted: int) -> None:
        self._gather_until(wanted, Where.EVALUATION)

    def _gather_until(self, wanted: int, where: Where) -> None:
        """Gathers blocks that other ranks want, as long as they come before `wanted`."""
        while (chosen := self._meetings.meet(where, HostReport(block=wanted))().most.block) != wanted:
            self._uncompiled.blocks.take_part(chosen)
