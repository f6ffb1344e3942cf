"""The cheapest moves with which a step fits."""

from __future__ import annotations

import random

import pytest

from lightning_deepcompile.plan.budget import MemoryBudgetError
from lightning_deepcompile.plan.fit import PRICES, MemoryPlan, Move, Need, fit


def states(*units: int, peak: int = 60, stepping: int = 40, slots: int = 3, least: int = 1, most: int = 12) -> Need:
    moves = (Move("states", units, slots=slots, least=least, most=most, at="stepping"),)
    return Need({"passes": peak + sum(units), "stepping": stepping + sum(units)}, moves)


@pytest.mark.parametrize(
    ("stepping", "room", "leaving"),
    [
        (40, 110, 0),  # all of it fits
        (40, 109, 1),
        (40, 100, 10),
        (55, 100, 17),  # now the optimizer's buffers are what is too much
        (60, 100, 22),
        (55, 110, 0),  # none are needed where nothing leaves
        (40, 60, 50),
    ],
)
def test_what_exceeds_the_room_leaves(stepping: int, room: int, leaving: int) -> None:
    need = states(*[1] * 50, stepping=stepping, least=4)
    plan = fit(need, room, "same")
    assert plan.fits and plan.bytes("states") == leaving


def test_what_cannot_fit_is_said_with_the_least_that_does() -> None:
    plan = fit(states(*[1] * 50), 59, "same")
    assert not plan.fits and plan.least == plan.peak == 60
    plan.check(None)  # of a default nobody was sure
    with pytest.raises(MemoryBudgetError, match="memory_budget='59B'.* still needs 60 "):
        plan.check("59B")


@pytest.mark.parametrize(
    ("peak", "room", "leaving"),
    [
        (60, 130, 15),  # what has to leave fits into chunks of 2
        (50, 130, 5),
        (75, 130, 35),  # some of the larger ones leave, too, but not the largest
        (105, 130, 85),  # all, the largest one through buffers of its size
    ],
)
def test_buffers_are_for_what_leaves(peak: int, room: int, leaving: int) -> None:
    sizes = sorted([30, 1, 2, 10, 2, 10, 10, 10, *[1] * 10], key=lambda size: size if size > 2 else 0)
    plan = fit(states(*sizes, peak=peak, least=2, most=90), room, "same")
    assert plan.fits and plan.bytes("states") == leaving


def test_shards_leave_largest_first_and_the_last_as_small_as_would_do() -> None:
    need = Need({"step": 40 + 48}, (Move("parameters", (20, 12, 8, 5, 3), slots=2),))
    assert fit(need, 88, "same").moved == ()
    for room in range(40 + 2 * 20, 88):
        plan = fit(need, room, "same")
        fewer = [k for k in plan.gone("parameters")][:-1]
        assert plan.fits == (plan.peak <= room)
        if plan.fits:
            freed = sum(need.moves[0].units[k] for k in fewer) - 2 * max(
                (need.moves[0].units[k] for k in fewer), default=0
            )
            assert 88 - max(freed, 0) > room, "one fewer would not do"


def test_last_bits_change_only_where_nothing_else_does_or_by_price() -> None:
    moves = (
        Move("losses", rounds=True), Move("operators", rounds=True), Move("mlps", rounds=True),
        Move("activations", (10,)), Move("states", (10,)),
    )  # fmt: skip
    need = Need({"passes": 100}, moves)
    assert [fit(need, room, "needed").retrace for room in (100, 90, 80, 79)] == [None, None, None, "losses"]
    assert [fit(need, room, "any").retrace for room in (100, 99)] == [None, "losses"]
    later = Need({"passes": 100}, moves[1:])
    assert [fit(later, room, "any").retrace for room in (90, 89)] == [None, "operators"]
    plan = fit(need, 79, "same")
    assert plan.retrace is None and not plan.fits and plan.least == 80


def test_no_cheaper_set_fits() -> None:
    """Random needs: it fits if all moves together do, none is made in vain, and cheaper ones are made first."""
    draw = random.Random(3)
    for _ in range(300):
        kinds = draw.sample(sorted(PRICES), draw.randint(1, 4))
        moves = tuple(
            Move(
                kind,
                tuple(draw.randint(1, 20) for _ in range(draw.randint(1, 6))),
                moments=draw.choice([None, frozenset(["passes"])]),
            )
            for kind in kinds
        )
        need = Need({"passes": draw.randint(50, 200), "stepping": draw.randint(20, 200)}, moves)
        room = draw.randint(20, 200)
        plan: MemoryPlan = fit(need, room, "same")
        assert plan.fits == (plan.least <= room) and (plan.moved == ()) == (
            plan.needed <= room or plan.peak == plan.needed
        )
        assert plan.peak == need.peak(plan.moved)
        prices = [PRICES[one.move.kind] for one in plan.moved]
        assert prices == sorted(prices)
        if plan.fits and plan.moved:
            assert need.peak(plan.moved[:-1]) > room
