"""Classes that need unsharded tensors step as they would in one process, on any number of ranks."""

from __future__ import annotations

import functools
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import VOCAB, Base, Frozen, Mlp, Record, Tokens, assert_close, assert_same_training, full, gpt, train
from multiprocess import run_ranks
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader

Run = tuple[str, int, int, float | None]  # model and optimizer, stage, micro-batches per step, largest norm

RUNS: dict[int, list[Run]] = {
    2: [("muon", 2, 1, 0.5), ("lars_frozen", 3, 3, 0.5), ("two", 1, 3, None)],
    3: [("muon", 3, 3, 0.5)],
}
if "TEST_ALL" in os.environ:  # the first test of a number of ranks trains all of them
    RUNS[1] = [("lars", 3, 1, None)]
    RUNS[2] += [("muon", 3, 1, None), ("two", 3, 1, None), ("muon", 1, 3, None), ("lars", 3, 3, 0.5)]
    RUNS[3] += [("two", 1, 3, None), ("lars", 2, 1, None), ("lars_frozen", 1, 1, None), ("gpt", 3, 1, None)]


class TwoLayers(Mlp):
    """Two of its layers."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers[2]


class Lars(Optimizer):
    """Steps by the ratio of two norms of each tensor, counts steps in its groups, and keeps states of odd shapes."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "count": 0})
        self.fails = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None or p.numel() == 0:
                    continue
                if self.fails and group["count"] == 3 and p.shape == (VOCAB, 13):
                    raise ArithmeticError("the embedding cannot be stepped on")
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["norms"] = p.new_zeros(3)
                    state["rows"] = p.new_zeros(p.shape[:1])
                ratio = p.norm() / (p.grad.norm() + p.norm() + 1e-3)
                state["norms"][group["count"] % 3] = ratio
                if p.dim():
                    state["rows"].lerp_(p.grad.square().reshape(p.shape[0], -1).mean(1), 0.1)
                state["momentum"].mul_(group["momentum"]).add_(p.grad * (1 + state["norms"].sum()))
                p.add_(state["momentum"], alpha=-float(group["lr"] / (1 + 0.1 * group["count"])))
        return loss


class WithMuon(TwoLayers):
    """Matrices by Muon; nothing else is trained."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() == 2 and parameter.numel() > 0)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.Muon([{"params": matrices[:2]}, {"params": matrices[2:], "lr": 3e-4}], lr=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


class WithLars(TwoLayers):
    """All kinds of parameters, in groups of which one has a single tensor: most ranks own none of it."""

    def configure_optimizers(self) -> Any:
        first, *rest = self.parameters()
        return Lars([{"params": [first]}, {"params": rest, "lr": 0.02}])


class FrozenWithLars(Frozen):
    """Some of the optimizer's parameters are frozen."""

    def configure_optimizers(self) -> Any:
        return Lars(self.parameters())


class TwoOptimizers(TwoLayers):
    """Muon beside AdamW, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        every = self.accumulate
        logits = self.logits(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.manual_backward(loss / every)
        if (batch_idx + 1) % every == 0:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.layers.parameters() if p.dim() == 2]
        rest = [p for p in self.parameters() if all(p is not matrix for matrix in matrices)]
        # It rounds to bf16, so that the last bits of gradients make a difference; a small one here.
        return [torch.optim.Muon(matrices, lr=2e-4), torch.optim.AdamW(rest, lr=1e-3, eps=1e-3)]


class TiedGpt(Base):
    """Tied embeddings, and blocks of several matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.net = gpt(tied=True)().net

    def configure_optimizers(self) -> Any:
        return Lars(self.parameters(), lr=1e-3)


MODELS: dict[str, Callable[[], Base]] = {
    "muon": WithMuon,
    "lars": WithLars,
    "lars_frozen": FrozenWithLars,
    "two": TwoOptimizers,
    "gpt": TiedGpt,
}


def _fit(strategy: Any, run: Run, world_size: int, rank: int, **options: Any) -> Record:
    name, _, accumulate, norm = run

    def build() -> Base:
        module = MODELS[name]()
        module.accumulate = accumulate
        return module

    manual = name == "two"
    if manual:
        options["steps"] = 5 * accumulate
    return train(
        build,
        strategy,
        world_size=world_size,
        rank=rank,
        accumulate=1 if manual else accumulate,
        gradient_clip_val=norm,
        **options,
    )


def _states(trainer: Any) -> Any:
    """Bytes of states of this rank, and what a full state dict holds."""
    held = trainer.optimizers[0].state
    kept = sum(v.nbytes for entries in held.values() for v in entries.values() if isinstance(v, Tensor))
    return kept, [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]


def _train_all(runs: list[Run]) -> dict[Run, Record | str]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    results: dict[Run, Record | str] = {}
    for run in runs:
        strategy = DeepCompileStrategy(stage=run[1], compile=CompileConfig(region_backend="eager"))
        try:
            world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
            results[run] = _fit(strategy, run, world, rank, inspect=_states)
        except Exception:
            results[run] = traceback.format_exc()
    return results


@functools.cache
def _sharded(world_size: int) -> list[dict[Run, Record | str]]:
    return run_ranks(_train_all, world_size, RUNS[world_size])


@pytest.mark.parametrize(
    ("world_size", "run"), [(world, run) for world, runs in RUNS.items() for run in runs], ids=lambda value: str(value)
)
@pytest.mark.xdist_group("owners")
def test_equals_unsharded(world_size: int, run: Run) -> None:
    expected = _fit("auto", run, 1, 0, data_world=world_size, inspect=_states)
    kept = []
    for rank, results in enumerate(_sharded(world_size)):
        actual = results[run]
        if isinstance(actual, str):
            pytest.fail(f"rank {rank}:\n{actual}")
        assert_same_training(actual, expected, params=True)
        kept.append(actual.extra[0])
    _, states = expected.extra
    _assert_same_states(_sharded(world_size)[0][run].extra[1], states)
    # No state is held twice: only those of scalars, which all ranks have, are.
    whole = expected.extra[0]
    assert whole <= sum(kept) <= whole + world_size * 64
    assert max(kept) < whole or world_size == 1


def _assert_same_states(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for index, entries in theirs["state"].items():
            assert ours["state"][index].keys() == entries.keys()
            for key, value in entries.items():
                scale = float(value.abs().max()) if value.numel() else 0.0
                torch.testing.assert_close(ours["state"][index][key], value, rtol=1e-5, atol=1e-5 * scale)


class _Save(pl.Callback):
    """Saves after some steps, in both ways."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            for kind in ("full", "sharded"):
                trainer.strategy._checkpoints.sharded = kind == "sharded"
                trainer.save_checkpoint(self.folder / kind)


def _resume(folder: Path, kind: str | None) -> tuple[list[Any], dict[str, Any]]:
    """Saves after two steps of four, or goes on from there; returns rank 0's states and the parameters in the end."""
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    strategy = DeepCompileStrategy(state_dict_type=kind or "full", compile=CompileConfig(region_backend="eager"))
    saves = kind is None
    torch.manual_seed(3 if saves else 4)
    module = WithLars()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_epochs=1, max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[_Save(folder)] if saves else [],
    )  # fmt: skip
    batches = Tokens(4, 12, rank, world)
    rows = 12 // world
    loader = DataLoader(batches if saves else torch.utils.data.Subset(batches, range(2 * rows, 4 * rows)), rows)
    trainer.fit(module, loader, ckpt_path=None if kind is None else folder / kind)
    assert trainer.global_step == 4
    parameters = {name: full(p) for name, p in module.named_parameters()}
    trainer.strategy._checkpoints.sharded = False
    return [trainer.strategy.optimizer_state(trainer.optimizers[0])], parameters


def test_checkpoints_have_states_of_owners_for_any_number_of_ranks(tmp_path: Path) -> None:
    """Resuming on as many ranks is the same to the bit; on others, whose owners are others, to rounding."""
    saved = run_ranks(_resume, 2, tmp_path, None)[0]
    torch.testing.assert_close(run_ranks(_resume, 2, tmp_path, "sharded")[0], saved, rtol=0, atol=0)
    checkpoint = torch.load(tmp_path / "full", weights_only=True)
    alone = WithLars().configure_optimizers()
    alone.load_state_dict(checkpoint["optimizer_states"][0])  # as one process would have written it
    for parameter in alone.param_groups[1]["params"]:
        if parameter.requires_grad and parameter.dim() and parameter in alone.state:
            assert alone.state[parameter]["momentum"].shape == parameter.shape
            assert alone.state[parameter]["rows"].shape == parameter.shape[:1]
    for world_size, kind in ((1, "sharded"), (3, "full")):
        states, parameters = run_ranks(_resume, world_size, tmp_path, kind)[0]
        _assert_same_states(states, saved[0])
        for name, value in saved[1].items():
            assert_close(parameters[name], value, name)


class Stepped(TwoLayers):
    """Its optimizer has stepped before there was a trainer; states change between steps, of which owners have them."""

    def __init__(self) -> None:
        super().__init__()
        self.early = Lars(self.parameters())
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        self.early.step()
        self.early.zero_grad()

    def configure_optimizers(self) -> Any:
        return self.early

    def on_train_batch_end(self, *args: Any) -> None:
        held = self.optimizers().optimizer.state
        for parameter in list(held):
            assert parameter in set(self.parameters())
            assert held[parameter]["momentum"].shape == parameter.shape
            if parameter.dim():
                held[parameter]["momentum"][:1] = 0


class Grows(TwoLayers):
    """A layer that was frozen is trained from the third step on, in a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return Lars([p for p in self.parameters() if p.requires_grad])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.layers[1].requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.layers[1].parameters()), "lr": 0.01})
            self.optimizers().param_groups[0]["lr"] = 0.03


class Counts(TwoLayers):
    """Its loss is not finite once, on one rank."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        bad = batch_idx == 2 and int(os.environ.get("RANK", 0)) == 1
        return super().training_step(batch, batch_idx) * (float("inf") if bad else 1.0)

    def configure_optimizers(self) -> Any:
        return Lars(self.parameters())


class WithFailure(TwoLayers):
    """Its optimizer fails in training, on the rank that owns the embedding; nothing tells before."""

    def configure_optimizers(self) -> Any:
        self.lars = Lars([self.embed.weight, *self.layers.parameters()])
        return self.lars

    def on_train_start(self) -> None:
        self.lars.fails = True


class OnOneRank(TwoLayers):
    """Ranks hold other parameters."""

    def configure_optimizers(self) -> Any:
        held = list(self.layers.parameters())
        return Lars(held[1:] if os.environ["RANK"] == "1" else held)


USES: dict[str, tuple[type[Mlp], dict[str, Any]]] = {
    "stepped": (Stepped, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate": 2}),
    "grows": (Grows, {}),
}


def _use_all(mesh: tuple[int, int] | None) -> dict[str, Any]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    results: dict[str, Any] = {}
    for name, (build, options) in USES.items():
        strategy = DeepCompileStrategy(device_mesh=mesh, compile=CompileConfig(region_backend="eager"))
        results[name] = train(build, strategy, world_size=world, rank=rank, inspect=_states, **options)
    return results


@pytest.mark.parametrize("mesh", [None, pytest.param((2, 2), marks=pytest.mark.extensive)])
def test_uses_of_optimizers_equal_unsharded_ones(mesh: tuple[int, int] | None) -> None:
    world_size = 2 if mesh is None else 4
    sharded = run_ranks(_use_all, world_size, mesh)
    for name, (build, options) in USES.items():
        expected = train(build, "auto", world_size=1, rank=0, data_world=world_size, inspect=_states, **options)
        for results in sharded:
            assert_same_training(results[name], expected, params=True)
        _assert_same_states(sharded[0][name].extra[1], expected.extra[1])


def _fail(build: Any, precision: Any = None) -> Any:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy
    from lightning_deepcompile.trainer.precision import DeepCompilePrecision

    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    options: dict[str, Any] = {}
    if precision is not None:
        options = {"precision": None, "plugins": [DeepCompilePrecision(precision)]}
    began = time.monotonic()
    try:
        record = train(build, strategy, world_size=world, rank=rank, inspect=lambda t: t.optimizers[0], **options)
    except Exception as error:
        return str(error), time.monotonic() - began
    return record.params, record.extra.param_groups[0]["count"]


def test_a_class_that_raises_on_one_rank_raises_on_all() -> None:
    results = run_ranks(_fail, 2, WithFailure)
    messages = [message for message, _ in results]
    own = [message for message in messages if message.startswith("the embedding cannot")]
    assert len(own) == 1, messages
    failed = [f"rank {rank}" for rank, message in enumerate(messages) if message in own]
    for message in messages:
        assert "the embedding cannot be stepped on" in message, messages
        assert message in own or any(rank in message for rank in failed), messages


def test_ranks_that_hold_other_parameters_are_told_so() -> None:
    for message, _ in run_ranks(_fail, 2, OnOneRank):
        assert "collect layers.0.0." in message and "Ranks must take the same path" in message


def test_a_step_whose_gradients_overflow_on_one_rank_is_skipped_on_all() -> None:
    (first, count), (second, other) = run_ranks(_fail, 2, Counts, "16-mixed")
    assert count == other == 4
    for name, value in first.items():
        assert value.isfinite().all()
        torch.testing.assert_close(value, second[name], rtol=0, atol=0)
