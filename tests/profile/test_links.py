"""Transfers are timed without the time for which ranks wait for each other."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist
from multiprocess import run_ranks

from lightning_deepcompile.plan.costs import Link
from lightning_deepcompile.profile.links import Transfer, agree, fit_link

WORLD = 3
SIZES = [64 << 20] * 12 + [160 << 20]
LINK = Link(20e-6, 100e9)


def _fitted() -> tuple[Link, Link, list[int]]:
    """The links of a rank's own transfers, and of those that ranks agreed on, and sizes where ranks made others."""
    dist.init_process_group("gloo")
    rank, draw = dist.get_rank(), random.Random(0)
    mine = []
    for size in SIZES:
        seconds, late = LINK.seconds(size, WORLD), draw.randrange(WORLD)  # the rank that comes last
        waits = [0.0 if other == late else draw.uniform(0.3, 1.0) * seconds for other in range(WORLD)]
        mine.append(Transfer("gradients", size, seconds + waits[rank]))
    group = dist.group.WORLD
    assert group is not None
    differ = agree(mine[rank:], group)
    return fit_link(mine, WORLD), fit_link(agree(mine, group), WORLD), [one.size for one in differ]


def test_a_rank_that_waits_for_another_does_not_make_a_link_slow() -> None:
    size = SIZES[0]
    for rank, (own, agreed, differ) in enumerate(run_ranks(_fitted, WORLD, timeout=60)):
        assert own.seconds(size, WORLD) > 1.2 * LINK.seconds(size, WORLD), "it waited"
        assert agreed.seconds(size, WORLD) == pytest.approx(LINK.seconds(size, WORLD))
        assert differ == SIZES[rank:], "other programs: each rank knows only its own"
