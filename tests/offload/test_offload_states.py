"""Optimizer states in host memory: the same training to the last bit, whatever leaves, and memory that comes back."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import ONLY, VOCAB, Base, Tokens, full
from multiprocess import run_ranks
from shuffle import Clear, Meddle, TravelStates
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompilePrecision, DeepCompileStrategy

WORLD, ROWS, WIDTH, STEPS = 2, 2, 64, 4
CHUNK = 25_000  # bytes; the states of a layer's weight take 16384, or 24576 with amsgrad

Make = Callable[[list[nn.Parameter]], Optimizer]


class Watched(AdamW):
    """Knows how much of its state was on the device at once; steps as subclasses do, through its base."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.present: list[int] = []

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"] if self.present and p in self.state):
            self.state[p]["exp_avg"] = self.state[p]["exp_avg"].detach()  # another object over the same memory
        tensors = [v for entries in self.state.values() for v in entries.values() if v.dim()]
        # What waits in host memory lies in slabs, which are not theirs to resize.
        self.present.append(sum(t.nbytes for t in tensors if t.untyped_storage().resizable()))
        return result


def two_groups(parameters: list[nn.Parameter]) -> Optimizer:
    groups = [{"params": parameters[:3], "lr": 0.05, "momentum": 0.0}, {"params": parameters[3:], "weight_decay": 0.1}]
    return SGD(groups, lr=0.1, momentum=0.9)


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "adamw_loop": (lambda p: Watched(p, 1e-2, foreach=False), {}),
    "adamw_foreach": (lambda p: AdamW(p, 1e-2, foreach=True), {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "adamw_fused": (lambda p: AdamW(p, 1e-2, fused=True, amsgrad=True), {"gradient_clip_val": 0.1}),
    "sgd_two_groups": (two_groups, {}),
    "bf16_true": (lambda p: AdamW(p, 1e-2), {"precision": "bf16-true"}),
    "scaler": (lambda p: AdamW(p, 1e-2), {}),
    "scaler_fused": (lambda p: AdamW(p, 1e-2, fused=True), {}),
}


class Model(Base):
    """Parameters of several sizes, one without a gradient and one that is replicated; counts hooks of its optimizer."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Linear(WIDTH, 3)
        self.calls = {"before": 0, "after": 0}
        self.overflow = False
        self.losses: list[float] = []  # of manual optimization

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.overflow:
            loss = loss * torch.where(batch[0, 0] >= 0, float("inf") if batch_idx == 2 else 1.0, 1.0)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(list(self.parameters()))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self.calls["before"] += 1

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self.calls["after"] += 1
            if type(optimizer) in (SGD, AdamW):  # for a step of a base class PyTorch calls hooks inside of the step
                assert {p for group in optimizer.param_groups for p in group["params"]} == set(self.parameters())

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Recorder(pl.Callback):
    def __init__(self, save: Path | None = None) -> None:
        self.losses: list[float] = []
        self.save = save

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        if "loss" in outputs:
            self.losses.append(float(outputs["loss"]))
        if self.save is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.save)
            self.save = None  # once, with no gradients added up


def fit(
    case: str,
    offload: dict[str, Any],
    *,
    save: Path | None = None,
    resume: Path | None = None,
    strategy: dict[str, Any] | None = None,
    build: Callable[[], Model] | None = None,
    watch: pl.Callback | None = None,
    steps: int = STEPS,
) -> tuple[dict[str, Any], pl.Trainer]:
    """Trains; returns everything that must not depend on where states live."""
    make, options = CASES[case]
    torch.manual_seed(3)
    module = build() if build is not None else Model(make)
    module.overflow = "scaler" in case
    recorder = Recorder(save)
    # Lightning makes bf16-mixed of `precision="16-mixed"` on a CPU.
    plugin = DeepCompilePrecision("16-mixed") if module.overflow else None
    trainer = pl.Trainer(
        strategy=DeepCompileStrategy(
            compile=CompileConfig(**{"region_backend": "eager", **ONLY, **offload}), precision_plugin=plugin,
            **(strategy or {}),
        ),
        accelerator="cpu", devices=WORLD, max_steps=steps, callbacks=[recorder, *filter(None, [watch])], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **options,
    )  # fmt: skip
    batches = steps * options.get("accumulate_grad_batches", 1) + 1
    data = Tokens(batches, ROWS * WORLD, int(os.environ["RANK"]), WORLD)
    done = 2 * ROWS * options.get("accumulate_grad_batches", 1)
    data.data = data.data.roll(-done, 0) if resume is not None else data.data
    trainer.fit(module, DataLoader(data, batch_size=ROWS), ckpt_path=resume)
    trainer.strategy._checkpoints.sharded = False  # states as one process has them
    packed = trainer.strategy.optimizer_state(trainer.optimizers[0])
    states = {f"{i}.{k}": v for i, s in packed.get("state", {}).items() for k, v in s.items()}
    params = {name: full(p) for name, p in module.named_parameters()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in packed.get("param_groups", [])]
    seen = {"losses": recorder.losses or module.losses, "calls": module.calls, "groups": groups}
    return {**seen, **params, **states}, trainer


def same(actual: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    assert actual.keys() == expected.keys() and len(expected["losses"]) > 0, name
    for key, value in expected.items():
        equal = torch.equal(actual[key], value) if isinstance(value, Tensor) else actual[key] == value
        assert equal, f"{name}: {key} is {actual[key]} instead of {value}"


EVERYTHING = {"offload": ["states"]}


def some_leave(plain: pl.Trainer) -> dict[str, Any]:
    """Settings with which a part must leave: AdamW's states are twice the parameters, gradients once."""
    shards = plain.strategy.summary().sharded_bytes_per_rank
    schedule = [{"step": 0, "passes": ["zero3", "prefetch"]}]
    return {"offload": "auto", "memory_budget": f"{int(3.7 * shards)}B", "schedule": schedule}


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the most parameters for which an optimizer makes denominators at a time."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._foreach_sqrt.default:
            self.most = max(self.most, sum(one.nbytes for one in result))
        return result


class InLists(Model):
    """Its optimizer steps on lists, and counts what it makes besides its states."""

    def __init__(self) -> None:
        super().__init__(lambda p: AdamW(p, 1e-2, foreach=True))
        self.largest = Largest()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        with self.largest:
            super().optimizer_step(*args, **kwargs)


def _divided() -> None:
    """Divides a step that takes too much besides states on all parameters at once; no state leaves."""
    expected, plain = fit("adamw_foreach", {}, build=InLists, strategy={"stage": 2})
    summary = plain.strategy.summary()
    shards, whole = summary.sharded_bytes_per_rank, plain.lightning_module.largest.most
    assert whole > 0.9 * shards  # as large as all that is stepped
    for factor, divided in [(4.6, True)] + [(6.0, False)] * ("TEST_ALL" in os.environ):  # shards, gradients, states: 4
        settings = {"offload": "auto", "memory_budget": f"{int(factor * shards)}B"}
        actual, trainer = fit("adamw_foreach", settings, build=InLists, strategy={"stage": 2})
        same(actual, expected, f"divided: {divided}")
        largest = trainer.lightning_module.largest.most
        assert largest <= whole / 2 if divided else largest == whole, (largest, whole)
        assert trainer.strategy.summary().offloaded_bytes == 0


def test_a_step_that_takes_much_besides_is_divided() -> None:
    run_ranks(_divided, WORLD, timeout=180)


EVERYDAY = ["adamw_loop", "scaler_fused"]
"""Of the cases, those that run with every change; `_resumed` has another one."""


def _equal_training() -> dict[str, str]:
    failures = {}
    for case in CASES if "TEST_ALL" in os.environ else EVERYDAY:
        try:
            expected, plain = fit(case, {})
            assert plain.strategy.summary().offload_reason == ""
            for mode in ("all", "auto") if case == "adamw_loop" else ("all",):
                actual, trainer = fit(case, EVERYTHING if mode == "all" else some_leave(plain))
                same(actual, expected, f"{case}, {mode}")
                check_counters(case, mode, plain, trainer)
            if case == "adamw_loop" or "TEST_ALL" in os.environ:
                watch = TravelStates()
                actual, trainer = fit(case, EVERYTHING, watch=watch)
                same(actual, expected, f"{case}, states copied by programs")
                assert max(watch.chunks) > 0
        except Exception:
            failures[case] = traceback.format_exc()
    return failures


def check_counters(case: str, mode: str, plain: pl.Trainer, trainer: pl.Trainer) -> None:
    summary, stats = trainer.strategy.summary(), trainer.strategy.engine.runtime.stats()
    steps = STEPS - (case == "scaler")  # a fused optimizer is called, and skips by itself
    states = [v for s in plain.optimizers[0].state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
    total = sum(t.nbytes if not hasattr(t, "to_local") else t.to_local().nbytes for t in states)
    assert (stats["host_bytes"], stats["state_bytes"]) == (0, 0), stats  # freed at teardown
    if mode == "all":
        assert summary.offloaded_bytes == total
        assert summary.offload_moved_bytes == 2 * total
        assert stats["offloaded_bytes"] == total * steps and stats["reloaded_bytes"] == total * (steps - 1)
        # In the first step they come into being chunk by chunk.
        # What an optimizer puts into memory of its own leaves from there, besides the three buffers.
        assert 0 < stats["state_peak_bytes"] <= (5 if case == "adamw_loop" else 3) * CHUNK
        if case == "adamw_loop":
            assert 0 < max(trainer.optimizers[0].present) <= CHUNK < total / 3
        assert "offloaded states" in str(summary)
    else:
        assert 0.2 * total < summary.offloaded_bytes < 0.9 * total, (summary, total)
        assert "may be allocated" in summary.offload_reason


@pytest.mark.timeout(400)
def test_training_is_the_same_to_the_last_bit() -> None:
    for rank, failures in enumerate(run_ranks(_equal_training, WORLD, timeout=380)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures.values())


def _resumed(folder: Path) -> None:
    """A checkpoint is the same wherever the states were, and goes on the same wherever they go."""
    expected, plain = fit("adamw_foreach", {}, save=folder / "plain.ckpt")
    some = some_leave(plain)
    actual, trainer = fit("adamw_foreach", EVERYTHING, save=folder / "all.ckpt")
    same(actual, expected, "all")
    check_counters("adamw_foreach", "all", plain, trainer)
    actual, _ = fit("adamw_foreach", some, save=folder / "some.ckpt", strategy={"state_dict_type": "sharded"})
    same(actual, expected, "some")
    for name, settings in (("plain", EVERYTHING), ("some", some)):
        record, trainer = fit("adamw_foreach", settings, resume=folder / f"{name}.ckpt")
        assert record.keys() == expected.keys() and record["groups"] == expected["groups"]
        for key, value in expected.items():  # as uninterrupted training ends: the data go on where they were
            assert not isinstance(value, Tensor) or torch.equal(record[key], value), (name, key)
        assert trainer.strategy.summary().offloaded_bytes > 0
        assert trainer.strategy.engine.runtime.stats()["host_bytes"] == 0
    if int(os.environ["RANK"]) == 0:
        saved = [torch.load(folder / f"{name}.ckpt") for name in ("plain", "all")]
        for key in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(*(checkpoint[key] for checkpoint in saved), rtol=0, atol=0)


@pytest.mark.timeout(300)
def test_checkpoints_do_not_depend_on_where_states_are(tmp_path: Path) -> None:
    run_ranks(_resumed, WORLD, tmp_path, timeout=280)


class Small(Model):
    """A single layer."""

    def __init__(self, make: Make = CASES["adamw_loop"][0]) -> None:
        super().__init__(make)
        del self.layers[1:]


class TwoOptimizers(Model):
    """Manual optimization, a closure, and two optimizers; all states of the first leave and some of the second."""

    def __init__(self) -> None:
        super().__init__(lambda p: AdamW(p))
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first = [*self.embed.parameters(), *self.layers[:2].parameters()]
        second = [*self.layers[2:].parameters(), *self.head.parameters()]
        return [AdamW(first, 1e-2), SGD(second, 0.1, momentum=0.9, nesterov=True)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers(use_pl_optimizer=batch_idx % 2 == 0)

        def closure() -> Tensor:
            first.zero_grad()
            loss = Base.training_step(self, batch, batch_idx)
            self.manual_backward(loss)
            return loss

        self.losses.append(float(first.step(closure=closure)))
        second.step()
        second.zero_grad()
        first.state_dict() if batch_idx == 1 else None  # may be asked for at any time


def _bytes(state: Tensor) -> int:
    return (state.to_local() if isinstance(state, DTensor) else state).nbytes


def _manual() -> None:
    expected, plain = fit("adamw_loop", {}, build=TwoOptimizers)
    shards = plain.strategy.summary().sharded_bytes_per_rank
    settings = {**some_leave(plain), "memory_budget": f"{int(3.3 * shards)}B"}
    actual, trainer = fit("adamw_loop", settings, build=TwoOptimizers)
    same(actual, expected, "manual")
    first, second = (sum(_bytes(v) for s in o.state.values() for v in s.values() if v.dim()) for o in plain.optimizers)
    summary = trainer.strategy.summary()
    assert 0 < summary.offloaded_bytes < first + second
    assert summary.offloaded_bytes + summary.offloaded_parameter_bytes > first, "of both, or parameters as well"


def _refused() -> None:
    """Unsupported uses are reported on all ranks, before training starts or in its first step."""

    class Counting(SGD):
        count = 0

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            return super().step(closure)

    class Coupled(SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for group in self.param_groups:
                group["lr"] = 0.1 / (1 + len(group["params"]))
            return loss

    class Global(AdamW):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            self.state["norm"] = torch.zeros(3)
            return loss

    class NoClosure(SGD):
        def step(self) -> None:
            super().step()

    class Twice(SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                closure()
            return super().step(closure)

    for make, settings, message in (
        (lambda p: Counting(p, 0.1), EVERYTHING, r"its attributes \['count'\] change"),
        (lambda p: Global(p, 0.1), EVERYTHING, "state that belongs to no parameter .'norm'"),
        (lambda p: NoClosure(p, 0.1), EVERYTHING, "takes no closure"),
        (lambda p: Coupled(p, 0.1, momentum=0.9), EVERYTHING, r"changes \['lr'\] of its parameter group 0"),
        (lambda p: Twice(p, 0.1, momentum=0.9), EVERYTHING, "closure more than once"),
        (lambda p: AdamW(p), {**EVERYTHING, "host_memory_budget": "100kB"}, "states of [0-9]+ bytes .* every rank"),
        (lambda p: AdamW(p), {"offload": "auto", "memory_budget": "60kB"}, "a step still needs [0-9]+"),
        (
            lambda p: AdamW(p),
            {"offload": "auto", "memory_budget": "185kB", "host_memory_budget": "2kB"},
            "gives each rank 1000 bytes of host memory",
        ),
    ):
        try:
            fit("adamw_loop", settings, build=partial(Model if "memory" in str(settings) else Small, make))
        except (ValueError, RuntimeError) as error:
            assert re.search(message, str(error)), (message, str(error))
        else:
            raise AssertionError(f"nothing was raised instead of {message!r}")


class Begun(pl.Callback):
    """Notes that a first step has begun."""

    batches = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.batches += 1


def _owners_refused() -> None:
    """States of tensors that owner ranks step on cannot leave: an error before the first step says so."""

    def muon(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in parameters if p.dim() == 2 and p.numel() > 0])

    for setting in ("all", ["states"]):
        begun = Begun()
        try:
            fit("adamw_loop", {"offload": setting}, build=partial(Small, muon), watch=begun)
        except ValueError as error:
            assert f"CompileConfig(offload={setting!r}): states of Muon on owner ranks (" in str(error), str(error)
            assert "stay on the device. Use offload='auto', 'none' or a list without 'states'" in str(error)
        else:
            raise AssertionError(f"offload={setting!r} was not refused")
        assert begun.batches == 0
    begun = Begun()
    fit("adamw_loop", {"offload": ["activations", "parameters"]}, build=partial(Small, muon), watch=begun)
    assert begun.batches > 0


def _roomy() -> None:
    """States that fit stay on the device, and nothing is copied."""
    _, trainer = fit("adamw_loop", {"offload": "auto"}, strategy={"cpu_offload": True}, build=Small)
    assert trainer.strategy.summary().offload_reason == "", "nothing is in charge of them"
    stats = trainer.strategy.engine.runtime.stats
    assert stats()["offloaded_bytes"] == 0


def _again() -> None:
    """A second fit with the same strategy starts with new optimizers; nothing of the first is left."""
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            seen.append(trainer.strategy.engine.runtime.stats()["host_bytes"])

    _, trainer = fit("adamw_loop", EVERYTHING, build=Small, watch=Look())
    module = trainer.lightning_module
    optimizer = trainer.optimizers[0]
    trainer.fit_loop.epoch_loop.max_steps += 1
    trainer.fit(module, DataLoader(Tokens(4, ROWS * WORLD, int(os.environ["RANK"]), WORLD), batch_size=ROWS))
    assert trainer.strategy.engine.runtime.stats()["host_bytes"] == 0
    assert len(seen) == STEPS + 1 and seen[-1] == seen[-2] > 0, seen
    assert trainer.optimizers[0] is not optimizer and all(len(s) == 3 for s in optimizer.state.values())


class MeddleAndClear(Meddle, Clear):
    """Changes states that programs have fetched, and drops all of them before every second step."""


def _meddled() -> None:
    expected, _ = fit("adamw_foreach", {}, watch=MeddleAndClear())
    watch = MeddleAndClear()
    actual, _ = fit("adamw_foreach", EVERYTHING, watch=watch)
    same(actual, expected, "meddled")
    assert max(watch.chunks) > 0


class Reset(pl.Callback):
    """Drops all states before each step but the first, as low-rank updates that start anew do."""

    def __init__(self) -> None:
        self.host_bytes: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.optimizers[0].state.clear()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.host_bytes.append(trainer.strategy.engine.runtime.stats()["host_bytes"])


class Wide(Small):
    """States of more than a slab of host memory."""

    def __init__(self) -> None:
        super().__init__(CASES["adamw_foreach"][0])
        self.layers.append(nn.Sequential(nn.Linear(WIDTH, 2048), nn.Linear(2048, WIDTH)))


def _reset() -> None:
    """Host memory of states that are dropped is that of the next ones."""
    expected, _ = fit("adamw_foreach", {}, build=Wide, watch=Reset(), steps=11)
    watch = Reset()
    actual, trainer = fit("adamw_foreach", EVERYTHING, build=Wide, watch=watch, steps=11)
    same(actual, expected, "reset")
    away = trainer.strategy.summary().offloaded_bytes
    assert away > 1 << 20 and len(watch.host_bytes) == 33, (away, watch.host_bytes)
    assert max(watch.host_bytes) <= 2 * away, (away, watch.host_bytes)


def _others() -> dict[str, str]:
    failures = {}
    for check in (_manual, _refused, _owners_refused, _roomy, _again, _meddled, _reset):
        try:
            check()
        except Exception:
            failures[check.__name__] = traceback.format_exc()
    return failures


@pytest.mark.timeout(300)
def test_several_optimizers_refusals_and_room_for_everything() -> None:
    for rank, failures in enumerate(run_ranks(_others, WORLD, timeout=280)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures.values())
