"""Rounds and log lines of a long run with ragged batches: 10 000 steps on two ranks."""

from __future__ import annotations

import logging
import os
import random
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from custom_pass import early_ends
from multiprocess import run_ranks
from test_engine import make_engine, one_step, sgd
from test_profile import EARLY
from test_slow_ranks import Heard
from torch.distributed.device_mesh import init_device_mesh

from lightning_deepcompile.capture.frames import Frames
from lightning_deepcompile.tuning.coverage import Coverage

STEPS, CHANGE, NEAR = 10_000, 5_000, 12

Sizes = Callable[[int, random.Random], tuple[int, int]]


def longer(step: int, draw: random.Random) -> tuple[int, int]:
    """One row and one token come at times, for which PyTorch makes other graphs; later all batches are longer."""
    if step >= CHANGE:
        return draw.choice((2, 3, 4)), draw.randint(200, 400)
    return draw.choice((1, 2, 2, 3, 4)), 1 if draw.random() < 0.02 else draw.randint(2, 40)


def single(step: int, draw: random.Random) -> tuple[int, int]:
    """Returns sizes that have one row from a step on, which takes another graph."""
    return (1 if step >= CHANGE else draw.choice((2, 3, 4))), draw.randint(10, 20)


def rare(step: int, draw: random.Random) -> tuple[int, int]:
    """Returns sizes of which every eighth has one row, and some are smaller than all that are measured."""
    return draw.randint(1, 8), draw.randint(2, 60)


KINDS: dict[str, Sizes] = {"longer": longer, "single": single, "rare": rare}
CHANGES = {"longer": 1, "single": 1, "rare": 0}
ROUND = 19
"""Measured steps of a round, at most: two that are timed, seven pairs with marks, and three under the plan."""


def _play(sizes: Sizes) -> tuple[list[int], list[tuple[int, str]], list[int]]:
    """Returns the steps of rounds, the log with the step of each line, and the steps that were measured.

    Between rounds, a step is for the tuner no more than its beginning and its end. Where nothing is measured and no
    look at programs is near, steps consist of these.
    """
    torch._dynamo.reset()
    draw, generator = random.Random(int(os.environ["RANK"])), torch.Generator().manual_seed(1)
    heard, logger = Heard(logging.INFO), logging.getLogger("lightning_deepcompile")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    schedule = [EARLY[0], {**EARLY[1], "passes": ["zero3", "prefetch", early_ends]}]
    engine = make_engine(init_device_mesh("cpu", (2,)), schedule=schedule)
    optimizer, tuner = sgd(engine), engine.tuner
    said: list[tuple[int, str]] = []
    measured = []
    for step in range(STEPS):
        near = tuner._agenda.recheck is not None and tuner._agenda.recheck - step <= NEAR
        if step < 3 or not tuner.settled or near:
            one_step(engine, torch.randint(0, 16, sizes(step, draw), generator=generator), optimizer)
            if tuner._marks is not None:
                measured.append(step)
        else:
            assert not tuner.begin_micro_batch()
            tuner.end_step()
        said += ((step, line) for line in heard.lines)
        heard.lines.clear()
    rounds = [done.step for done in engine.report()]
    engine.close()
    logger.removeHandler(heard)
    return rounds, said, measured


def _play_all() -> dict[str, tuple[list[int], list[tuple[int, str]], list[int]]]:
    dist.init_process_group("gloo")
    return {name: _play(sizes) for name, sizes in KINDS.items()}


@pytest.mark.extensive
def test_ten_thousand_steps_take_few_rounds_and_few_words() -> None:
    first, other = run_ranks(_play_all, 2, timeout=300)
    for name, (rounds, said, measured) in first.items():
        assert other[name][0] == rounds and other[name][2] == measured, name
        before = [step for step in rounds if step < CHANGE]
        assert 1 <= len(before) <= 2, (name, rounds, said)
        assert len(rounds) - len(before) == CHANGES[name], f"shapes change for good once: {(name, rounds, said)}"
        assert len(measured) <= ROUND * len(rounds), (name, measured)
        kinds = Counter(re.sub(r"[\d.]+", "#", line.partition(":")[0]) for _, line in said)
        assert max(kinds.values()) <= len(rounds), (name, said)
        assert not [line for _, line in said if "No plan was made" in line], (name, said)
        assert len([line for step, line in said if 100 < step < CHANGE]) <= 2, (name, said)


def test_batches_are_far_off_if_all_of_them_are() -> None:
    coverage = Coverage(Frames({}))
    assert not coverage.adds([], [1]), "no batches are known that another plan was made for"
    coverage.add([], [10, 20, 15])
    found = [coverage.adds([], elements) for elements in ([8, 3], [7, 3], [25, 40], [26, 40], [15, 400], [])]
    assert found == [False, True, False, True, False, False]
