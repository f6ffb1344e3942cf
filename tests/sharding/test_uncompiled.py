"""Code that is not compiled trains as an unsharded process does: every way that parameters come into its hands."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, VOCAB, Base, Mlp, Record, assert_same_training, train
from multiprocess import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

Build = Callable[[], Base]


def uncompiled(build: Build) -> Base:
    module = build()
    module.training_step = torch.compiler.disable(module.training_step)
    return module


class Penalties(Mlp):
    """Parameters in hand: through an attribute, from `parameters()`, in arithmetic and in methods."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss = loss + 1e-3 * sum(p.abs().sum() for p in self.parameters() if p.numel())
        for name, p in self.named_parameters():
            if p.dim() == 2 and "layers" in name:
                loss = loss + 1e-2 * torch.linalg.matrix_norm(p - p.mean()) ** 2
        weight = self.head.weight
        assert weight.requires_grad and weight.is_leaf and isinstance(weight, nn.Parameter)
        assert tuple(weight.shape) == (61, 13) and weight.dtype == torch.float32
        return loss + (weight.T @ weight).trace() * 1e-3 + F.linear(weight, self.layers[0][0].weight).square().mean()


class Writes(Mlp):
    """Parameters are changed while the step runs, before and after they are used."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.layers[0][0].weight.data.mul_(0.5)
        before = super().training_step(batch, batch_idx)
        self.layers[1][0].weight.data.copy_(self.layers[1][0].weight.data.flip(0))
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
            self.layers[2][2].weight[3] = 0.25
            self.one_row.add_(0.1)
        for p in self.layers[2].parameters():
            p.data.lerp_(torch.ones_like(p), 0.1)
        return super().training_step(batch, batch_idx) + before.detach()


class CopiesStateDict(Mlp):
    """Copies a state dict, as a target network is updated."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.layers[1].load_state_dict(self.layers[0].state_dict())
        return super().training_step(batch, batch_idx)


class Counter(Mlp):
    """Every step looks different to the compiler."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.tag = f"batch {batch_idx}"

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * len(self.tag + "x")


class Mixed(Mlp):
    """Compiled and uncompiled code take turns, and use the same parameters."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.one_row
        x = x + self.layers[0](x)
        x = x + self.python(x)
        x = x + self.layers[2](x) + self.layers[1](x)
        return self.head(x)

    @torch.compiler.disable
    def python(self, x: Tensor) -> Tensor:
        return self.layers[1](x) + F.linear(x, self.layers[0][0].weight[:13]) + self.layers[1](x).detach()


class Hooked(Mlp):
    """Hooks of modules, of which one replaces the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
        self.head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.layers[1][0].register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 2.0,))


class Reentrant(Mlp):
    """Both kinds of activation checkpointing."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.one_row
        for index, layer in enumerate(self.layers):
            x = x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=index == 1)
        return self.head(x)


BUILDS: dict[str, Build] = {
    **{name: CASES[name] for name in ("mlp", "frozen", "recurrent", "normed", "gpt_tied", "llama_checkpointing")},
    "penalties": Penalties,
    "writes": Writes,
    "copies_state_dict": CopiesStateDict,
    "counter": Counter,
    "mixed": Mixed,
    "hooked": Hooked,
    "reentrant": Reentrant,
}
SETTINGS: dict[str, dict[str, Any]] = {  # of the Trainer
    "clip by norm": {"gradient_clip_val": 0.05},
    "clip by value": {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
}
COMPILE: dict[str, dict[str, Any]] = {
    "hosted": {"offload": ["parameters"]},
    "all hosted": {"offload": ["parameters", "states"]},
}
# (whether nothing is compiled at all, or what falls back by itself, case, micro-batches per step, stage, settings)
Run = tuple[bool, str, int, int, str]
RUNS: dict[int, list[Run]] = {
    1: [(True, "writes", 1, 3, "")],
    2: [
        *[(True, name, 1, 3, "") for name in BUILDS if name not in ("counter", "mixed")],
        *[(True, "mlp", 3, 3, setting) for setting in ("clip by norm", "all hosted")],
        (True, "mlp", 3, 1, ""),
        (True, "gpt_tied", 3, 2, ""),
        (False, "writes", 1, 3, ""),
        (False, "copies_state_dict", 1, 3, ""),
        (False, "mixed", 3, 2, ""),
        (False, "mixed", 1, 3, "all hosted"),
    ],
    3: [(True, "writes", 3, 3, "")],
    4: [(True, "mlp", 3, 2, "")],
}
if "TEST_ALL" in os.environ:  # the first test of a number of ranks trains all of them
    RUNS[1] += [(True, "mlp", 1, 3, ""), (False, "penalties", 1, 3, "")]
    RUNS[2] += [(False, name, 1, 3, "") for name in ("penalties", "counter", "mixed", "hooked")]
    RUNS[2] += [(True, "mlp", 3, stage, "") for stage in (2, 3)]
    RUNS[2] += [(True, "writes", 3, stage, "") for stage in (1, 2, 3)]
    RUNS[2] += [(True, "gpt_tied", 3, 1, "")]
    RUNS[2] += [(True, "gpt_tied", 3, 3, setting) for setting in ("", *SETTINGS, *COMPILE)]
    RUNS[2] += [(True, "mlp", 3, 3, setting) for setting in ("clip by value", "hosted")]
    RUNS[2] += [(False, "mixed", 3, 1, ""), *[(False, "writes", 3, stage, "") for stage in (1, 2)]]
    RUNS[2] += [(False, "mixed", 1, 3, setting) for setting in (*SETTINGS, "hosted")]
    RUNS[3] += [(True, "mlp", 1, 3, ""), *[(False, name, 1, 3, "") for name in ("mixed", "writes")]]
    RUNS[4] += [(True, "gpt_tied", 3, 2, ""), (False, "mixed", 3, 3, "clip by norm"), (True, "mlp", 1, 3, "")]


def _train_all(runs: list[Run]) -> dict[Run, Record | str]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    results: dict[Run, Record | str] = {}
    for run in runs:
        forced, case, accumulate, stage, setting = run
        build = functools.partial(uncompiled, BUILDS[case]) if forced else BUILDS[case]
        config = CompileConfig(region_backend="eager", **COMPILE.get(setting, {}))
        strategy = DeepCompileStrategy(stage=stage, compile=config)
        # Of so few compilations, models that come later find those of earlier ones in the functions that they share.
        with torch._dynamo.config.patch(recompile_limit=3):
            try:
                results[run] = train(
                    build,
                    strategy,
                    world_size=int(os.environ["WORLD_SIZE"]),
                    rank=int(os.environ["RANK"]),
                    accumulate=accumulate,
                    inspect=lambda trainer: trainer.strategy.summary(),
                    **SETTINGS.get(setting, {}),
                )
            except Exception:
                results[run] = traceback.format_exc()
    return results


@functools.cache
def _sharded(world_size: int) -> list[dict[Run, Record | str]]:
    return run_ranks(_train_all, world_size, RUNS[world_size], timeout=420)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "run"), [(world, run) for world, runs in RUNS.items() for run in runs], ids=lambda value: str(value)
)
@pytest.mark.xdist_group("uncompiled")
def test_equals_unsharded(world_size: int, run: Run) -> None:
    _, case, accumulate, _, setting = run
    expected = train(
        BUILDS[case],
        "auto",
        world_size=1,
        rank=0,
        data_world=world_size,
        accumulate=accumulate,
        **SETTINGS.get(setting, {}),
    )
    for rank, results in enumerate(_sharded(world_size)):
        actual = results[run]
        if isinstance(actual, str):
            pytest.fail(f"rank {rank}:\n{actual}")
        assert_same_training(actual, expected, params=True)
        assert actual.extra.uncompiled


class Convolutional(Base):
    """Batch norm in half precision, whose statistics stay in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(VOCAB, 16, 1), nn.BatchNorm1d(16), nn.GELU(), nn.Conv1d(16, VOCAB, 1))

    def logits(self, tokens: Tensor) -> Tensor:
        return self.net(F.one_hot(tokens, VOCAB).float().transpose(1, 2)).transpose(1, 2)


def _train_mixed() -> tuple[Record, Record]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    options: dict[str, Any] = {"world_size": 1, "rank": 0, "precision": "bf16-mixed", "steps": 4}
    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    ours = train(functools.partial(uncompiled, Convolutional), strategy, **options)
    return ours, train(Convolutional, "auto", **options)


def test_batch_norm_in_mixed_precision_is_autocasts() -> None:
    ((record, expected),) = run_ranks(_train_mixed, 1)
    assert_same_training(record, expected, params=True)
