"""Ranks are killed at random moments while a thread saves; training goes on from what was whole before.

Parameters and optimizer states are integers that the step alone decides, so a mixture of two checkpoints is seen. With
``TEST_ALL=1`` there are 100 moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from multiprocess import RankError, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.checkpoint.location import META, find_kind

MOMENTS = 100
EVERYDAY = (1, 2)
BLOCKS, SHAPE = 6, (1024, 1024)  # 48 MiB with the momenta

# What ModelCheckpoint is told, and who is killed.
SAVING: list[dict[str, Any]] = [
    {},
    {"save_last": "link"},
    {"save_last": True},
    {"save_top_k": 2, "monitor": "loss"},
]
VICTIMS = [(1,), (0, 1), (0,)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


class Counter(pl.LightningModule):
    """After step t each momentum is -t, and each weight the sum of all numbers to t."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = 0 * batch.sum()
        for block in self.blocks:
            x = block(x)
        self.log("loss", -x)
        return -x

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=1.0)


class Check(pl.Callback):
    """Checks that the state from which training resumes is that of one step."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        step = self.step = trainer.global_step
        state = trainer.strategy.lightning_module_state_dict()
        assert len(state) == BLOCKS
        for weight in state.values():
            assert weight.to_local().unique().tolist() == [step * (step + 1) / 2]
        momenta = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
        assert len(momenta) == (BLOCKS if step else 0)
        for momentum in momenta:
            assert getattr(momentum, "_local_tensor", momentum).unique().tolist() == [-step]


def _train(folder: Path, saving: dict[str, Any], steps: int | None = None, resume: Any = None) -> int:
    """Trains for some more steps, or until it is killed; returns the step that it began after."""
    (folder.parent / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    check, checkpoints = Check(), ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **saving)
    trainer = pl.Trainer(
        strategy=DeepCompileStrategy(
            state_dict_type="sharded", async_save=True, compile=CompileConfig(region_backend="eager", schedule=None)
        ),
        accelerator="cpu",
        devices=2,
        max_steps=10_000,
        limit_train_batches=10_000 if steps is None else steps,
        max_epochs=1 if steps is None else -1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[check, checkpoints, *([] if steps is None else [StopAfter(steps)])],
    )
    trainer.fit(Counter(), DataLoader(torch.zeros(20_000, 1), batch_size=1), ckpt_path=resume)
    return check.step


class StopAfter(pl.Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.steps -= 1
        trainer.should_stop = self.steps == 0


def _step_of(path: Path) -> int:
    """The step of a sharded checkpoint; 0 if it is not whole."""
    for _ in range(10):  # it may be replaced meanwhile
        with contextlib.suppress(FileNotFoundError):
            return int(torch.load(path / META)["global_step"])
    return 0


def _newest(folder: Path, last: bool) -> int:
    paths = [folder / "last.ckpt"] if last else list(folder.glob("step=*.ckpt"))
    return max(map(_step_of, paths), default=0)


def _saving(folder: Path) -> bool:
    return folder.exists() and any(path.name.endswith(".saving") for path in folder.iterdir())


class Killer(threading.Thread):
    """Kills ranks at a random moment of one of the first saves after the first, or shortly after it."""

    def __init__(self, folder: Path, victims: tuple[int, ...], last: bool, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self.folder, self.victims, self.last, self.chance = folder, victims, last, chance
        self.existed, self.hit = 0, False

    def run(self) -> None:
        while not _newest(self.folder, self.last):
            time.sleep(0.002)
        lasted = 0.1
        for _ in range(self.chance.randint(1, 3)):
            self._wait_for(True)
            begun = time.monotonic()
            self._wait_for(False)
            lasted = time.monotonic() - begun
        self._wait_for(True)
        time.sleep(self.chance.uniform(0, 1.2 * lasted))
        pids = [int((self.folder.parent / f"pid{rank}").read_text()) for rank in self.victims]
        self.existed, self.hit = _newest(self.folder, self.last), _saving(self.folder)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def _wait_for(self, saving: bool) -> None:
        while _saving(self.folder) != saving:
            time.sleep(0.0005)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "moment", [pytest.param(i, marks=[] if i in EVERYDAY else [pytest.mark.extensive]) for i in range(MOMENTS)]
)
def test_the_last_whole_checkpoint_loads_after_a_kill(tmp_path: Path, moment: int) -> None:
    saving, victims = SAVING[moment % 4], VICTIMS[moment if moment in EVERYDAY else moment // 4 % 3]
    folder, last = tmp_path / "checkpoints", "save_last" in saving
    killer = Killer(folder, victims, last, random.Random(moment))
    killer.start()
    with pytest.raises(RankError, match="died with exit code -9") as raised:
        run_ranks(_train, 2, folder, saving)
    killer.join()
    assert "still running" not in str(raised.value), str(raised.value)  # a survivor does not hang
    found = _newest(folder, last)
    print(f"{moment=} {victims=} {saving=} {killer.hit=} {killer.existed=} {found=}", sorted(os.listdir(folder)))
    assert killer.existed and found >= killer.existed
    assert all(find_kind(path) in ("sharded", None) for path in folder.glob("*.ckpt"))  # None: a link to nothing
    newest = max(folder.glob("step=*.ckpt"), key=_step_of)
    resumed = run_ranks(_train, 2, folder, saving, steps=2, resume="last" if last else newest)
    assert resumed == [found] * 2
    # The saves since then have removed what the killed one left.
    assert not [path.name for path in folder.iterdir() if not path.name.endswith(".ckpt") or "replaced" in path.name]
