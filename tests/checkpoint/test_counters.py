"""Optimizers that count in tensors of one element, beside parameters that have as many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from multiprocess import run_ranks
from test_checkpoint import SAVED_AFTER, STEPS, Model, SaveAt, fit, ours
from torch import Tensor, nn


class Counting(torch.optim.Optimizer):
    """Divides by the number of steps, which it keeps in a tensor of one element for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"], state["mean"] = torch.zeros(1), torch.zeros_like(parameter)
                state["count"] += 1
                state["mean"].mul_(0.5).add_(parameter.grad)
                parameter.sub_(state["mean"], alpha=0.1 / state["count"].item())
        return loss


class OneElement(Model):
    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.alone = alone
        self.one = nn.Parameter(torch.full((1,), 0.4))

    def logits(self, tokens: Tensor) -> Tensor:
        return super().logits(tokens) * self.one

    def configure_optimizers(self) -> Any:
        if self.alone:
            return Counting([self.one])
        # The first one of its group: others tell only later that the class counts so.
        return Counting([self.one, *(p for n, p in self.named_parameters() if p.requires_grad and n != "one")])


def _counts(trainer: Any) -> list[float]:
    (optimizer,) = trainer.optimizers
    counts = [optimizer.state[p]["count"] for p in optimizer.param_groups[0]["params"] if p in optimizer.state]
    assert all(count.shape == (1,) for count in counts)
    return [float(count) for count in counts]


def _train(folder: Path) -> list[tuple[list[float], list[float]]]:
    runs = [
        fit(ours("sharded"), SaveAt(folder / "sharded", SAVED_AFTER), build=OneElement),
        fit(ours("full"), SaveAt(folder / "full", SAVED_AFTER + 1), build=OneElement, resume=folder / "sharded"),
        fit(ours("full"), build=OneElement, resume=folder / "full"),
    ]
    fit(ours("full"), SaveAt(folder / "alone", STEPS), build=lambda: OneElement(alone=True))
    return [(record.losses, _counts(trainer)) for record, trainer in runs]


@pytest.mark.timeout(300)
def test_every_rank_keeps_a_counter_of_one_element(tmp_path: Path) -> None:
    record, trainer = fit("auto", SaveAt(tmp_path / "plain", STEPS), build=OneElement)
    counts = _counts(trainer)
    assert set(counts) == {STEPS}
    for rank in run_ranks(_train, 2, tmp_path):
        for run, (losses, own) in enumerate(rank):
            assert own == counts
            torch.testing.assert_close(losses, record.losses[-len(losses) :], rtol=1e-5, atol=1e-6, msg=str(run))
    theirs, mine = (torch.load(tmp_path / name)["optimizer_states"][0] for name in ("plain", "full"))
    for index, state in theirs["state"].items():
        assert {key: value.shape for key, value in state.items()} == {
            key: value.shape for key, value in mine["state"][index].items()
        }
    (alone,) = torch.load(tmp_path / "alone")["optimizer_states"][0]["state"].values()
    assert alone["count"].tolist() == [STEPS] and alone["mean"].shape == (1,)
