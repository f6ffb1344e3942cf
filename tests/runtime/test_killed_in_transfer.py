"""A rank that is killed while something travels to host memory or back: others end, the last checkpoint is whole."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from multiprocess import RankError, run_ranks
from test_offload_states import CASES, EVERYTHING, WORLD, Model, fit
from torch import Tensor

CASE = "adamw_foreach"
# What leaves, what is under way when rank 1 dies in the third step, and how checkpoints are saved.
TRANSFERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "states": (EVERYTHING, "offloaded_bytes", "full"),
}
if "TEST_ALL" in os.environ:
    TRANSFERS["activations"] = {"offload": ["activations"], "schedule": None}, "reloaded_bytes", "sharded"


class Dying(Model):
    """Rank 1 kills itself as soon as the first tensor of the third step travels."""

    def __init__(self, counter: str) -> None:
        super().__init__(CASES[CASE][0])
        self.counter = counter

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2 * self.trainer.accumulate_grad_batches and os.environ["RANK"] == "1":
            runtime = self.trainer.strategy.engine.runtime
            threading.Thread(target=_kill_at_change, args=(runtime, self.counter), daemon=True).start()


def _kill_at_change(runtime: Any, counter: str) -> None:
    before = runtime.stats()[counter]
    while runtime.stats()[counter] == before:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def _dies(name: str, folder: Path) -> None:
    settings, counter, kind = TRANSFERS[name]
    strategy = {"state_dict_type": kind, "timeout": timedelta(seconds=20)}
    fit(CASE, settings, save=folder / name, build=lambda: Dying(counter), strategy=strategy)


def _resumes(folder: Path) -> None:
    whole, _ = fit(CASE, {})
    for name, (settings, *_) in TRANSFERS.items():
        resumed, _ = fit(CASE, settings, resume=folder / name)
        wrong = [k for k, value in whole.items() if isinstance(value, Tensor) and not torch.equal(resumed[k], value)]
        assert not wrong and "layers.0.weight" in whole, f"{name}: {wrong}"


@pytest.mark.timeout(200)
def test_the_others_end_and_training_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    for name in TRANSFERS:
        with pytest.raises(RankError) as ended:
            run_ranks(_dies, WORLD, name, tmp_path, timeout=90)
        message = str(ended.value)
        assert "rank 1 died with exit code -9" in message, message
        # By itself, within the timeout: what still runs 10 seconds after the first death is killed, and said to be.
        assert "was still running" not in message, message
        # A transfer notices it, or the exchange between hosts that follows.
        assert "failed on rank 0 of 2" in message or "Rank 1 has gone" in message, message
    run_ranks(_resumes, WORLD, tmp_path, timeout=120)
