"""Optimizers that step in parts, so that the next step's first gathers run beside them: the same values, earlier."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import CASES, Record, assert_same_training, train
from multiprocess import run_ranks
from torch import Tensor

from lightning_deepcompile.partwise import PartwiseStep, can_step_partwise

STEPS = 5
CPU = torch.device("cpu")


class _AtStep(pl.Callback):
    """Runs as a hook of the optimizer: counts what is gathered by then, and may write to parameters.

    Args:
        writes_from: The first step after which every parameter shrinks.
    """

    def __init__(self, writes_from: int) -> None:
        self.writes_from = writes_from
        self.groups: list[int] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        self.before = self._gathered(trainer)

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.groups.append(self._gathered(trainer) - self.before)
            if len(self.groups) > self.writes_from:
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.mul_(0.9)

        trainer.optimizers[0].register_step_post_hook(hook)

    @staticmethod
    def _gathered(trainer: pl.Trainer) -> int:
        engine = getattr(trainer.strategy, "engine", None)
        return 0 if engine is None else engine.runtime.stats()["gather_groups"]


def _sharded(part: int | str, writes_from: int, **arguments: Any) -> Record:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    config = CompileConfig(region_backend="eager", optimizer_part=part, schedule=None)
    at_step = _AtStep(writes_from)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    record = train(
        CASES["gpt_tied"],
        DeepCompileStrategy(compile=config),
        world_size=world,
        rank=rank,
        steps=STEPS,
        callbacks=[at_step],
        **arguments,
    )
    record.extra = at_step.groups
    return record


@pytest.mark.parametrize(
    ("world", "writes_from", "arguments"),
    [
        (3, STEPS, {"optimizer": "adamw", "accumulate": 2, "gradient_clip_val": 0.1}),
        (2, 3, {"optimizer": "sgd"}),  # nobody's writes behind the step get lost
    ],
)
def test_values_stay_and_gathers_are_early(world: int, writes_from: int, arguments: dict[str, Any]) -> None:
    whole = run_ranks(_sharded, world, 0, writes_from, **arguments)
    parts = run_ranks(_sharded, world, "1KiB", writes_from, **arguments)
    expected = train(
        CASES["gpt_tied"],
        "auto",
        world_size=1,
        data_world=world,
        rank=0,
        steps=STEPS,
        callbacks=[_AtStep(writes_from)],
        **arguments,
    )
    for ours, other in zip(parts, whole, strict=True):
        assert ours.losses == other.losses
        assert all(torch.equal(ours.params[name], other.params[name]) for name in other.params)
        assert_same_training(ours, expected, params=arguments["optimizer"] == "sgd")
        assert other.extra == [0] * STEPS
        # From the step on before which it was seen that nobody writes: the embedding, and two blocks ahead.
        assert ours.extra == [0, *[3] * (STEPS - 1)]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop"])
def test_parts_come_to_what_a_whole_step_does(kind: str) -> None:
    def run(parts: bool) -> tuple[list[Tensor], list[str]]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(n, 3)) for n in (4, 1, 5, 2)]
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.5}]
        optimizer = getattr(torch.optim, kind)(groups, lr=0.1)
        assert can_step_partwise(optimizer, CPU)
        said: list[str] = []
        stepwise = PartwiseStep(optimizer, lambda: [{params[2]}, {params[3], params[0]}], lambda n: said.append(str(n)))
        for _ in range(3):
            for parameter in params:
                parameter.grad = torch.randn_like(parameter)
            if parts:
                stepwise.begin()
                assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]  # params[1] is left
            optimizer.step()
            stepwise.finish()
            assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]
            said.append("over")
        entries = [v for p in params for v in optimizer.state[p].values() if isinstance(v, Tensor)]
        return [*(p.detach() for p in params), *entries], said

    (ours, said), (expected, _) = run(True), run(False)
    assert len(ours) == len(expected) and all(map(torch.equal, ours, expected))
    assert said == ["0", "1", "over"] * 3


def test_only_what_is_known_to_be_elementwise_is_divided() -> None:
    class Own(torch.optim.SGD):
        pass

    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    assert can_step_partwise(torch.optim.SGD([parameter]), CPU)
    assert not can_step_partwise(Own([parameter]), CPU)
    assert not can_step_partwise(torch.optim.LBFGS([parameter]), CPU)


@pytest.mark.gpu
@pytest.mark.timeout(200)
def test_on_gpus_values_stay_and_gathers_are_early() -> None:
    arguments = {"optimizer": "adamw", "accelerator": "gpu"}
    whole, parts = (run_ranks(_sharded, 2, part, STEPS, **arguments)[0] for part in (0, "1KiB"))
    assert parts.losses == whole.losses
    assert all(torch.equal(parts.params[name], whole.params[name]) for name in whole.params)
    assert (whole.extra, parts.extra) == ([0] * STEPS, [0, *[3] * (STEPS - 1)])
