"""The probe never puts a class on a way that computes something else than one process does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from optimizers import GlobalClip, Lars, Lion, MuonWithAuxAdam, Sam, SignSam
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_deepcompile.step.ways import Way, ways_of

SHAPES = [(70, 80), (40, 30), (40, 30), (90,), (7,), (5, 4, 3)]
STEPS = 60


@dataclass(frozen=True)
class Recipe:
    """The behaviour of a class.

    Args:
        statistic: By what a gradient is divided: of the element, its row, its column, the tensor, its group, or all.
        strength: How much of it.
        delayed: Whether the statistic is that of the momentum of the steps before, which is zero in the first one.
        start: Number of the first step with the statistic; before, each element is updated by itself.
        every: It has it once in so many steps.
        hidden: Whether these two are written in the code, rather than settings of a group.
        counter: Where steps are counted.
        least: Elements of a tensor that has the statistic.
        dims: Dimensions of a tensor that has it; 0: any.
        indexed: Whether the rate depends on a tensor's number.
        skips: Whether a step is left out if the gradient of any element of a tensor, or of all, is not a number.
    """

    statistic: str = "element"
    strength: float = 1.0
    delayed: bool = False
    start: int = 0
    every: int = 1
    hidden: bool = False
    counter: str = "state"
    least: int = 0
    dims: int = 0
    indexed: bool = False
    skips: str = ""


class Made(Optimizer):
    """Does as a recipe says."""

    def __init__(self, params: Iterable[Any], recipe: Recipe) -> None:
        self.recipe, self.count = recipe, 0
        counted = {} if recipe.hidden else {"start": recipe.start, "every": recipe.every}
        super().__init__(params, {"lr": 0.1, "momentum": 0.8, **counted})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        recipe = self.recipe
        self.count += 1
        grads = [[p.grad for p in group["params"] if p.grad is not None] for group in self.param_groups]
        if recipe.skips == "all" and not all(g.isfinite().all() for those in grads for g in those):
            return loss
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = {"step": torch.tensor(0.0), "number": 0, "momentum": torch.zeros_like(p)}
        read = self._momenta() if recipe.delayed else grads
        for number, group in enumerate(self.param_groups):
            group["count"] = group.get("count", 0) + 1
            for index, p in enumerate(group["params"]):
                state = self.state[p]
                state["step"] += 1
                state["number"] += 1
                gradient = p.grad
                if recipe.skips == "tensor" and not gradient.isfinite().all():
                    continue
                count = {"state": state["step"], "number": state["number"], "group": group["count"]}
                now = int(count.get(recipe.counter, self.count))
                start = recipe.start if recipe.hidden else group["start"]
                every = recipe.every if recipe.hidden else group["every"]
                has = now > start and now % every == 0 and p.numel() >= recipe.least and recipe.dims in (0, p.dim())
                value = state["momentum"] if recipe.delayed else gradient
                size = self._size(value, number, read) if has else value.abs()
                rate = group["lr"] * (1 + 0.1 * index * recipe.indexed)
                state["momentum"].mul_(group["momentum"]).add_(gradient / (1 + recipe.strength * size))
                p.sub_(rate * state["momentum"])
        return loss

    def _momenta(self) -> list[list[Tensor]]:
        return [[self.state[p]["momentum"].clone() for p in group["params"]] for group in self.param_groups]

    def _size(self, value: Tensor, number: int, read: list[list[Tensor]]) -> Tensor:
        statistic = self.recipe.statistic
        if statistic == "row":
            return value.square().mean(-1, keepdim=True).sqrt()
        if statistic == "column":
            return value.square().mean(0, keepdim=True).sqrt()
        if statistic == "tensor":
            return value.square().mean().sqrt()
        those = {"group": read[number], "all": [g for group in read for g in group]}.get(statistic)
        if those is None:
            return value.abs()
        return torch.stack([g.norm() for g in those]).norm() / math.sqrt(sum(g.numel() for g in those))


def simulated(
    make: Callable[[list[list[nn.Parameter]]], Optimizer],
    shapes: list[list[tuple[int, ...]]],
    part: Callable[[int, int, Tensor], Tensor | None],
    steps: int,
) -> dict[tuple[int, int], list[Tensor]]:
    """Steps of a rank's part of each group's tensors; values after each step, of those that it has."""
    generator = torch.Generator().manual_seed(5)
    whole = [[torch.randn(shape, generator=generator) for shape in group] for group in shapes]
    own = {(g, i): part(g, i, t) for g, group in enumerate(whole) for i, t in enumerate(group)}
    held = {place: nn.Parameter(t.clone()) for place, t in own.items() if t is not None}
    optimizer = make([[held[g, i] for i in range(len(group)) if (g, i) in held] for g, group in enumerate(shapes)])
    values: dict[tuple[int, int], list[Tensor]] = {place: [] for place in held}
    for step in range(steps):
        draws = {}
        for g, group in enumerate(shapes):
            for i, shape in enumerate(group):
                draws[g, i] = torch.randn(shape, generator=generator) * (3.0 if step % 3 else 0.1) * (1 + i)
        if step == steps - 1:
            draws[0, 0].view(-1)[3] = math.nan
        mine = {place: part(*place, draws[place]) for place in held}

        def closure(mine: dict[Any, Tensor] = mine) -> Tensor:  # type: ignore[assignment]
            for place, parameter in held.items():
                parameter.grad = mine[place] + 0.3 * parameter.detach()
            return torch.tensor(1.0)

        optimizer.step(closure)
        for place, parameter in held.items():
            values[place].append(parameter.detach().clone())
    return values


def check(
    make: Callable[[list[list[nn.Parameter]]], Optimizer],
    shapes: list[list[tuple[int, ...]]],
    steps: int = STEPS,
    ranks: int = 3,
) -> list[Way]:
    """Decides how a class steps, and compares with one process what ranks come to."""
    optimizer = make([[nn.Parameter(torch.randn(shape)) for shape in group] for group in shapes])
    ways = [decision.way for decision in ways_of(optimizer, ranks)]
    if Way.DTENSORS in ways:
        assert set(ways) == {Way.DTENSORS}
        return ways
    whole = simulated(make, shapes, lambda g, i, t: t, steps)
    found = []
    for rank in range(ranks):

        def part(g: int, i: int, t: Tensor, rank: int = rank) -> Tensor | None:
            if ways[g] is Way.OWNERS:
                return t if (g + i) % ranks == rank else None
            rows = -(-t.shape[0] // ranks)
            return t[rank * rows : (rank + 1) * rows]

        found.append(simulated(make, shapes, part, steps))
    for (g, i), values in whole.items():
        for step, value in enumerate(values):
            parts = [own[g, i][step] for own in found if (g, i) in own]
            scale = float(value.nan_to_num().abs().max())
            torch.testing.assert_close(torch.cat(parts), value, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)
    return ways


RECIPES = st.builds(
    Recipe,
    statistic=st.sampled_from(["element", "row", "column", "tensor", "group", "all"]),
    strength=st.sampled_from([0.03, 1.0]),
    delayed=st.booleans(),
    start=st.sampled_from([0, 0, 1, 3, 5, 17, 40]),
    every=st.sampled_from([1, 1, 2, 3, 10, 17]),
    hidden=st.booleans(),
    counter=st.sampled_from(["state", "number", "group", "attribute"]),
    least=st.sampled_from([0, 0, 10, 1000, 5000]),
    dims=st.sampled_from([0, 1, 2]),
    indexed=st.sampled_from([False, False, True]),
    skips=st.sampled_from(["", "", "tensor", "all"]),
)


def made(recipe: Recipe) -> Callable[[list[list[nn.Parameter]]], Optimizer]:
    return lambda groups: Made([{"params": group} for group in groups], recipe)


def check_recipe(recipe: Recipe) -> None:
    if recipe.hidden and recipe.every == 17:
        return  # written in the code alone, no number that the probe tries
    check(made(recipe), [SHAPES[::2], SHAPES[1::2]])


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(RECIPES)
@example(Recipe("all", start=40, hidden=True))
@example(Recipe("tensor", every=10, hidden=True, counter="attribute"))
@example(Recipe("column", least=5000))
@example(Recipe("tensor", least=1000, delayed=True))
@example(Recipe("group", delayed=True))
@example(Recipe(skips="all"))
@example(Recipe(skips="tensor"))
def test_random_classes_are_stepped_as_in_one_process(recipe: Recipe) -> None:
    check_recipe(recipe)


@pytest.mark.extensive
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(RECIPES)
def test_more_random_classes(recipe: Recipe) -> None:
    check_recipe(recipe)


@pytest.mark.parametrize(
    ("recipe", "way"),
    [
        (Recipe(), Way.SHARDS),
        (Recipe("row", dims=2), Way.SHARDS),
        (Recipe("row"), Way.OWNERS),  # the last dimension of a vector is its only one
        (Recipe("tensor"), Way.OWNERS),
        (Recipe("column", start=17), Way.OWNERS),
        (Recipe("tensor", least=5000), Way.OWNERS),
        (Recipe("all"), Way.DTENSORS),
        (Recipe("all", start=40, hidden=True, counter="attribute"), Way.DTENSORS),
        (Recipe(indexed=True), Way.SHARDS),
        (Recipe("tensor", indexed=True), Way.DTENSORS),
    ],
)
def test_what_a_class_does_decides(recipe: Recipe, way: Way) -> None:
    assert check(made(recipe), [SHAPES]) == [way]


def muon(groups: list[list[nn.Parameter]]) -> Optimizer:
    return MuonWithAuxAdam([{"params": group, "use_muon": not index} for index, group in enumerate(groups)])


@pytest.mark.parametrize(
    ("make", "ways"),
    [
        (lambda groups: Lion(groups[0] + groups[1]), [Way.SHARDS]),
        (lambda groups: Lars(groups[0] + groups[1]), [Way.OWNERS]),
        (lambda groups: GlobalClip(groups[0] + groups[1]), [Way.DTENSORS]),
        (lambda groups: Sam(groups[0] + groups[1], lr=0.1), [Way.DTENSORS]),
        (lambda groups: SignSam(groups[0] + groups[1]), [Way.SHARDS]),
        (muon, [Way.OWNERS, Way.SHARDS]),
    ],
)
def test_known_kinds(make: Callable[[list[list[nn.Parameter]]], Optimizer], ways: list[Way]) -> None:
    groups = [[nn.Parameter(torch.randn(shape)) for shape in shapes] for shapes in (SHAPES[:3], SHAPES[3:])]
    optimizer = make(groups)
    before = [p.clone() for group in groups for p in group]
    assert [decision.way for decision in ways_of(optimizer)] == ways
    assert all(torch.equal(p, b) for p, b in zip((p for group in groups for p in group), before, strict=True))
    assert not optimizer.state and not any(p.grad is not None for group in groups for p in group)


class Named(torch.optim.AdamW):
    """Steps as its base does."""


class Changed(torch.optim.SGD):
    """Steps otherwise, though by the step of its base."""

    def _init_group(self, group: Any, params: Any, grads: Any, *rest: Any) -> Any:
        result = super()._init_group(group, params, grads, *rest)
        grads[:] = [grad / grad.norm() for grad in grads]
        return result


class Tabled(Lars):
    """Makes a table in the first step on a large tensor, for all objects of the class."""

    table: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        large = [p for group in self.param_groups for p in group["params"] if p.numel() > 1000]
        if large and Tabled.table is None:
            Tabled.table = torch.linspace(0, 1, 8)
        result = super().step(closure)
        for p in large:
            p.mul_(0.9)
        return result


def test_what_a_class_does_once_is_not_taken_for_a_threshold() -> None:
    tensors = [nn.Parameter(torch.randn(70, 80)), nn.Parameter(torch.randn(9))]
    assert [decision.way for decision in ways_of(Tabled(tensors))] == [Way.OWNERS]


def test_the_reason_for_dtensors_is_why_tensors_are_coupled() -> None:
    (decision,) = ways_of(Made([nn.Parameter(torch.randn(40, 30)), nn.Parameter(torch.randn(9))], Recipe("all")))
    assert decision.way is Way.DTENSORS and decision.reason == "tensors affect each other"


def test_subclasses_that_change_nothing_are_as_their_base() -> None:
    tensors = [nn.Parameter(torch.randn(40, 30)), nn.Parameter(torch.randn(9))]
    assert [decision.way for decision in ways_of(Named(tensors, fused=True))] == [Way.SHARDS]
    assert [decision.way for decision in ways_of(Changed(tensors, lr=0.1))] == [Way.OWNERS]


class Decays(torch.optim.AdamW):
    """Calls the step of its base, and adds something."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.mul_(0.99)
        return loss


def test_kernels_that_pytorchs_classes_choose_are_not_known_without_memory_and_hide_nothing() -> None:
    tensors = [nn.Parameter(torch.randn(40, 30)), nn.Parameter(torch.randn(9))]
    for make in (Decays, lambda p, **kw: Sam(p, base=torch.optim.AdamW, lr=0.1, **kw)):
        found = [ways_of(make(tensors, fused=fused)) for fused in (False, True)]
        assert found[0] == found[1]
    assert [decision.way for decision in ways_of(Decays(tensors, fused=True))] == [Way.SHARDS]


def test_rates_of_zero_and_unstarted_warmup_hide_nothing() -> None:
    optimizer = Lars([nn.Parameter(torch.randn(40, 30)), nn.Parameter(torch.randn(9))], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    assert optimizer.param_groups[0]["lr"] == 0
    assert [decision.way for decision in ways_of(optimizer)] == [Way.OWNERS]
    assert optimizer.param_groups[0]["lr"] == 0


class Unhealthy(Lion):
    def __init__(self, params: Iterable[Any], trouble: str) -> None:
        super().__init__(params)
        self.trouble = trouble
        self.lock = __import__("threading").Lock() if trouble == "lock" else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if self.trouble == "raises":
            raise RuntimeError("no such kernel")
        if self.trouble == "communicates":
            torch.distributed.all_reduce(self.param_groups[0]["params"][0])
        return super().step(closure)


@pytest.mark.parametrize(("trouble", "reason"), [("lock", "cannot pickle"), ("raises", "no such kernel")])
def test_what_cannot_be_probed_steps_on_dtensors(trouble: str, reason: str) -> None:
    (decision,) = ways_of(Unhealthy([nn.Parameter(torch.randn(8, 5))], trouble))
    assert decision.way is Way.DTENSORS
    assert reason in decision.reason
