"""Compares where the hosts of all ranks are in a training, at fixed places, and raises at once if they diverge.

A rank with one batch less leaves the epoch while the others begin a step; a rank that runs the model alone waits for
others that have gone on. Their next collectives would have no partner, or a wrong one. So whatever all ranks must do
together begins with a question between the hosts, and each host tells its place with it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch.distributed as dist

from lightning_deepcompile.ranks.exchange import AnyRank, Asked
from lightning_deepcompile.ranks.host_report import HostReport, HostReports
from lightning_deepcompile.ranks.watch import Watch

_RANK_BITS, _COUNT_BITS = 20, 36


class RanksDivergedError(RuntimeError):
    """Ranks are at different places, and would wait for each other."""


class Where(enum.IntEnum):
    """Places at which hosts meet."""

    TRAINING = 1
    LEFT = 2
    EVALUATION = 3
    EVALUATED = 4
    OUTSIDE = 5
    STATE = 6

    def describe(self, count: int) -> str:
        """Describes what a rank does there, to follow "Rank n".

        Args:
            count: Batches that it has begun.
        """
        batches = f"{count} batch{'' if count == 1 else 'es'}"
        return {
            Where.TRAINING: f"is in training batch {count} of the epoch",
            Where.LEFT: f"has left the epoch after {batches}",
            Where.EVALUATION: f"is in batch {count} of an evaluation",
            Where.EVALUATED: f"has come to the end of an evaluation after {batches}",
            Where.OUTSIDE: "calls a module of the model outside of the steps",
            Where.STATE: "collects the model's state, for a checkpoint",
        }[self]


_ADVICE: dict[Where | frozenset[Where], str] = {
    frozenset({Where.TRAINING, Where.LEFT}): (
        "A training step gathers parameters and reduces gradients, in which all ranks take part: give every rank as "
        "many batches (`DistributedSampler` pads; `Trainer(limit_train_batches=...)` cuts off what only some have), "
        "and let all ranks stop together (`trainer.strategy.reduce_boolean_decision`)."
    ),
    Where.OUTSIDE: (
        "Calling the model gathers its parameters, in which all ranks take part: call it on all ranks, or let all "
        "ranks enter `with trainer.strategy.full_parameters():`, in which one of them may call it alone."
    ),
    Where.STATE: (
        "A state dict is gathered from all ranks: call `trainer.save_checkpoint` and "
        "`trainer.strategy.lightning_module_state_dict` on all of them; rank 0 alone writes."
    ),
}


class Meetings:
    """Asks the other ranks' hosts, and compares their places.

    Args:
        group: Of the ranks' CPUs; used for nothing else, so that no other operation of a diverged rank is taken for an
        answer.
        watch: Says where ranks are if one waits for long.

    Attributes:
        watch: The same.
        batches: Batches of the epoch, or evaluation, that this rank has begun.
        steps: Steps of optimizers so far, and calls of other methods of their classes.
        over: Whether communication has ended, and nobody is asked any more.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self._hosts, self.watch = AnyRank(group), watch
        self._rank = group.rank()
        self.batches = self.steps = 0
        self.over = False

    def meet(self, where: Where, report: HostReport | None = None) -> Asked[HostReports]:
        """Tells the others where this rank is. Call on all ranks.

        Args:
            where: The place.
            report: This rank's report; None: with nothing in it.

        Returns:
            The reports of all ranks, to wait for.

        Raises:
            RanksDivergedError: Raised by the returned object if another rank is elsewhere, or has made another number
                of optimizer steps.
            RuntimeError: If another rank has failed; the returned object raises it, too.
        """
        report = report or HostReport()
        if self.over:
            return Asked(lambda: HostReports(report, report))
        self.watch.come_to(where.describe(self.batches), _ADVICE.get(where, ""))
        here = (where << _COUNT_BITS | self.batches) << _RANK_BITS | self._rank
        steps = self.steps << _RANK_BITS | self._rank
        answers = self._hosts.ask(here, -here, steps, -steps, *report.numbers())

        def wait() -> HostReports:
            last, first, most, least, *rest = answers()
            _compare_places(-first, last)
            if where not in (Where.EVALUATION, Where.EVALUATED):  # nobody trains there: numbers may differ
                _compare_steps(-least, most)
            return HostReports.of(rest)

        return Asked(wait, answers.is_there)


def _compare_places(*codes: int) -> None:
    places = [Where(code >> _RANK_BITS + _COUNT_BITS) for code in codes]
    if len({Where.EVALUATION if place == Where.EVALUATED else place for place in places}) == 1:
        return
    told = []
    for place, code in zip(places, codes, strict=True):
        rank, count = code % (1 << _RANK_BITS), (code >> _RANK_BITS) % (1 << _COUNT_BITS)
        told.append(f"rank {rank} {place.describe(count)}")
    text = f"{' and '.join(told)}: they would wait for each other. {_advice(places)}"
    raise RanksDivergedError(text[0].upper() + text[1:])


def _advice(places: Sequence[Where]) -> str:
    both = _ADVICE.get(frozenset(places))
    return both or next(
        (text for place in (Where.OUTSIDE, Where.STATE) if place in places for text in [_ADVICE[place]]),
        "Ranks must do the same: look for conditions on the rank, and for loops whose length follows from its data.",
    )


def _compare_steps(least: int, most: int) -> None:
    fewer, more = least >> _RANK_BITS, most >> _RANK_BITS
    if fewer == more:
        return
    one, other = least % (1 << _RANK_BITS), most % (1 << _RANK_BITS)
    raise RanksDivergedError(
        f"Rank {one} has made {fewer} optimizer steps, rank {other} {more} (a call of another method of an optimizer "
        "counts as one): a step was skipped, or such a method called, on some ranks alone, so that parts of the "
        "parameters may differ by a step. Call optimizers on all ranks. Gradients are sharded: a check such as "
        "`torch.isnan(parameter.grad).any()` sees this rank's part alone. Decide by what is equal on all ranks: "
        "`trainer.strategy.grad_norm()`, or `trainer.strategy.reduce_boolean_decision(found, all=False)`. Go on from "
        "the last checkpoint."
    )
