"""`self.log` inside a compiled step: one graph, and the same metrics as without compilation."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from cases import VOCAB, Base, Tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_deepcompile.user_code.log import DeferredLog


class Recorded(nn.Module):
    """Stands in for a LightningModule: its `log` keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.layer = nn.Linear(2, 2)

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        self.calls.append((name, value, kwargs))

    def step(self, x: Tensor) -> Tensor:
        loss = self.layer(x).sum()
        self.log("loss", loss, prog_bar=True)
        self.log("rows", len(x), batch_size=x.shape[0])
        for k in range(2):
            self.log(name=f"part{k}", value=loss * k)
        return loss


def test_entries_are_replayed_in_order_after_the_step() -> None:
    module = Recorded()
    log = DeferredLog(module)
    step = torch.compile(module.step, backend="eager", fullgraph=True)
    for rows in (3, 4, 5):
        module.calls.clear()
        with log.deferred():
            loss = step(torch.ones(rows, 2))
            assert module.calls == []
        assert [(name, float(torch.as_tensor(value)), kwargs) for name, value, kwargs in module.calls] == [
            ("loss", loss.item(), {"prog_bar": True}),
            ("rows", float(rows), {"batch_size": rows}),
            ("part0", 0.0, {}),
            ("part1", loss.item(), {}),
        ]
    assert "log" not in module.__dict__


def test_steps_do_not_recompile() -> None:
    """Dynamo guards on the function and on the list of entries: both must be as they were."""
    module, compiles = Recorded(), []
    log = DeferredLog(module)
    step = torch.compile(module.step, backend=lambda gm, inputs: compiles.append(gm) or gm, fullgraph=True)
    for _ in range(4):
        with log.deferred():
            step(torch.ones(3, 2))
    assert len(compiles) == 1


def test_a_value_is_what_it_was_when_it_was_logged() -> None:
    module = Recorded()
    with DeferredLog(module).deferred():
        loss = module.layer(torch.ones(1, 2)).sum()
        before = float(loss)
        module.log("loss", loss)
        module.log("graph", loss, enable_graph=True)
        loss *= 2
    (_, detached, _), (_, attached, _) = module.calls
    assert float(detached) == float(attached) == before
    assert not detached.requires_grad and attached.requires_grad


def test_after_an_exception_nothing_is_replayed_and_everything_restored() -> None:
    module = Recorded()
    log = DeferredLog(module)
    with pytest.raises(RuntimeError, match="in the step"), log.deferred():
        module.log("a", 1)
        raise RuntimeError("in the step")
    assert module.calls == [] and "log" not in module.__dict__
    with log.deferred():
        module.log("b", 2)
    assert module.calls == [("b", 2, {})]


def test_a_log_of_the_users_own_is_used_and_kept() -> None:
    module, mine = Recorded(), []
    module.log = own = lambda name, value, **kwargs: mine.append((name, value))  # type: ignore[assignment,method-assign]
    with DeferredLog(module).deferred():
        module.log("a", 1)
        assert mine == []
    assert mine == [("a", 1)] and module.__dict__["log"] is own


class Logging(Base):
    """Logs in most of the ways there are: to the bar, per epoch, several at once, with a torchmetrics object."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
        self.best = torchmetrics.MaxMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.net(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(batch))
        self.log_dict({"logits": logits.mean(), "twice": loss * 2}, on_step=False, on_epoch=True)
        self.log("rows", len(batch), reduce_fx="max")
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        logits = self.net(batch[:, :-1])
        self.log("val", F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()), sync_dist=True)
        self.log("best", self.best, on_epoch=True)

    def on_validation_batch_end(self, *args: Any) -> None:
        self.best.update(1.0)


class Keeper(pl.Callback):
    """Keeps what was logged after every batch, and the metrics of the epochs."""

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.history.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def _fit(strategy: Any) -> tuple[list[dict[str, float]], dict[str, float], int]:
    torch.manual_seed(0)
    module, keeper = Logging(), Keeper()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[keeper],
    )
    data = Tokens(3, 2, 0, 1)
    trainer.fit(module, DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    graphs = trainer.strategy.summary().graphs if strategy != "auto" else 0
    return keeper.history, metrics, graphs


def test_metrics_of_a_fit_are_those_without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    history, metrics, graphs = _fit(DeepCompileStrategy(compile=CompileConfig(region_backend="eager")))
    torch.distributed.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        monkeypatch.delenv(name)
    expected_history, expected, _ = _fit("auto")
    assert {"loss_step", "loss_epoch", "logits", "twice", "rows", "val", "best"} <= metrics.keys()
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert [h == pytest.approx(e, rel=1e-5) for h, e in zip(history, expected_history, strict=True)] == [True] * 6
    assert graphs == 2  # training and validation, each in one piece
