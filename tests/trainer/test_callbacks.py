"""Callbacks, loggers, profilers and metrics of Lightning on two ranks: they work as alone, or are refused clearly."""

from __future__ import annotations

import logging
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from cases import VOCAB, Tokens, full
from lightning.pytorch import callbacks as plc
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.model_summary import summarize
from multiprocess import run_ranks
from test_handover import Small, trainer_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.trainer.progress import CompileProgress
from lightning_deepcompile.tuning.tuner import Tuner

WORLD, ROWS = 2, 2


class Metered(Small):
    """Metrics in the step, logs of every kind, `global_step` and `current_epoch` in the arithmetic, forward hooks."""

    count = 2

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(VOCAB, average="micro")
        self.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
        self.head.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.logits(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.accuracy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"epoch mean": loss, "row": float(batch_idx)}, on_step=False, on_epoch=True, sync_dist=True)
        return loss * (1 + 0.01 * self.global_step + self.current_epoch)


class Layers(Small):
    """Without its empty parameter: the callback below compares parameters, sharded ones with replicated ones, too."""

    count = 2

    def __init__(self) -> None:
        super().__init__()
        del self.empty


class Backboned(Layers):
    """Trains what is not its backbone, which `BackboneFinetuning` adds to the optimizer later."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.layers


def monitors() -> list[pl.Callback]:
    throughput = plc.ThroughputMonitor(batch_size_fn=len, window_size=2)
    return [plc.EarlyStopping("epoch mean", patience=0, mode="max"), plc.LearningRateMonitor(), plc.Timer(), throughput]


# Per case: model, callbacks, Trainer's arguments.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], list[pl.Callback]], dict[str, Any]]] = {
    "metrics, logs, hooks, monitors, early stopping, simple profiler": (
        Metered, monitors, {"max_epochs": 4, "log_every_n_steps": 2, "profiler": SimpleProfiler}),
    "finetuning, resumed": (Backboned, lambda: [plc.BackboneFinetuning(1, lambda epoch: 1.5)],
                            {"max_epochs": 3, "interrupted": 2}),
    "learning rate finder": (Small, lambda: [plc.LearningRateFinder(num_training_steps=4, update_attr=False)], {}),
    "advanced profiler": (Small, list, {"profiler": AdvancedProfiler}),
    "finetuning": (Layers, lambda: [Thaw()], {"max_epochs": 2}),
    "backbone finetuning": (Backboned, lambda: [plc.BackboneFinetuning(1, lambda epoch: 1.5)], {"max_epochs": 3}),
}  # fmt: skip


SIMILAR = ["advanced profiler", "backbone finetuning", "finetuning"]  # to others


class Thaw(plc.BaseFinetuning):
    """Lightning's way to freeze layers and free them later."""

    def freeze_before_training(self, module: pl.LightningModule) -> None:
        self.freeze(module.layers[1:])

    def finetune_function(self, module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.layers[1:], optimizer, lr=0.05)


def _trainer(strategy: Any, folder: str, callbacks: list[pl.Callback], options: dict[str, Any]) -> Any:
    options = dict(options)
    if profiler := options.pop("profiler", None):
        options["profiler"] = profiler(dirpath=folder, filename="profile")
    if any(isinstance(c, plc.LearningRateMonitor) for c in callbacks):
        options["logger"] = CSVLogger(folder)
    return trainer_of(strategy, *callbacks, default_root_dir=folder, **options)


def _fit(
    name: str, strategy: Callable[[], Any], rank: int, world: int
) -> tuple[dict[str, Tensor], dict[str, float], int]:
    build, callbacks, options = CASES[name]
    interrupted = options.get("interrupted")  # after so many epochs
    options = {key: value for key, value in options.items() if key != "interrupted"}
    data = DataLoader(Tokens(4, ROWS * WORLD, rank, world), batch_size=ROWS * WORLD // world)
    torch.manual_seed(5)
    module = build()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = None
        if interrupted:
            trainer = _trainer(strategy(), folder, callbacks(), options | {"max_epochs": interrupted})
            trainer.fit(module, data)
            path = trainer.strategy.broadcast(os.path.join(folder, "interrupted.ckpt"))
            trainer.save_checkpoint(path)
            module = build()
        trainer = _trainer(strategy(), folder, callbacks(), options)
        trainer.fit(module, data, ckpt_path=path)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {key: full(value) for key, value in module.state_dict().items()}, metrics, trainer.global_step


def _eager() -> DeepCompileStrategy:
    return DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))


def _fit_all(names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {"refused": _refused(), "summary": _summary_and_profiler()}
    for name in names:
        try:
            results[name] = _fit(name, _eager, int(os.environ["RANK"]), WORLD)
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def sharded() -> list[dict[str, Any]]:
    return run_ranks(_fit_all, WORLD, [n for n in CASES if "TEST_ALL" in os.environ or n not in SIMILAR], timeout=280)


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("callbacks")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extensive] if name in SIMILAR else []) for name in CASES]
)
def test_works_as_alone(name: str, sharded: list[dict[str, Any]]) -> None:
    state, metrics, steps = _fit(name, lambda: "auto", 0, 1)
    for rank, results in enumerate(sharded):
        actual = results[name]
        assert not isinstance(actual, str), f"rank {rank}:\n{actual}"
        assert actual[2] == steps
        for key, value in state.items():
            torch.testing.assert_close(actual[0][key], value, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
        for key in ("epoch mean", "accuracy_epoch"):
            if key in metrics:
                assert actual[1][key] == pytest.approx(metrics[key], rel=1e-5)


def _refused() -> dict[str, str]:
    errors = {}
    cases = {
        "SWA": [plc.StochasticWeightAveraging(1e-3)],
        "batch size": [plc.BatchSizeFinder()],
        "pruning": [plc.ModelPruning("l1_unstructured", amount=0.3)],
    }
    for name, callbacks in cases.items():
        strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
        try:
            with tempfile.TemporaryDirectory() as folder:
                trainer = _trainer(strategy, folder, callbacks, {})
                trainer.fit(Small(), DataLoader(Tokens(2, ROWS * WORLD, 0, WORLD), batch_size=ROWS))
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


@pytest.mark.xdist_group("callbacks")
def test_refused_callbacks(sharded: list[dict[str, Any]]) -> None:
    for errors in [results["refused"] for results in sharded]:
        assert "The callback StochasticWeightAveraging averages whole parameters" in errors["SWA"]
        assert "Use WeightAveraging or EMAWeightAveraging" in errors["SWA"]
        assert "istributed" in errors["batch size"]
        assert "steps would not see the masks. Prune the model with `torch.nn.utils.prune`" in errors["pruning"]


def _summary_and_profiler() -> tuple[int, list[str]]:
    module = Small()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
        trainer = _trainer(strategy, folder, [], {"profiler": PyTorchProfiler, "max_steps": 2})
        trainer.fit(module, DataLoader(Tokens(2, ROWS * WORLD, 0, WORLD), batch_size=ROWS))
    return summarize(module).total_parameters, [str(w.message) for w in caught]


@pytest.mark.xdist_group("callbacks")
def test_the_summary_counts_whole_parameters_and_the_module_profiler_is_warned_of(
    sharded: list[dict[str, Any]],
) -> None:
    expected = summarize(Small()).total_parameters
    for rank, (total, messages) in enumerate(results["summary"] for results in sharded):
        assert total == expected
        assert not [text for text in messages if "Dynamo does not know how to trace" in text]  # this package's own code
        if rank == 0:
            assert any("record_module_names=False" in message for message in messages)


@pytest.mark.parametrize("bar", [plc.TQDMProgressBar, plc.RichProgressBar])
def test_the_progress_bar_says_what_is_compiled(bar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich") if bar is plc.RichProgressBar else None
    shown: list[str] = []
    show = CompileProgress._show

    def record(self: CompileProgress, text: str) -> None:
        show(self, text)
        shown.append(f"{text} on {self._bar and self._bar.describe.__qualname__}")

    monkeypatch.setattr(CompileProgress, "_show", record)
    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    trainer = trainer_of(strategy, bar(), enable_progress_bar=True)
    data = DataLoader(Tokens(2, ROWS, 0, 1), batch_size=ROWS)
    try:
        trainer.fit(Small(), data, data)
    finally:
        torch.distributed.destroy_process_group()
    kind = "_TqdmBar" if bar is plc.TQDMProgressBar else "_RichBar"
    for program in ("frame0.inference", "frame1.forward", "frame1.backward"):  # the sanity check comes first
        assert any(line.startswith(f"compiling {program}, region 1/") and kind in line for line in shown), shown
    if bar is plc.TQDMProgressBar:
        assert trainer.progress_bar_callback.train_progress_bar.desc.startswith("Epoch 0")


def test_a_step_that_is_traced_again_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    steps: list[int] = []
    begin = Tuner.begin_micro_batch

    def begin_and_retrace(self: Tuner) -> bool:
        retraces = begin(self)
        steps.append(len(steps))
        if len(steps) == 2:
            self._capture.retrace(self._capture.tracing)
        return retraces or len(steps) == 2

    monkeypatch.setattr(Tuner, "begin_micro_batch", begin_and_retrace)
    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    trainer = trainer_of(strategy, max_steps=2)
    with caplog.at_level(logging.INFO, "lightning_deepcompile"):
        try:
            trainer.fit(Small(), DataLoader(Tokens(2, ROWS, 0, 1), batch_size=ROWS))
        finally:
            torch.distributed.destroy_process_group()
    first, again = [text for text in caplog.messages if "compiled" in text.lower() and "training_step" in text]
    assert first.startswith("Compiled `training_step` in") and again.startswith("Compiled `training_step` again in")
    assert "2 programs" in again
