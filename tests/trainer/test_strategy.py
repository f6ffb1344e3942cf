"""Uses of a strategy besides `training_step`: manual optimization, hooks, clipping, freezing."""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import VOCAB, Tokens, assert_close, full
from frames import host_frames
from multiprocess import run_ranks
from test_handover import Small, trainer_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompilePrecision, DeepCompileStrategy

WORLD, ROWS = 2, 2


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class Gan(pl.LightningModule):
    """Two optimizers that take turns; the generator's loss runs through the discriminator, whose weights rest."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.embed = nn.Embedding(VOCAB, 6)
        self.generator = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
        self.losses: list[Tensor] = []

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        generator = [*self.embed.parameters(), *self.generator.parameters()]
        return [torch.optim.SGD(generator, lr=0.3), torch.optim.SGD(self.discriminator.parameters(), lr=0.2)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        real = F.one_hot(batch[:, 1:] % 6, 6).float()

        self.toggle_optimizer(first)
        fake = self.generator(self.embed(batch[:, :-1]))
        loss = F.softplus(-self.discriminator(fake)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)

        with torch.no_grad():
            fake = self.generator(self.embed(batch[:, :-1]))  # with the weights of after the step
        score = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        self.manual_backward(score)
        second.step()
        second.zero_grad()
        self.log("loss", loss)
        self.log("score", score)


class ManualAccumulation(Small):
    """Manual optimization that steps every second batch, with a learning-rate schedule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


class ClipInHook(Small):
    """Hooks see whole-model gradients under the parameters that ``self.parameters()`` gives, and replace some."""

    def on_after_backward(self) -> None:
        assert self.head.weight.grad is not None and self.head.weight.grad.shape == self.head.weight.shape
        self.head.weight.grad = self.head.weight.grad * 0.25

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        ours = set(self.parameters())
        assert all(p in ours for group in optimizer.param_groups for p in group["params"])
        self.head.weight.grad.mul_(0.5)
        self.norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Groups(Small):
    """Two groups, weight decay, a schedule, state of several kinds."""

    def configure_optimizers(self) -> Any:
        head = list(self.head.parameters())
        rest = [p for p in self.parameters() if all(p is not h for h in head)]
        optimizer = torch.optim.SGD(
            [{"params": head, "lr": 0.05, "weight_decay": 0.1}, {"params": rest}], lr=0.1, momentum=0.8
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7), "interval": "step"},
        }


class Unfreezing(Small):
    """A layer that is frozen at first joins later, with a group of its own; another one leaves."""

    count = 2

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.layers[0].requires_grad_(True)
            self.optimizers(use_pl_optimizer=False).add_param_group({"params": list(self.layers[0].parameters())})
        if batch_idx == 3:
            self.layers[1].requires_grad_(False)


class RawOptimizer(Small):
    """Steps the optimizer, with a closure, and its scheduler by hand; each other time without Lightning's wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=batch_idx % 2 == 0)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = Small.training_step(self, batch, batch_idx)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure) if batch_idx % 3 else optimizer.step(closure)
        self.lr_schedulers().step()

    def on_train_end(self) -> None:
        optimizer, scheduler = self.trainer.optimizers[0], self.trainer.lr_scheduler_configs[0].scheduler
        assert hasattr(vars(optimizer)["step"], "_wrapped_by_lr_sched") and "step" not in vars(scheduler)


class CallsInHooks(Small):
    """Runs parts of the model between steps, looks at whole parameters, and changes some."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        with torch.no_grad():
            hidden = self.layers[0](self.embed(batch))
            whole = self.trainer.strategy.full_parameters if world() > 1 else contextlib.nullcontext
            with whole():
                assert type(self.head.weight) is nn.Parameter and self.head.weight.shape == (VOCAB, 13)
                self.head.weight[batch_idx] *= 1.5
                self.head.bias += self.head(hidden).mean() * 0 + self.head.weight.sum() * 0.01


def compiled() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.compile(Small())


class AccumulatesByHand(Small):
    """Accumulates under `toggle_model(sync_grad=False)`, starts over once, and clips by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = batch_idx % 3 == 2
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch_idx == 3:
                optimizer.zero_grad()
            if last:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()


class Gathering(Small):
    """Communicates in the step: compares its rows with those of all ranks, asks the strategy for means and objects."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mine = F.normalize(self.logits(batch[:, :-1]).mean(1), dim=-1)
        everyone = self.all_gather(mine, sync_grads=True).view(-1, VOCAB)
        loss = (mine @ everyone.T).exp().sum(1).log().mean()
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
        self.trainer.strategy.barrier()
        factor = self.trainer.strategy.broadcast(1.5)
        return loss * factor * (1 + 0.1 * mean)


# The model; what the Trainer, and what the strategy is made with.
SCENARIOS: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "gan": (Gan, {}, {}),
    "manual accumulation": (ManualAccumulation, {}, {}),
    "clip in a hook": (ClipInHook, {}, {}),
    "groups, checkpointed layers": (Groups, {}, {"activation_checkpointing_policy": {nn.Sequential}}),
    "unfreezing": (Unfreezing, {}, {}),
    "raw optimizer": (RawOptimizer, {}, {}),
    "compiled by the user, clipped": (compiled, {"gradient_clip_val": 0.05}, {}),
    "calls in hooks, stage 2": (CallsInHooks, {}, {"sharding_strategy": "SHARD_GRAD_OP"}),
    "collectives in the step": (Gathering, {}, {}),
    "accumulated by hand, stage 1": (AccumulatesByHand, {}, {"stage": 1}),
}
FUSED = [True]
if "TEST_ALL" in os.environ:  # the first test trains all of them
    SCENARIOS |= {
        "clip by value": (Small, {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}, {}),
        "accumulated, stage 1": (Small, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"stage": 1}),
        "accumulated by hand, stage 3": (AccumulatesByHand, {}, {}),
        "gan, stage 2": (Gan, {}, {"stage": 2}),
        "unfreezing, stage 1": (Unfreezing, {}, {"stage": 1}),
        "calls in hooks": (CallsInHooks, {}, {}),
    }
    FUSED += [False]


def _fit(name: str, strategy: Any, world: int, rank: int) -> dict[str, Tensor]:
    build, options, _ = SCENARIOS[name]
    torch.manual_seed(5)
    module = (
        Small() if build is compiled and strategy == "auto" else build()
    )  # Lightning alone cannot compile `self.log`
    trainer = trainer_of(strategy, **options)
    rows = ROWS * WORLD
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*optimizer.step")  # of schedulers
        trainer.fit(module, DataLoader(Tokens(6, rows, rank, world), batch_size=rows // world))
    return {name.removeprefix("_orig_mod."): full(p) for name, p in module.named_parameters()}


Ranks = list[tuple[dict[str, dict[str, Tensor] | str], dict[str, list[str]], dict[bool, tuple[list[bool], float]]]]


def _fit_all() -> tuple[dict[str, dict[str, Tensor] | str], dict[str, list[str]], dict[bool, tuple[list[bool], float]]]:
    """Parameters after each training, or its error; functions of the host that Dynamo compiled; skipped steps."""
    results: dict[str, dict[str, Tensor] | str] = {}
    frames: dict[str, list[str]] = {}
    for name in SCENARIOS:
        try:
            fallback = "warn" if "gan" in name else "error"  # its step computes tensors of two backward passes
            config = CompileConfig(region_backend="eager", fallback=fallback)
            strategy = DeepCompileStrategy(**SCENARIOS[name][2], compile=config)
            results[name] = _fit(name, strategy, WORLD, int(os.environ["RANK"]))
        except Exception:
            results[name] = traceback.format_exc()
        frames[name] = host_frames()
    return results, frames, {fused: _overflow(fused) for fused in FUSED}


@pytest.fixture(scope="module")
def sharded() -> Ranks:
    return run_ranks(_fit_all, WORLD, timeout=280)


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("strategy")
@pytest.mark.parametrize("name", SCENARIOS)
def test_equals_a_single_process(name: str, sharded: Ranks) -> None:
    expected = _fit(name, "auto", 1, 0)
    for rank, (results, frames, _) in enumerate(sharded):
        assert frames[name] == [], "behind a graph break, Dynamo compiles functions of the package, or optimizers"
        actual = results[name]
        assert not isinstance(actual, str), f"rank {rank}:\n{actual}"
        for key, value in expected.items():
            assert_close(actual[key], value, f"rank {rank}, {key}")


class Overflow(Small):
    """One rank's loss overflows once; every rank must skip that step, and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (float("inf") if batch_idx == 2 and os.environ["RANK"] == "1" else 1.0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.history.append(full(self.head.weight))


def _overflow(fused: bool) -> tuple[list[bool], float]:
    Overflow.configure_optimizers = lambda self: torch.optim.AdamW(self.parameters(), lr=1e-2, fused=fused)
    torch.manual_seed(5)
    module = Overflow()
    plugin = DeepCompilePrecision("16-mixed")
    strategy = DeepCompileStrategy(precision_plugin=plugin, compile=CompileConfig(region_backend="eager"))
    trainer = trainer_of(strategy, gradient_clip_val=1.0)
    trainer.fit(module, DataLoader(Tokens(5, ROWS * WORLD, int(os.environ["RANK"]), WORLD), batch_size=ROWS))
    moved = [not torch.equal(a, b) for a, b in zip(module.history, module.history[1:], strict=False)]
    assert all(bool(h.isfinite().all()) for h in module.history)
    return moved, plugin.scaler.get_scale()


@pytest.mark.xdist_group("strategy")
@pytest.mark.parametrize("fused", FUSED)
def test_ranks_skip_a_step_together(fused: bool, sharded: Ranks) -> None:
    for _, _, skipped in sharded:
        moved, scale = skipped[fused]
        assert moved == [True, False, True, True]
        assert scale == 2.0**15
