"""Everyday modules train as without sharding: compiled, by Inductor, and where their step is not compiled at all."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
from corpus import CASES
from corpus.training import How, assert_trains_alike, reference, train_on_ranks

ALL = "TEST_ALL" in os.environ  # the first test of a group trains all of it
BY_INDUCTOR = ["lstm", "curriculum", *(["resnet", "vit", "gan", "experts, masked"] if ALL else [])]
EAGER = list(CASES) if ALL else [
    "gan", "retained graph", "spectral and weight norm, by hooks", "warm-up by hand", "plateau",
    "one cycle, per step", "accumulated and clipped", "clipped by value", "accumulated by hand", "queue in a buffer",
    "early exit", "numpy in the loss", "statistics of weights", "siren, eikonal", "forces", "meta-learning",
    "autograd functions", "vae", "vae, distributions", "diffusion with an average", "gcn, sparse", "simclr",
    "penalty on all parameters", "clamped in the step", "normalised without gradients", "hooks", "backward hooks",
    "lora", "frozen and freed", "gradients by hand", "ppo", "dqn, target in the step", "gru, packed",
    "scheduled sampling", "bags with offsets", "folds", "ensemble, vmap", "fixed point", "nested modules", "resnet",
    "pooling and dropout",
]  # fmt: skip
UNCOMPILED = list(CASES) if ALL else [
    "gan", "spectral and weight norm, by hooks", "early exit", "siren, eikonal", "meta-learning", "autograd functions",
    "vae, distributions", "gcn, sparse", "simclr", "backward hooks", "lora", "frozen and freed", "gradients by hand",
    "ppo", "lstm", "gru, packed", "bags with offsets", "ensemble, vmap", "fixed point", "nested modules", "resnet",
]  # fmt: skip
GROUP = 14  # modules that share their ranks


def grouped(how: How, names: list[str]) -> list[Any]:
    """Each module with the others that are trained beside it."""
    return [
        pytest.param(name, marks=pytest.mark.xdist_group(f"corpus {how} {number // GROUP}"))
        for number, name in enumerate(names)
    ]


@functools.cache
def _on_ranks(names: tuple[str, ...], how: How) -> dict[str, Any]:
    return train_on_ranks(list(names), how)


def check(request: pytest.FixtureRequest, name: str, how: How) -> None:
    """Trains all chosen modules of the test's group, or takes their results, and compares this one's."""
    group = request.node.get_closest_marker("xdist_group").args
    beside = [
        item.callspec.params["name"]
        for item in request.session.items
        if (marker := item.get_closest_marker("xdist_group")) is not None and marker.args == group
    ]
    case = CASES[name]
    results = _on_ranks(tuple(beside), how)[name]
    if isinstance(results, str):
        pytest.fail(results)
    if case.reference == "ddp":
        whole = _on_ranks(tuple(n for n in beside if CASES[n].reference == "ddp"), "ddp")[name]
        assert not isinstance(whole, str), whole
    else:
        whole = [reference(name)] * 2
    for rank, (actual, expected) in enumerate(zip(results, whole, strict=True)):
        try:
            assert_trains_alike(actual, expected, buffers=case.reference == "single" and case.buffers)
        except AssertionError as error:
            pytest.fail(f"rank {rank}: {error}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", grouped("eager", EAGER))
def test_trains_like_unsharded(name: str, request: pytest.FixtureRequest) -> None:
    check(request, name, "eager")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", grouped("inductor", BY_INDUCTOR))
def test_trains_like_unsharded_with_inductor(name: str, request: pytest.FixtureRequest) -> None:
    check(request, name, "inductor")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", grouped("uncompiled", UNCOMPILED))
def test_trains_like_unsharded_uncompiled(name: str, request: pytest.FixtureRequest) -> None:
    check(request, name, "uncompiled")
