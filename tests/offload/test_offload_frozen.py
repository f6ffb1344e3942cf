"""Parameters that are not trained have no states that could come and go."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from multiprocess import run_ranks
from test_offload_states import CASES, EVERYTHING, WORLD, Model, fit, same
from torch import Tensor


class Frozen(Model):
    """Most of its states would be of layers that are not trained, several chunks of them."""

    def __init__(self) -> None:
        super().__init__(CASES["adamw_loop"][0])
        self.layers[1:].requires_grad_(False)


class Copies(pl.Callback):
    """Counts what each call copies."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Tensor, batch_idx: int) -> None:
        self.calls.clear()  # states come into being in the first step: there is nothing to fetch
        if batch_idx == 0:
            for _, offload in trainer.strategy.engine.residency._attached:
                offload._runtime = Counted(offload._runtime, self.calls)


class Counted:
    """A runtime, or its states."""

    def __init__(self, target: Any, calls: list[tuple[str, int]]) -> None:
        self.target, self.calls = target, calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.target, name)
        if name == "states":
            return Counted(method, self.calls)
        if name not in ("fetch", "stow"):
            return method

        def counted(slot: int, tensors: list[Tensor], *rest: Any) -> Any:
            self.calls.append((name, len(tensors)))
            return method(slot, tensors, *rest)

        return counted


def _frozen() -> None:
    """Parameters that have no states and get none take no part in the copies."""
    expected, _ = fit("adamw_loop", {}, build=Frozen)
    watch = Copies()
    actual, _ = fit("adamw_loop", EVERYTHING, build=Frozen, watch=watch)
    same(actual, expected, "frozen")
    assert len(watch.calls) >= 4 and all(count > 0 for _, count in watch.calls), watch.calls


@pytest.mark.timeout(200)
def test_what_has_no_states_takes_no_part_in_copies() -> None:
    run_ranks(_frozen, WORLD, timeout=180)
