"""Shards of parameters in host memory: the same training to the last bit, and right values for whoever looks."""

from __future__ import annotations

import gc
import os
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import ONLY, Mlp, Tokens, full
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from multiprocess import run_ranks
from test_checkpoint import Resumable, SaveAt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.runtime import load_extension

WORLD, ROWS, STEPS = 2, 2, 3

SHARDS = {"offload": ["parameters"]}
EVERYTHING = {"offload": "all"}


class Model(Mlp):
    """Tied, frozen, unused and scalar parameters, sizes that 2 does not divide; validates, and looks at a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        del self.layers[2]
        self.layers[0].requires_grad_(False)
        self.seen: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = self.layers[1][0].weight
        if batch_idx == 1:
            with torch.no_grad():
                weight.mul_(1.5)  # gathers see what hooks write
        self.seen += [float(outputs["loss"]), full(weight)]

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = AdamW([{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.1}], lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


class Manual(Model):
    """Two optimizers and a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return [AdamW(trained[:4], 1e-2), SGD(trained[4:], 0.1, momentum=0.9)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, second = self.optimizers()

        def closure() -> Tensor:
            first.zero_grad()
            self.manual_backward(loss := Mlp.training_step(self, batch, batch_idx))
            return loss

        loss = first.step(closure=closure)
        second.step()
        second.zero_grad()
        return loss.detach()


def fit(
    settings: dict[str, Any],
    *callbacks: pl.Callback,
    build: Callable[[], Model] = Model,
    resume: Path | None = None,
    arguments: dict[str, Any] | None = None,
    **trainer_settings: Any,
) -> tuple[dict[str, Any], pl.Trainer]:
    """Trains; returns everything that must not depend on where anything lives."""
    torch.manual_seed(3)
    module = build()
    config = CompileConfig(**{"region_backend": "eager", "schedule": None, **ONLY, **settings})
    trainer = pl.Trainer(
        strategy=DeepCompileStrategy(compile=config, **(arguments or {})), callbacks=list(callbacks),
        accelerator="cpu", devices=WORLD, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0,
        **{"max_steps": STEPS, **trainer_settings},
    )  # fmt: skip
    batches = STEPS * trainer_settings.get("accumulate_grad_batches", 1) + 4
    train, validation = (Tokens(n, ROWS * WORLD, int(os.environ["RANK"]), WORLD) for n in (batches, 1))
    loaders = Resumable(train, batch_size=ROWS), DataLoader(validation, batch_size=ROWS)
    trainer.fit(module, *loaders, ckpt_path=resume)
    trainer.strategy._checkpoints.sharded = False  # states as one process has them
    states = {
        f"{number}.{i}.{key}": value
        for number, optimizer in enumerate(trainer.optimizers)
        for i, entries in trainer.strategy.optimizer_state(optimizer).get("state", {}).items()
        for key, value in entries.items()
    }
    params = {name: full(value) for name, value in module.state_dict().items()}
    for parameter in trainer.strategy.engine.model.parameters:
        if parameter.host is not None:
            assert parameter.local.data_ptr() == parameter.dtensor.to_local().data_ptr() == parameter.host.data_ptr()
            assert torch.equal(parameter.local, parameter.host)
    return {**dict(enumerate(module.seen)), **params, **states}, trainer


def same(actual: dict[Any, Any], expected: dict[Any, Any], name: str, keys: Any = None) -> None:
    assert actual.keys() == expected.keys() and len(expected) > 10, name
    for key in expected if keys is None else keys:
        value = expected[key]
        equal = torch.equal(actual[key], value) if isinstance(value, Tensor) else actual[key] == value
        assert equal, f"{name}: {key} is {actual[key]} instead of {value}"


def _trained(folder: Path) -> Any:
    """Parameters come and go, alone or with states: checkpoints are the same, and go on the same wherever they go."""
    options = {"max_steps": 7, "gradient_clip_val": 0.1}
    expected, plain = fit({}, SaveAt(folder / "plain.ckpt", 1), **options)
    assert plain.strategy.summary().offload_parameters_reason == ""
    arguments = {"state_dict_type": "sharded"}
    settings = {"schedule": "auto", **SHARDS}
    actual, trainer = fit(settings, SaveAt(folder / "sharded.ckpt", 1), arguments=arguments, **options)
    common = actual.keys() & expected.keys()  # states have other names in sharded checkpoints
    same({key: actual[key] for key in common}, {key: expected[key] for key in common}, "shards alone")
    summary, stats = trainer.strategy.summary(), trainer.strategy.engine.runtime.stats()
    assert summary.offloaded_parameter_bytes == summary.sharded_bytes_per_rank > 0
    assert stats["host_shard_bytes"] >= summary.sharded_bytes_per_rank
    assert stats["fetched_bytes"] > 7 * summary.sharded_bytes_per_rank  # forward and backward, less what is kept
    assert "offload=['parameters']" in str(summary)
    assert (trainer.strategy.report() != []) and "parameters in host memory" in str(trainer.strategy.report()[0])
    actual, trainer = fit(EVERYTHING, SaveAt(folder / "host.ckpt", 1), **options)
    same(actual, expected, "everything")
    _moved(trainer)
    for name in ("plain", "sharded"):
        actual, resumed = fit(EVERYTHING, resume=folder / f"{name}.ckpt", **options)
        named = {key for key in expected if isinstance(key, str)}
        same({key: actual[key] for key in named}, {key: expected[key] for key in named}, name)
        assert resumed.strategy.summary().offloaded_parameter_bytes > 0
    if int(os.environ["RANK"]) == 0:
        saved = [torch.load(folder / f"{name}.ckpt") for name in ("plain", "host")]
        for key in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(*(checkpoint[key] for checkpoint in saved), rtol=0, atol=0)
    return trainer


def _moved(trainer: pl.Trainer) -> None:
    """Checks what came and went, chunk by chunk."""
    optimizer, model = trainer.optimizers[0], trainer.strategy.engine.model
    states = sum(v.to_local().nbytes for s in optimizer.state.values() for v in s.values() if v.dim())
    stepped = sum(model.by_parameter[p].local.nbytes for p in optimizer.state if p in model.by_parameter)
    summary, stats = trainer.strategy.summary(), trainer.strategy.engine.runtime.stats()
    assert summary.offloaded_bytes == states
    assert summary.offload_moved_bytes == 2 * (states + stepped) > 2 * states > 0
    # Three buffers for the embedding with its states; new states leave from memory of their own.
    assert 0 < stats["state_peak_bytes"] <= 3 * 3 * 2048 + 2 * 4_000, stats
    assert stats["host_bytes"] == stats["state_bytes"] == 0  # freed at teardown


def _mixed() -> None:
    expected, _ = fit({}, precision="bf16-mixed")
    actual, trainer = fit(EVERYTHING, precision="bf16-mixed")
    same(actual, expected, "bf16-mixed")
    _moved(trainer)


def _manual() -> None:
    expected, _ = fit({}, build=Manual)
    same(fit(EVERYTHING, build=Manual)[0], expected, "two optimizers")


def _averages() -> None:
    """An average of shards in host memory is kept there, validated with, saved and loaded."""
    options = {"val_check_interval": 2, "max_steps": 4, "accumulate_grad_batches": 3}
    expected, _ = fit({}, EMAWeightAveraging(decay=0.6), **options)
    actual, trainer = fit(EVERYTHING, EMAWeightAveraging(decay=0.6), **options)
    same(actual, expected, "averages")
    (callback,) = (c for c in trainer.callbacks if isinstance(c, EMAWeightAveraging))
    runtime = trainer.strategy.engine.runtime
    averaged = callback._average_model.module.layers[1][0].weight
    assert runtime.memory.host_of(averaged.detach().to_local()) is not None


class Deep(Model):
    """A model with so many layers that their shards are a large part of a step's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 13)) for _ in range(26))


def _some() -> None:
    """Offloads as few shards as possible, if the budget does not suffice with all else offloaded."""
    expected, _ = fit({}, build=Deep)
    actual, trainer = fit({"offload": "auto", "memory_budget": "113kB"}, build=Deep)
    same(actual, expected, "some")
    summary = trainer.strategy.summary()
    assert 0 < summary.offloaded_parameter_bytes < summary.sharded_bytes_per_rank, summary
    assert "may be allocated" in summary.offload_parameters_reason and summary.offloaded_bytes > 0
    _, trainer = fit({"offload": "auto"}, arguments={"cpu_offload": True}, max_steps=1)
    assert "may be allocated" in trainer.strategy.summary().offload_parameters_reason  # there is room for all of it
    assert trainer.strategy.engine.runtime.stats()["host_shard_bytes"] == 0


class Failing(AdamW):
    """Fails when it has been called twice since training began: in the middle of its first step."""

    calls: int | None = None

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if Failing.calls is not None:
            Failing.calls += 1
            if Failing.calls == 2:
                raise RuntimeError("on purpose")
        return loss


def _errors() -> None:
    """An optimizer that fails half-way leaves parameters where they live; what cannot be is said."""
    seen = []

    class Broken(Model):
        def configure_optimizers(self) -> Any:
            return Failing([p for p in self.parameters() if p.requires_grad], 1e-2)

    class Look(pl.Callback):
        def on_train_start(self, *args: Any) -> None:
            Failing.calls = 0

        def on_exception(self, trainer: pl.Trainer, *args: Any) -> None:
            seen.extend(p for p in trainer.strategy.engine.model.parameters if p.host is not None)

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(EVERYTHING, Look(), build=Broken)
    assert len(seen) > 10 and all(p.local.data_ptr() == p.host.data_ptr() for p in seen)
    for settings, arguments, message in (
        (SHARDS, {"stage": 2}, r"offload=\['parameters'\].*: parameters can be offloaded at stage 3 alone"),
        ({**SHARDS, "host_memory_budget": "4kB"}, {}, "gives each rank 2000 bytes .* parameters of [0-9]+ bytes"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            fit(settings, arguments=arguments)


def _trained_and_again(folder: Path) -> None:
    """Fits again, and frees the memory with the module."""
    trainer = _trained(folder)
    runtime, module = trainer.strategy.engine.runtime, trainer.lightning_module
    held = runtime.stats()["host_shard_bytes"]
    trainer.fit_loop.epoch_loop.max_steps += 1
    trainer.fit(module, DataLoader(Tokens(4, ROWS * WORLD, int(os.environ["RANK"]), WORLD), batch_size=ROWS))
    assert runtime.stats()["host_shard_bytes"] == held > 0
    with trainer.strategy.full_parameters():
        assert module.layers[1][0].weight.shape == (17, 13)
    weight = module.layers[1][0].weight.full_tensor()
    assert torch.equal(module.layers[1][0](torch.zeros(1, 13)), module.layers[1][0].bias.full_tensor()[None])
    assert weight.shape == (17, 13)
    parameter = trainer.strategy.engine.model.parameters[0]
    alive = [weakref.ref(runtime), weakref.ref(parameter.host), weakref.ref(parameter.leaf)]
    trainer = module = runtime = parameter = None
    deadline = time.monotonic() + 10  # a thread that has yet to end may hold them for a moment
    gc.collect()
    while any(one() is not None for one in alive) and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
    assert [one() for one in alive] == [None] * 3


def _check_all(folder: Path) -> dict[str, str]:
    failures = {}
    checks: list[Callable[[], None]] = [lambda: _trained_and_again(folder), _averages, _some, _errors]
    for check in checks + [_mixed, _manual] * ("TEST_ALL" in os.environ):
        try:
            check()
        except Exception:
            failures[check.__name__] = traceback.format_exc()
    return failures


@pytest.mark.timeout(400)
def test_nothing_depends_on_where_parameters_live(tmp_path: Path) -> None:
    for rank, failures in enumerate(run_ranks(_check_all, WORLD, tmp_path, timeout=380)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures.values())


def test_the_runtime_gathers_from_host_memory_and_answers_misuse(mesh: DeviceMesh) -> None:
    group, ops, empty = mesh.get_group(), torch.ops.dc, torch.empty(0)
    runtime = load_extension().Runtime(group, group, torch.device("cpu"), host_limit=3 << 20)
    base = runtime.serial << 32
    flat = runtime.memory.host_shard(400, torch.float32).copy_(torch.arange(400.0))
    here = torch.full((50,), 7.0)
    shards = [flat[:128], flat[128:200].view(8, 9), here, flat[256:256], flat[256:400]]
    for i, shard in enumerate(shards):
        runtime.setup.register_param(base | i, f"p{i}", list(shard.shape), shard)
    runtime.setup.register_graph(base, [base | i for i in range(5)])
    ids, dtypes = (
        [base | i for i in range(5)],
        [torch.float64, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16],
    )
    for _ in range(3):  # slots go round
        ops.prefetch_params_fused(base, [], ids[:3], dtypes[:3])
        ops.prefetch_params_fused(base, [], ids[3:], dtypes[3:])
        for shard, whole, dtype in zip(shards, ops.wait_allgather_fused(base, ids), dtypes, strict=True):
            assert torch.equal(whole, shard.to(dtype))
        ops.release_params_fused(base, ids)
        runtime.parameters.invalidate()
        flat.add_(1)
    assert runtime.stats()["fetched_bytes"] >= 3 * 4 * (128 + 72 + 144)
    assert torch.equal(ops.gather(shards[1], ids[1], [8, 9], torch.float64), shards[1].double())

    alias = runtime.memory.host_of(shards[1])
    assert alias.shape == (8, 9) and alias.data_ptr() == shards[1].data_ptr()
    assert runtime.memory.host_of(here) is None and runtime.memory.host_of(shards[1].t()) is None
    for error, message, call in (
        (ValueError, "must not be negative, got -1", lambda: runtime.memory.host_shard(-1, torch.float32)),
        (RuntimeError, "overflow", lambda: runtime.memory.host_shard(1 << 62, torch.float32)),
        (torch.OutOfMemoryError, "parameter shards: .* at most 3145728", lambda: runtime.memory.host_shard(
            1 << 20, torch.float32)),
        (TypeError, "incompatible", lambda: runtime.memory.host_shard(4, "float")),
        (TypeError, "incompatible", lambda: runtime.memory.host_of(None)),
        (ValueError, "'p1' lives in host memory already", lambda: ops.offload_parameter(empty, base, ids[1])),
        (ValueError, "does not belong to graph", lambda: ops.allgather_param(empty, base, base | 9)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    runtime.reset()
    runtime.memory.free_unused()
    assert runtime.stats()["host_shard_bytes"] == 1 << 20  # it is in use
    runtime.close()
    with pytest.raises(RuntimeError, match="was closed"):
        runtime.memory.host_shard(1, torch.float32)
    assert flat[-1] == 402 and alias[0, 0] == 131  # they outlive the runtime
