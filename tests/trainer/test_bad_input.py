"""Models that cannot be trained are refused on every rank, with an error that says what to do; nothing hangs."""

from __future__ import annotations

import builtins
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from cases import Base, train
from multiprocess import RankError, run_ranks
from test_handover import Small
from torch import Tensor, nn

from lightning_deepcompile import CompileConfig, DeepCompilePrecision, DeepCompileStrategy
from lightning_deepcompile.sharding.checks import check_module


def test_missing_extension_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_deepcompile.runtime import ExtensionNotBuiltError, load_extension

    load_extension.cache_clear()
    monkeypatch.delitem(sys.modules, "lightning_deepcompile._C", raising=False)
    real_import = builtins.__import__
    monkeypatch.setattr(
        "importlib.import_module",
        lambda name, *args: (
            (_ for _ in ()).throw(ImportError("no such file")) if name.endswith("._C") else real_import(name)
        ),
    )
    with pytest.raises(ExtensionNotBuiltError, match=r"setup.py build_ext --inplace"):
        load_extension()
    load_extension.cache_clear()


@pytest.mark.parametrize("precision", ["64-mixed", "transformer-engine", "int8"])
def test_unsupported_precision(precision: str) -> None:
    with pytest.raises(ValueError, match="32-true"):
        DeepCompilePrecision(precision)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"region_backend": "x"}, "region_backend"),
        ({"memory_budget": -1}, "memory_budget"),
        ({"symmetric_memory": 0.5}, "symmetric_memory"),
        ({"symmetric_memory": None}, "symmetric_memory"),
        ({"symmetric_memory": -1}, "symmetric_memory"),
        ({"symmetric_memory": "32 blocks"}, "symmetric_memory"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        CompileConfig(**settings)
    with pytest.raises(ValueError, match="stage"):
        DeepCompileStrategy(stage=4)  # type: ignore[arg-type]


class _Holder(nn.Module):
    def __init__(self, parameter: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.weight = parameter


def _hidden() -> nn.Module:
    module = _Holder(nn.Parameter(torch.ones(2)))
    module.__dict__["kept"] = [module.layer.weight]
    return module


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), ValueError, "lazy"),
        (
            lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)),
            ValueError,
            "Embedding '0'.*sparse=True.*sparse=False",
        ),
        (_hidden, ValueError, "attribute 'kept'"),
    ],
)
def test_models_that_cannot_be_sharded(build: Callable[[], nn.Module], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_module(build())


class _Wrapped(Small):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if not hasattr(self, "done"):
            self.done = True
            fully_shard(self.head)


class _RankDependentModel(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3 + int(os.environ["RANK"]))


class _ReturnsNone(Small):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        return None


class _Lbfgs(Small):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class _Foreign(Small):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


class _RenormsEmbedding(Small):
    def __init__(self) -> None:
        super().__init__()
        self.embed.max_norm = 1.0


REFUSED: dict[str, tuple[type[Base], str]] = {
    "wrapped by fully_shard": (_Wrapped, "already distributed"),
    "different models": (_RankDependentModel, "second.weight"),
    "LBFGS": (_Lbfgs, "LBFGS"),
    "foreign parameters": (_Foreign, "configure_optimizers"),
    "returns None": (_ReturnsNone, "None"),
    "renormalises an embedding": (_RenormsEmbedding, "'embed' was made with max_norm=1.0"),
}


def _refusals() -> dict[str, tuple[str, float]]:
    """The error of every model, on this rank, and the seconds until it came."""
    errors = {}
    with torch._dynamo.config.patch(recompile_limit=3):
        for name, (build, _) in REFUSED.items():
            start = time.monotonic()
            try:
                train(
                    build,
                    DeepCompileStrategy(timeout=timedelta(seconds=60), compile=CompileConfig(region_backend="eager")),
                    world_size=2,
                    rank=int(os.environ["RANK"]),
                    steps=8,
                )
            except Exception as error:
                errors[name] = (f"{type(error).__name__}: {error}", time.monotonic() - start)
    return errors


@pytest.mark.timeout(400)
def test_refusals_reach_every_rank() -> None:
    for rank, errors in enumerate(run_ranks(_refusals, 2, timeout=360)):
        for name, (_, message) in REFUSED.items():
            assert name in errors, f"rank {rank} trained {name!r}"
            text, seconds = errors[name]
            assert message in text, f"rank {rank}, {name!r}: {text}"
            assert seconds < 100, f"rank {rank} needed {seconds:.0f} s to refuse {name!r}"


class _PartingAlone(Small):
    """One rank takes what none has taken before, and the others are inside of a collective when it comes there."""

    count = 2

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.turn = int(batch_idx == 2 and os.environ["RANK"] == "1")

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.one_row
        return self.head(x + (self.layers[0](x) if self.turn else self.layers[1](x)))


def _parts(build: type[Base]) -> tuple[str, float]:
    start = time.monotonic()
    config = CompileConfig(region_backend="eager", schedule=None)
    try:
        train(build, DeepCompileStrategy(compile=config), world_size=2, rank=int(os.environ["RANK"]), steps=6)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", 0.0


def test_a_rank_that_leaves_the_usual_way_does_not_mix_up_what_is_gathered() -> None:
    """Both ways communicate as many bytes."""
    results = run_ranks(_parts, 2, _PartingAlone)
    for text, seconds in results:  # a rank that was inside of a collective by then tells the other's error
        assert "ProgramMismatchError" in text and "layers.0" in text and "layers.1" in text, text
        assert seconds < 60


class _Fails(Small):
    """One rank raises in the middle of training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and os.environ["RANK"] == "1":
            raise ArithmeticError("this rank gives up")


def _fail() -> None:
    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    train(_Fails, strategy, world_size=2, rank=int(os.environ["RANK"]), steps=6)


def test_one_ranks_exception_ends_all() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="this rank gives up") as caught:
        run_ranks(_fail, 2)
    assert "was still running" not in str(caught.value), "the other rank did not notice by itself"
    assert time.monotonic() - start < 150
