"""Common uses of a Trainer and a module around a training work as with Lightning's own strategies."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import Tokens, full
from multiprocess import run_ranks
from test_handover import Small, trainer_of
from test_unmodified import ours
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric


def data(rows: int = 4, batches: int = 2) -> DataLoader[Tensor]:
    return DataLoader(Tokens(batches, rows, 0, 1), batch_size=rows)


class Evaluated(Small):
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.logits(batch[:, :-1])


class Nothing(pl.LightningModule):
    """A module without parameters."""

    automatic_optimization = False

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", batch.float().mean(), sync_dist=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("trained", batch.float().mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch * 2

    def configure_optimizers(self) -> None:
        return None


def _without_parameters() -> None:
    module, trainer = Nothing(), trainer_of(ours())
    (metrics,) = trainer.test(module, data(), verbose=False)
    engine = trainer.strategy.engine
    assert metrics["mean"] == pytest.approx(float(data().dataset.data.float().mean()), rel=1e-5)
    predicted = trainer.predict(module, data())
    assert torch.equal(torch.cat(predicted), data().dataset.data * 2)
    assert trainer.strategy.engine is engine, "nothing is set up anew"
    trainer.fit(module, data())
    assert "trained" in trainer.callback_metrics


class Unoptimized(Evaluated):
    def configure_optimizers(self) -> None:
        return None


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_training_without_an_optimizer_is_saved_and_resumed(form: str, tmp_path: Path) -> None:
    def trainer(epochs: int) -> pl.Trainer:
        strategy = ours()
        strategy._checkpoints.sharded = form == "sharded"
        return trainer_of(strategy, max_epochs=epochs, enable_checkpointing=True, default_root_dir=tmp_path)

    first, second = trainer(1), trainer(2)
    first.fit(Unoptimized(), data())
    path = first.checkpoint_callback.best_model_path
    second.fit(Unoptimized(), data(), ckpt_path=path)
    assert second.current_epoch == 2
    if form == "full":
        alone = trainer_of("auto", max_epochs=2)
        alone.fit(Unoptimized(), data(), ckpt_path=path)
        with pytest.raises(RuntimeError, match="configured 1 optimizers but the checkpoint contains 0"):
            trainer(2).fit(Evaluated(), data(), ckpt_path=path)


class Counting(Evaluated):
    """Buffers and a metric that steps write to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(13)
        self.mean = MeanMetric()

    def logits(self, tokens: Tensor) -> Tensor:
        return super().logits(tokens) + self.norm(self.embed(tokens).transpose(1, 2)).mean()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.mean.update(batch.float().mean())
        self.log("mean", self.mean)


def in_inference_mode(strategy: Any, folder: Path) -> list[Any]:
    """A module that was trained, and one that is sharded there, and trained afterwards."""
    torch.manual_seed(3)
    module, trainer = Counting(), trainer_of(strategy())
    trainer.fit(module, data())
    trainer.save_checkpoint(folder / "before")
    torch.manual_seed(4)  # compiling may have drawn numbers
    untrained, other = Counting(), trainer_of(strategy())
    results: list[Any] = []
    with torch.inference_mode():
        results += trainer.test(module, data(), ckpt_path=folder / "before", verbose=False)
        trainer.save_checkpoint(folder / "after")
        results += trainer.predict(module, data(), ckpt_path=folder / "after")
        assert torch.is_inference_mode_enabled()
        results += other.test(untrained, data(), verbose=False)
    assert not torch.is_inference_mode_enabled()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data())
    other.fit(untrained, data())
    results += trainer.test(module, data(), verbose=False) + other.test(untrained, data(), verbose=False)
    return results


def test_a_trainer_in_the_users_inference_mode(tmp_path: Path) -> None:
    expected, actual = (in_inference_mode(strategy, tmp_path) for strategy in (lambda: "auto", ours))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _threads() -> list[bool]:
    """Returns for each entry point whether the thread exists while steps run; afterwards there is none."""

    class Looks(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(running())

        on_validation_batch_end = on_train_batch_end

    def running() -> bool:
        return any(thread.name.startswith("deepcompile") for thread in threading.enumerate())

    seen: list[bool] = []
    module, trainer = Evaluated(), trainer_of(ours(), Looks())
    for entry in (trainer.fit, trainer.validate):
        entry(module, data())
        assert not running()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data())
    return seen


def _threads_of_many() -> list[int]:
    """Returns the number of the process' threads after each of some trainings, Python's and others'."""
    seen = []
    for _ in range(3):
        trainer_of(ours()).fit(Evaluated(), data())
        gc.collect()
        seen.append(len(os.listdir("/proc/self/task")))
    return seen


def _look_at_threads() -> tuple[list[int], list[bool]]:
    many = _threads_of_many()
    _without_parameters()
    return many, _threads()


def test_no_thread_or_process_group_outlives_a_training_and_a_module_needs_no_parameters() -> None:
    for many, running in run_ranks(_look_at_threads, 2):
        assert running == [True] * 6
        assert many[-1] <= many[1] + 1, many  # of groups that are kept, nine come with each training


def early(step: bool = False, other: bool = False) -> Small:
    """An optimizer that is built, and may have stepped, before the module is sharded; two names for one parameter."""

    class Early(Small):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.embed.weight
            parameters = [{"params": self.head.parameters(), "lr": 0.01}]
            parameters.append(
                {"params": [p for p in self.parameters() if all(p is not h for h in self.head.parameters())]}
            )
            self.made = torch.optim.AdamW(parameters, lr=0.05, eps=1e-3)
            if step:
                loss = super().training_step(Tokens(1, 4, 0, 1).data, 0)
                loss.backward()
                self.made.step()
                self.made.zero_grad()
            if other:
                self.made.add_param_group({"params": [nn.Parameter(torch.ones(3))]})

        def log(self, *args: Any, **kwargs: Any) -> None:
            if self._trainer is not None:
                super().log(*args, **kwargs)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.made

    return Early()


def _early(strategies: list[Any] | None = None) -> list[dict[str, Tensor]]:
    results = []
    for step in (False, True):
        torch.manual_seed(3)
        module = early(step)
        for strategy in strategies or [ours(), ours(stage=1)]:
            trainer = trainer_of(strategy)
            trainer.fit(module, data())
            assert {p for group in module.made.param_groups for p in group["params"]} == set(module.parameters())
        results.append({name: full(parameter) for name, parameter in module.named_parameters()})
    return results


def test_an_optimizer_may_be_built_before_the_module_is_sharded() -> None:
    expected = _early(["auto", "auto"])
    for results in run_ranks(_early, 2):
        for actual, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"AdamW holds a parameter of shape \(3,\) that is not the module's"):
        trainer_of(ours()).fit(early(other=True), data())
    with pytest.raises(ValueError, match="AdamW has stepped before.*offload=.'states'"):
        trainer_of(ours(offload=["states"])).fit(early(step=True), data())


class Tied(Evaluated):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(13, 13, batch_first=True)
        self.head.weight = self.embed.weight
        self.embed.weight.mark = "kept"

    def logits(self, tokens: Tensor) -> Tensor:
        return super().logits(tokens) + self.head(self.rnn(self.embed(tokens))[0])


def _pickled(folder: Path) -> None:
    module, trainer = Tied(), trainer_of(ours())
    trainer.fit(module, data())
    for saved in (module, trainer):
        read = pickle.loads(pickle.dumps(saved))
        plain = read if saved is module else read.lightning_module
        assert type(plain) is Tied and type(plain.head) is nn.Linear
        for (name, parameter), own in zip(plain.named_parameters(), module.parameters(), strict=True):
            assert torch.equal(full(parameter), full(own)), name
    assert copy.deepcopy(trainer).strategy.strategy_name == "deepcompile"
    assert type(copy.copy(module.head)) is type(module.head)


def test_a_trained_module_and_its_trainer_are_pickled(tmp_path: Path) -> None:
    run_ranks(_pickled, 2, tmp_path)
    torch.manual_seed(3)
    module, trainer = Tied(), trainer_of(ours())
    trainer.fit(module, data())
    torch.save(module, tmp_path / "module.pt")
    read = torch.load(tmp_path / "module.pt", weights_only=False)
    assert {type(part).__module__ for part in read.modules()}.isdisjoint({type(module.head).__module__})
    assert not any(isinstance(parameter, DTensor) for parameter in read.parameters())
    assert read.head.weight is read.embed.weight and read.embed.weight.mark == "kept"
    assert read.head.weight.data_ptr() != module.head.weight.to_local().data_ptr()
    expected, actual = (trainer_of(s).test(m, data(), verbose=False) for s, m in (("auto", read), (ours(), module)))
    assert actual[0]["val"] == pytest.approx(expected[0]["val"], rel=1e-5)
    trainer_of("auto").fit(read, data())
    again = pickle.loads(pickle.dumps(trainer))
    again.fit_loop.max_epochs = 2
    again.fit(again.lightning_module, data())


class Loads(Evaluated):
    """Reads and writes checkpoints in the hooks that come before, or right after, the strategy is set up."""

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.path = path

    def use(self, hook: str) -> None:
        if not self.path:
            return
        strategy, path = self.trainer.strategy, Path(self.path)
        other = type(self).load_from_checkpoint(path / "full")
        assert type(other) is Loads and type(other.head.weight) is nn.Parameter
        for form in ("full", "sharded"):
            with torch.no_grad():
                self.head.bias.zero_()
            strategy.load_model_state_dict(strategy.load_checkpoint(path / form))
            for (name, one), wanted in zip(self.named_parameters(), other.parameters(), strict=True):
                assert torch.equal(full(one), wanted), name
        self.trainer.save_checkpoint(path / f"in {hook}")

    def setup(self, stage: str) -> None:
        self.use("setup")

    def configure_model(self) -> None:
        self.use("configure_model")

    def on_fit_start(self) -> None:
        self.use("on_fit_start")


def _before_the_strategy_is_set_up(folder: str) -> None:
    for form in ("full", "sharded"):
        torch.manual_seed(3)
        module, trainer = Loads(), trainer_of(ours())
        trainer.strategy._checkpoints.sharded = form == "sharded"
        trainer.strategy.connect(module)
        trainer.save_checkpoint(Path(folder, form))
        while not Path(folder, form).exists():  # the ranks meet when they fit
            time.sleep(0.01)
        trainer.fit(module, data(), ckpt_path=Path(folder, form))
    module, trainer = Loads(folder), trainer_of(ours())
    trainer.fit(module, data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data())  # sharded already
    trainer.strategy.barrier()
    for hook in ("setup", "configure_model", "on_fit_start"):
        state = torch.load(Path(folder, f"in {hook}"))["state_dict"]
        assert state["head.weight"].shape == (61, 13)


def test_checkpoints_before_the_strategy_is_set_up(tmp_path: Path) -> None:
    run_ranks(_before_the_strategy_is_set_up, 2, str(tmp_path))
