"""Python values that change with every step behave as without compilation."""

from __future__ import annotations

import dis
import math
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from cases import Mlp, Tokens
from multiprocess import run_ranks
from test_handover import trainer_of
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.sharding.mentions import mentions

STEPS = 20  # more than a step may be compiled anew


class Fills(Mlp):
    """Fills containers in its steps."""

    def __init__(self, fill: Callable[[Any, Tensor, int], None]) -> None:
        super().__init__()
        del self.layers[1:]  # what is filled does not depend on them
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


def stacked(module: Any, loss: Tensor, index: int) -> None:
    append(module, loss, index)
    module.log("mean", torch.stack(module.list[-8:]).mean())


FILLS = {
    fill.__name__: fill
    for fill in (append, append_undetached, extend, look, assign, nested, bounded, replaced, stacked)
}


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


@pytest.fixture(autouse=True)
def few_compilations() -> Iterator[None]:
    """Functions that change with every step are soon left uncompiled."""
    with torch._dynamo.config.patch(recompile_limit=3):
        yield


def ours() -> DeepCompileStrategy:
    return DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))


def text(module: Any, loss: Tensor, index: int) -> None:
    module.list.append("loss " + str(loss.item() * 3) + " step " + str(module.global_step))


def table(module: Any, loss: Tensor, index: int) -> None:
    values = {"thrice": 3 * loss.item(), "loss": loss.detach().item()}
    module.log_dict(values)
    module.dict[index] = values["thrice"]


def listed(module: Any, loss: Tensor, index: int) -> None:
    module.list.extend(value * 2 for value in torch.stack([loss, loss + 1]).tolist())


def perplexity(module: Any, loss: Tensor, index: int) -> None:
    value = math.exp(min(loss.item(), 3.0))
    module.log("perplexity", value)
    module.list.append(value - 1)


READ = {action.__name__: action for action in (text, table, listed, perplexity)}


def average(module: Any, loss: Tensor, index: int) -> None:
    module.mean = 0.9 * module.mean + 0.1 * loss.item()
    module.log("mean", module.mean)


def count(module: Any, loss: Tensor, index: int) -> None:
    module.count += 1.0
    module.log_dict({"count": module.count, "half": module.count / 2, "left": 100 - module.count})


def before_and_after(module: Any, loss: Tensor, index: int) -> None:
    """An immutable number: what was read before is what it was."""
    last = module.count
    module.count += 0.5 * loss.item()
    module.list.append(module.count - last)
    module.dict[index] = last
    module.mean = -module.count


def shown(module: Any, loss: Tensor, index: int) -> None:
    module.mean = 2 * module.mean + loss.item()
    module.list.append(f"{module.mean:.3f} {round(module.mean, 2)} {int(module.mean)} {module.mean}")


def compared(module: Any, loss: Tensor, index: int) -> None:
    module.mean = 0.5 * module.mean + 3.0
    if module.mean > 5:
        module.count = min(module.count, 0.1 * module.mean)
        module.mean = 0.0 if index % 4 else math.sqrt(module.mean)


NUMBERS = {action.__name__: action for action in (average, count, before_and_after, shown, compared)}


SIMILAR = {"append", "extend", "look", "replaced", "table", "perplexity", "average", "count"}  # to others


def some(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.extensive] if name in SIMILAR else []) for name in names]


@pytest.mark.parametrize("name", some(FILLS))
def test_what_steps_fill_is_what_it_is_without_compilation(name: str) -> None:
    expected, module = run("auto", FILLS[name]), run(ours(), FILLS[name])
    torch.testing.assert_close(contents(module), contents(expected), rtol=1e-5, atol=1e-5)
    assert [type(value) for value in contents(module)] == [type(value) for value in contents(expected)]
    assert sum(map(len, contents(module))) > 0


class Collects(Fills):
    """Its steps append to lists, and do nothing else with them."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        self.window.append(batch_idx)
        if batch_idx == self.fails_at:
            raise ValueError(f"at {batch_idx}")
        return loss

    fails_at = -1

    def on_train_batch_end(self, *_: Any) -> None:
        assert type(self.outputs) is list and len(self.outputs) == self.trainer.global_step
        assert list(self.window) == list(range(max(0, len(self.outputs) - 3), len(self.outputs)))


def test_lists_that_steps_append_to_stay_in_the_graph() -> None:
    strategy = ours()
    module = run(strategy, None, Collects)
    assert len(module.outputs) == STEPS
    assert not [one for one in strategy.summary().uncompiled if ".training_step (" in one]
    calls = [e.calls for e in strategy.engine.capture.frames.executables if e.program.kind == "forward"]
    assert sum(calls) == STEPS and len(calls) <= 2, "one graph in every step, compiled once, or twice with a symbol"


def test_a_step_that_fails_leaves_the_users_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Collects] = []

    class Fails(Collects):
        fails_at = 3

        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    with pytest.raises(ValueError, match="at 3"):
        run(ours(), None, Fails)
    assert type(made[0].outputs) is list and len(made[0].outputs) in (3, 4)


@pytest.mark.parametrize("name", some(READ))
def test_it_does_not_end_training(name: str) -> None:
    expected, module = run("auto", READ[name], Fills), run(ours(), READ[name], Fills)
    metrics, ours_metrics = expected.trainer.callback_metrics, module.trainer.callback_metrics
    torch.testing.assert_close(ours_metrics, metrics, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.dict, expected.dict, rtol=1e-5, atol=1e-5)
    if name == "text":
        numbers = [[float(line.split()[1]) for line in lines] for lines in (module.list, expected.list)]
        torch.testing.assert_close(*numbers, rtol=1e-5, atol=1e-5)
        assert [line.split()[2:] for line in module.list] == [line.split()[2:] for line in expected.list]
    else:
        torch.testing.assert_close(module.list, expected.list, rtol=1e-5, atol=1e-5)


class Numbers(Fills):
    """A module with numbers that records their values after every step."""

    def __init__(self, fill: Any) -> None:
        super().__init__(fill)
        self.mean, self.count = 0.0, 1.0
        self.history: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        values = [self.mean, self.count, *self.list, *self.dict.values()]
        assert not any(type(value) is Tensor for value in values), values
        self.history.append((self.mean, self.count, dict(self.trainer.callback_metrics)))


@pytest.mark.parametrize("name", some(NUMBERS))
def test_numbers_are_what_they_are_without_compilation(name: str) -> None:
    expected, strategy = run("auto", NUMBERS[name], Numbers), ours()
    module = run(strategy, NUMBERS[name], Numbers)
    assert len(module.history) == 20 and module.history[-1] != module.history[0]
    torch.testing.assert_close(module.history, expected.history, rtol=1e-5, atol=1e-5)
    assert [type(value) for value in module.list] == [type(value) for value in expected.list]
    if name == "shown":
        assert len(module.list) == 20 and module.list[0].split()[0] == expected.list[0].split()[0]
    else:
        torch.testing.assert_close([module.list, module.dict], [expected.list, expected.dict], rtol=1e-5, atol=1e-5)


class Scaled(Numbers):
    """Its loss is computed with a number that the step computes, in every way in which tensors meet numbers."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        whole = torch.where(batch > 0, self.mean * batch, 1 - batch / self.mean)
        assert whole.dtype is torch.float32 and (loss * self.mean).dtype is torch.float32
        return {"loss": self.mean * loss + loss / self.mean + 0 * whole.sum(), "mean": self.mean}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        assert type(outputs["mean"]) is float
        self.history.append(float(outputs["loss"]))


def grow(module: Any, loss: Tensor, index: int) -> None:
    module.mean = 1.0 if index == 0 else 0.9 * module.mean + 0.1


def test_losses_that_depend_on_them() -> None:
    expected, module = run("auto", grow, Scaled), run(ours(), grow, Scaled)
    assert module.history == pytest.approx(expected.history, rel=1e-5)


class Prints(Fills):
    """Says in every step where it is, in its own code and in a method's."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            text = f"batch {batch_idx}, step {self.global_step}: {loss.item():.3f}, {100 * loss.item():.1f} %"
            self.list.append(text)
        self.say(loss, batch_idx)
        return loss

    def say(self, loss: Tensor, index: int) -> None:
        self.list.append(f"{index:03d}: {loss.item():.3f}")


class Says(Fills):
    """Its helper alone does so; the step is compiled."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        say(self.list, loss, batch_idx)
        return loss


def say(texts: list[str], loss: Tensor, index: int) -> None:
    if index < 0:
        never_says(texts, loss, index)
    texts.append(f"{index:03d}: {float(loss):.3f}")


def never_says(texts: list[str], loss: Tensor, index: int) -> None:
    texts.append(f"{index:03d}: {loss.item():.3f}")


@pytest.mark.parametrize(("build", "texts"), [(Prints, 30), (Says, 20)])
def test_steps_that_print(build: type[Fills], texts: int) -> None:
    strategy = ours()
    expected, module = run("auto", lambda *_: None, build), run(strategy, lambda *_: None, build)
    assert module.list == expected.list and len(module.list) == texts
    assert strategy.summary().graphs > 0
    name = "say" if build is Says else "Prints.training_step"
    (told,) = (one for one in strategy.summary().uncompiled if "f-string" in one)  # not of `never_says`
    assert told.startswith(f"{name} (")


def test_code_of_python_itself_is_not_read() -> None:
    """A helper of a library may name a function of `dis`, whose f-strings read no tensor."""
    found = mentions([lambda code: dis.get_instructions(code)])
    assert found.names == {"dis", "get_instructions"} and not found.broken_texts


def on_first_rank(module: Any, loss: Tensor, index: int) -> None:
    if module.global_rank == 0:
        average(module, loss, index)
        module.list.append(loss.item())


def _on_first_rank() -> tuple[int, int]:
    with torch._dynamo.config.patch(recompile_limit=3):
        module = run(ours(), on_first_rank, Numbers)
    return len(module.list), len(module.history)


def test_ranks_may_compute_different_ones() -> None:
    assert run_ranks(_on_first_rank, 2) == [(STEPS, STEPS), (0, STEPS)]
