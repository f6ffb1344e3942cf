"""ModelCheckpoint, plugins, remote paths, and saving in the background."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from cases import Mlp
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from multiprocess import run_ranks
from test_checkpoint import SAVED_AFTER, STEPS, Model, SaveAt, fit, ours
from torch import Tensor

from lightning_deepcompile.checkpoint.background import BackgroundSaves
from lightning_deepcompile.checkpoint.file import FileCheckpointIO
from lightning_deepcompile.checkpoint.location import META, find_kind
from lightning_deepcompile.checkpoint.sharded import ShardedCheckpoint, save_sharded
from lightning_deepcompile.checkpoint.staging import remove, resolve


def _background(folder: Path) -> None:
    background, is_global_zero = BackgroundSaves(), dist.get_rank() == 0
    for value in (1.0, 2.0):
        checkpoint = _checkpoint(value)
        save_sharded(checkpoint, folder / str(value), is_global_zero=is_global_zero, background=background)
        # Neither what training changes meanwhile nor what it sends gets into it.
        checkpoint["state_dict"]["weight"].zero_()
        checkpoint["epoch"] = 0.0
        for _ in range(100):
            total = torch.ones(())
            dist.all_reduce(total)
            assert total == dist.get_world_size()
    background.finish()
    fails = pytest.raises(
        OSError if is_global_zero else RuntimeError, match="" if is_global_zero else "failed on rank 0"
    )
    with fails:  # below a file there can be no folder
        save_sharded(checkpoint, folder / "1.0" / META / "x", is_global_zero=is_global_zero, background=background)
    may_write = threading.Event()
    background.write(may_write.wait)
    save_sharded(checkpoint, folder / "becomes a file" / "x", is_global_zero=is_global_zero, background=background)
    if is_global_zero:
        (folder / "becomes a file").rmdir()  # Lightning's `save_last="link"` needs it before anything is written
        (folder / "becomes a file").touch()
    may_write.set()
    with fails:
        background.finish()


class TwoOptimizers(Mlp):
    """Steps two optimizers by hand, one of which has no state."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        layers = list(self.layers.parameters())
        rest = [p for p in self.parameters() if not any(p is q for q in layers)]
        return [torch.optim.SGD(layers, lr=0.1), torch.optim.Adam(rest, lr=1e-3)]

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.detach()}


class Monitored(Model):
    """Logs the mean loss over ranks: the best steps of rank 0 may be others."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, sync_dist=True)
        return loss


class FailAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyError("in the middle")


def _callbacks(folder: Path) -> None:
    for form, options in (("full", {}), ("sharded", {"async_save": True})):
        best = ModelCheckpoint(
            folder / form, "{step}", monitor="mean", mode="max", save_top_k=2, save_last="link", every_n_train_steps=1
        )
        weights = ModelCheckpoint(folder / form, "weights", save_weights_only=True, every_n_train_steps=STEPS)
        losses = fit(ours(form, **options), best, weights, build=Monitored)[0].losses
        first, second = sorted(range(STEPS), key=lambda step: losses[step], reverse=True)[:2]
        names = {path.name for path in (folder / form).iterdir()}
        assert names == {f"step={first + 1}.ckpt", f"step={second + 1}.ckpt", "last.ckpt", "weights.ckpt"}
        assert (folder / form / "last.ckpt").is_symlink()
        assert find_kind(folder / form / "weights.ckpt") == ("file" if form == "full" else "sharded")
    # Written by a thread, and there when the run has ended.
    _, trainer = fit(ours(checkpoint_io=AsyncCheckpointIO()), SaveAt(folder / "later.ckpt", SAVED_AFTER))
    assert isinstance(trainer.strategy.checkpoint_io.checkpoint_io, FileCheckpointIO)
    trainer.strategy.barrier()
    assert fit(ours(), resume=folder / "later.ckpt")[0].losses == losses[SAVED_AFTER:]
    whole = fit(ours("sharded"), SaveAt(folder / "two.ckpt", 2), build=TwoOptimizers)[0]
    resumed = fit(ours(), resume=folder / "two.ckpt", build=TwoOptimizers)[0]
    assert resumed.losses == whole.losses[1:] and len(resumed.losses) > 0
    assert all(torch.equal(whole.params[name], resumed.params[name]) for name in whole.params)
    # Saved because of an error on all ranks.
    with pytest.raises(KeyError, match="in the middle"):
        fit(ours("sharded"), OnExceptionCheckpoint(folder, "error"), FailAt(SAVED_AFTER))
    assert find_kind(folder / "error.ckpt") == "sharded"
    _background(folder)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_callbacks_plugins_and_saving_in_the_background(tmp_path: Path) -> None:
    run_ranks(_callbacks, 2, tmp_path)
    for value in (1.0, 2.0):
        assert _read_sharded(tmp_path / str(value)) == value


def test_a_thread_writes_only_sharded_checkpoints() -> None:
    with pytest.raises(ValueError, match="async_save=True.*AsyncCheckpointIO"):
        ours(async_save=True)


def _checkpoint(value: float) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((4, 3), value)}, "epoch": value}


def _read_sharded(path: Any) -> float:
    checkpoint = ShardedCheckpoint.open(path, None).load(None, lambda name, shape: False, with_optimizers=False)
    assert checkpoint["state_dict"]["weight"].unique().tolist() == [checkpoint["epoch"]]
    return checkpoint["epoch"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("remote", [True, False])
def test_urls(tmp_path: Path, remote: bool) -> None:
    """One process can test only this much: other processes cannot reach ``memory://``."""
    root = "memory://checkpoints" if remote else f"file://{tmp_path}"
    path = f"{root}/sharded.ckpt"
    for value in (1.0, 2.0):
        save_sharded(_checkpoint(value), path, is_global_zero=True)
        assert find_kind(path) == "sharded" and _read_sharded(resolve(path)) == value
    for url in (path, f"{root}/full.ckpt"):
        remove(url)
        FileCheckpointIO().save_checkpoint(_checkpoint(3.0), url)
        assert find_kind(url) == "file" and FileCheckpointIO().load_checkpoint(url)["epoch"] == 3.0
    save_sharded(_checkpoint(4.0), path, is_global_zero=True)
    assert _read_sharded(path) == 4.0
    remove(path)
    assert find_kind(path) is None
