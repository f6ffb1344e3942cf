"""Lists and dicts that steps fill: the same as without compilation, and without compiling for every length."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Mlp, Tokens
from multiprocess import run_ranks
from test_handover import trainer_of
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy

STEPS = 20  # more than a step may be compiled anew


class Fills(Mlp):
    """Fills containers in its steps."""

    def __init__(self, fill: Callable[[Any, Tensor, int], None]) -> None:
        super().__init__()
        self.fill = (fill,)
        self.list: list[Any] = []
        self.dict: dict[Any, Any] = {}
        self.lists: list[list[Any]] = [[], []]
        self.by_name: dict[str, list[Any]] = defaultdict(list)
        self.window: deque[Any] = deque(maxlen=3)
        self.constants = [0.5, 2.0]
        self.epochs: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * self.constants[1]
        self.fill[0](self, loss, batch_idx)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.by_name["validation"].append(super().training_step(batch, batch_idx))

    def on_validation_epoch_end(self) -> None:
        self.epochs.append(float(torch.stack(self.by_name["validation"]).mean()))
        self.by_name["validation"].clear()


def append(module: Any, loss: Tensor, index: int) -> None:
    module.list.append(loss.detach())


def append_undetached(module: Any, loss: Tensor, index: int) -> None:
    module.list.append(loss)


def extend(module: Any, loss: Tensor, index: int) -> None:
    module.list.extend([loss.detach(), index])
    module.list += [1]


def look(module: Any, loss: Tensor, index: int) -> None:
    module.list.append(loss.detach())
    if len(module.list) > 3:
        del module.list[0]
    module.log("kept", float(len(module.list)))


def assign(module: Any, loss: Tensor, index: int) -> None:
    module.dict[index] = loss.detach()


def nested(module: Any, loss: Tensor, index: int) -> None:
    module.lists[index % 2].append(loss.detach())
    module.by_name["loss"].append(loss.detach())


def bounded(module: Any, loss: Tensor, index: int) -> None:
    module.window.append(loss.detach())
    module.dict[0] = sum(module.window) / len(module.window)
    if index == 15:
        module.window.rotate()
        module.window.appendleft(module.window.popleft() * 2)


def replaced(module: Any, loss: Tensor, index: int) -> None:
    module.list.append(loss.detach())
    if index % 8 == 7:
        module.list = []


FILLS = {fill.__name__: fill for fill in (append, append_undetached, extend, look, assign, nested, bounded, replaced)}


def run(strategy: Any, fill: Any, build: Callable[..., Fills] = Fills) -> Fills:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(3)
    module = build(fill) if fill is not None else build()
    trainer = trainer_of(strategy, val_check_interval=5)
    loaders = [DataLoader(Tokens(count, 4, rank, world), batch_size=4 // world) for count in (STEPS, 3)]
    trainer.fit(module, *loaders)
    return module


def contents(module: Fills) -> list[Any]:
    return [module.list, module.dict, module.lists, dict(module.by_name), module.epochs, list(module.window)]


def ours() -> DeepCompileStrategy:
    return DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))


@pytest.mark.parametrize("name", FILLS)
def test_what_steps_fill_is_what_it_is_without_compilation(name: str) -> None:
    expected, strategy = run("auto", FILLS[name]), ours()
    module = run(strategy, FILLS[name])
    torch.testing.assert_close(contents(module), contents(expected), rtol=1e-5, atol=1e-5)
    assert [type(value) for value in contents(module)] == [type(value) for value in contents(expected)]
    assert sum(map(len, contents(module))) > 0
    assert strategy.summary().graphs <= 13, "a few times until it is known to grow, and not for every length"


class Looks(Fills):
    """Has containers that are full after one step, and gives its callbacks one of them."""

    def __init__(self) -> None:
        super().__init__(append)
        self.sizes: dict[int, Tensor] = {}

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            x = x + layer(x)
            self.sizes[number] = x.detach().norm()
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "list": self.list}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        assert type(outputs["list"]) is list and len(outputs["list"]) == len(self.list)


def test_what_is_full_stays_in_the_graph() -> None:
    strategy = ours()
    module = run(strategy, None, Looks)
    assert len(module.sizes) == 3 and len(module.list) == STEPS
    calls = {e.program.name: e.calls for e in strategy.engine.capture.executables if e.program.kind == "forward"}
    assert sum(calls.values()) == STEPS, "one graph in every step"


def stacked(module: Any, loss: Tensor, index: int) -> None:
    append(module, loss, index)
    module.log("mean", torch.stack(module.list).mean())


def failing(module: Any, loss: Tensor, index: int) -> None:
    append(module, loss, index)
    if index == 3:
        raise ValueError(f"with {len(module.list)}")


def test_a_step_that_fails_leaves_the_users_own() -> None:
    with pytest.raises(TypeError, match="StepList.*also fills.*on_train_batch_end"):
        run(ours(), stacked)
    lists: list[Any] = []

    def fails(module: Any, loss: Tensor, index: int) -> None:
        lists[:] = [module]
        failing(module, loss, index)

    with pytest.raises(ValueError, match="with 4"):
        run(ours(), fails)
    assert type(lists[0].list) is list and len(lists[0].list) == 4


def on_first_rank(module: Any, loss: Tensor, index: int) -> None:
    if module.global_rank == 0:
        append(module, loss, index)


def _on_first_rank() -> int:
    return len(run(ours(), on_first_rank).list)


def test_ranks_may_fill_different_ones() -> None:
    assert run_ranks(_on_first_rank, 2) == [STEPS, 0]
