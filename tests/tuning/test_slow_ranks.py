"""A rank that keeps computing longer than the others is named; one that was late once, or has more to do, is not."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable

import torch
from cases import VOCAB, Base, Tokens, train
from multiprocess import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_deepcompile import CompileConfig, DeepCompileStrategy

STEPS = 18


class Late:
    """Calls of the operator, and in which of them rank 1 is late."""

    calls = 0
    when: Callable[[int], bool] = staticmethod(lambda call: False)


@torch.library.custom_op("tests::maybe_late", mutates_args=())
def maybe_late(x: Tensor) -> Tensor:
    Late.calls += 1
    if os.environ["RANK"] == "1" and Late.when(Late.calls):
        time.sleep(0.1)
    else:
        time.sleep(0.01)
    return x.clone()


@maybe_late.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Net(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.layer(x) + maybe_late(x.detach()))


class Uneven(Tokens):
    """Longer sentences on rank 1."""

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index][: 13 if os.environ["RANK"] == "1" else 9]


class Heard(logging.Handler):
    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def warnings(when: Callable[[int], bool], data: type[Dataset[Tensor]]) -> list[str]:
    """Returns the warnings while a model trains."""
    Late.calls, Late.when = 0, staticmethod(when)
    heard, logger = Heard(), logging.getLogger("lightning_deepcompile")
    logger.addHandler(heard)
    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    rank = int(os.environ["RANK"])
    record = train(
        Net, strategy, world_size=2, rank=rank, steps=STEPS, data=data, inspect=lambda t: t.strategy.report()
    )
    logger.removeHandler(heard)
    assert record.extra[0].outcome != "measuring"
    return heard.lines


def all_cases() -> dict[str, list[str]]:
    return {
        "always": warnings(lambda call: True, Tokens),
        "while it is measured": warnings(lambda call: call < 7, Tokens),
        "with more to do": warnings(lambda call: True, Uneven),
    }


def test_a_rank_is_slow_when_it_is_over_several_steps_of_equal_work() -> None:
    first, other = run_ranks(all_cases, 2)
    (line,) = [line for line in first.pop("always") if "computes" in line]
    assert re.match(r"Rank 1 computes \d+\.\d+ to \d+\.\d+ times as long as the fastest, in 5 successive steps", line)
    assert not [line for lines in (*first.values(), *other.values()) for line in lines if "computes" in line]
