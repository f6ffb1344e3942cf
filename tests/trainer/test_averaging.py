"""Lightning's weight averaging callbacks: the averages of shards are those of a single process, also in checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import Record, Recorder, Tokens, assert_close, full
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from multiprocess import run_ranks
from test_checkpoint import GLOBAL_ROWS, Model, Resumable, SaveAt, ours, rank_and_world
from test_handover import trainer_of
from torch.utils.data import DataLoader

STEPS = 4


class Evaluated(Model):
    """Reads the averaged weights in a hook, and validates with them."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def on_validation_epoch_end(self) -> None:
        self.values.append(float(self.trainer.callback_metrics["val"]))


def fit(strategy: Any, average: pl.Callback, *callbacks: pl.Callback, resume: Path | None = None) -> Record:
    """Trains four steps, with validation after every second one; the values of it are the record's `extra`."""
    rank, world = rank_and_world()
    torch.manual_seed(3)
    module, recorder = Evaluated(), Recorder()
    options: dict[str, Any] = {"max_steps": STEPS, "num_sanity_val_steps": 0, "val_check_interval": 2}
    trainer = trainer_of(strategy, average, recorder, *callbacks, **options)
    batch = GLOBAL_ROWS // world
    train, validation = (Tokens(count, GLOBAL_ROWS, rank, world) for count in (STEPS, 1))
    trainer.fit(module, Resumable(train, batch_size=batch), DataLoader(validation, batch_size=batch), ckpt_path=resume)
    # After the callback has put the average in place of the weights:
    state = {name: full(value) for name, value in module.state_dict().items()}
    return Record(params=state, extra=module.values, losses=recorder.record.losses)


def ema() -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=0.6)


def _averages(folder: Path) -> dict[str, Record]:
    records = {
        "ema": fit(ours("full"), ema(), SaveAt(folder / "full.ckpt", 2)),
        "mean, parameters alone": fit(ours("full"), WeightAveraging(use_buffers=False)),
        "ema, full": fit(
            ours("sharded", stage=2), ema(), SaveAt(folder / "sharded.ckpt", 3), resume=folder / "full.ckpt"
        ),
        "ema, sharded": fit(ours("full"), ema(), resume=folder / "sharded.ckpt"),
    }
    if "TEST_ALL" in os.environ:
        records |= {"ema, stage 2": fit(ours("full", stage=2), ema()), "mean": fit(ours("full"), WeightAveraging())}
    with pytest.raises(MisconfigurationException, match="device='meta'.*Remove the argument"):
        fit(ours(), EMAWeightAveraging(device="meta"))
    return records


@pytest.mark.timeout(400)
@pytest.mark.xdist_group("averaging")
def test_averages_of_shards(tmp_path: Path) -> None:
    results = run_ranks(_averages, 2, tmp_path, timeout=300)
    average = {"ema": ema, "mean": WeightAveraging}
    alone = {name: fit("auto", make()) for name, make in average.items()}
    alone["mean, parameters alone"] = fit("auto", WeightAveraging(use_buffers=False))
    alone["ema, from the file"] = fit("auto", ema(), resume=tmp_path / "full.ckpt")  # which plain Lightning can read
    results[0]["ema, from the file"] = alone["ema, from the file"]
    for name, record in results[0].items():
        expected = alone.get(name, alone["ema"])
        for key, value in expected.params.items():
            assert_close(record.params[key], value, f"{name}: {key}")
        resumed = len(record.extra)  # of a resumed run, the values since
        assert resumed and record.extra == pytest.approx(expected.extra[-resumed:], rel=1e-5), name
        assert record.losses == pytest.approx(expected.losses[-len(record.losses) :], rel=1e-5), name
    assert alone["ema"].extra[-1] != pytest.approx(alone["mean"].extra[-1], rel=1e-4)
