"""Checkpoints travel: between full and sharded, between numbers of ranks, to plain Lightning and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import Mlp, Recorder, Tokens
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from multiprocess import devices, run_ranks
from torch import Tensor
from torch.utils.data import DataLoader

GLOBAL_ROWS = 12  # divides among 1, 2, 3 and 4 ranks
STEPS, SAVED_AFTER = 5, 2


class Model(Mlp):
    """Tied, frozen, shared, unused, scalar and empty parameters, a buffer, two parameter groups and a schedule."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.save_hyperparameters()
        del self.layers[2:]
        self.head.weight = self.embed.weight
        self.layers[0].requires_grad_(False)
        self.again = self.layers[1]
        self.head = torch.compile(self.head, backend="eager")  # its keys get a prefix
        self.register_buffer("steps_seen", torch.zeros(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps_seen += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": trainable[:2]}, {"params": trainable[2:], "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


class Resumable(DataLoader[Tensor]):
    """Goes on with the batch after the one at which its state was taken."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given = self.skip = 0

    def __iter__(self) -> Any:
        skip, self.skip = self.skip, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skip:
                self.given = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["given"]


class SaveAt(pl.Callback):
    """Saves once a number of steps is done."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def rank_and_world() -> tuple[int, int]:
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def fit(
    strategy: Any,
    *callbacks: pl.Callback,
    resume: Path | None = None,
    build: Any = None,
    accelerator: str = "cpu",
) -> tuple[Any, pl.Trainer]:
    rank, world = rank_and_world()
    torch.manual_seed(3)
    recorder = Recorder()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        **devices(world),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[recorder, *callbacks],
    )
    data = Tokens(6, GLOBAL_ROWS, rank, world)
    trainer.fit(
        Model() if build is None else build(), Resumable(data, batch_size=GLOBAL_ROWS // world), ckpt_path=resume
    )
    return recorder.record, trainer


def ours(kind: str = "full", **kwargs: Any) -> Any:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    return DeepCompileStrategy(state_dict_type=kind, compile=CompileConfig(region_backend="eager"), **kwargs)


def _interrupted_and_not(folder: Path) -> dict[str, Any]:
    """Trains, saving sharded; resumes from that, saving full; resumes from that."""
    sharded, full = folder / "sharded.ckpt", folder / "full.ckpt"
    records = {}
    records["uninterrupted"], trainer = fit(ours("sharded"), SaveAt(sharded, SAVED_AFTER))
    trainer.save_checkpoint(folder / "end_sharded.ckpt")
    records["sharded"], trainer = fit(ours(), SaveAt(full, SAVED_AFTER + 1), resume=sharded)
    trainer.save_checkpoint(folder / "end_full.ckpt")
    states = [trainer.strategy.lightning_module_state_dict(), trainer.strategy.optimizer_state(trainer.optimizers[0])]
    assert all(bool(state) == (trainer.global_rank == 0) for state in states)
    records["full"] = fit(ours(), resume=full)[0]
    return records


def _resumed(*paths: Path) -> list[list[float]]:
    # Checkpoints know nothing of stages.
    return [fit(ours(stage=stage), resume=path)[0].losses for stage, path in zip((3, 2), paths, strict=True)]


@pytest.mark.timeout(400)
def test_resuming_is_exact_on_as_many_ranks_and_close_on_others(tmp_path: Path) -> None:
    sharded, full = tmp_path / "sharded.ckpt", tmp_path / "full.ckpt"
    records = run_ranks(_interrupted_and_not, 2, tmp_path)[0]
    whole = records["uninterrupted"]
    for name, skipped in (("sharded", SAVED_AFTER), ("full", SAVED_AFTER + 1)):
        assert records[name].losses == whole.losses[skipped:]
        for key, value in whole.params.items():
            assert torch.equal(records[name].params[key], value), key
        assert torch.equal(records[name].buffers["steps_seen"], torch.full((3,), float(STEPS)))
    assert all(path.suffix == ".ckpt" for path in tmp_path.iterdir())  # nothing temporary is left
    assert {path.name for path in sharded.iterdir()} == {".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp"}

    # Lightning's tool makes one file of the directory; its optimizer states are keyed by names.
    consolidated = tmp_path / "consolidated.ckpt"
    torch.save(_format_checkpoint(_load_distributed_checkpoint(sharded)), consolidated)
    for losses in run_ranks(_resumed, 3, sharded, consolidated)[0]:
        assert losses == pytest.approx(whole.losses[SAVED_AFTER:], rel=1e-6)

    # Plain Lightning goes on from the full one.
    record, trainer = fit("auto", resume=full)
    assert record.losses == pytest.approx(whole.losses[SAVED_AFTER + 1 :], rel=1e-6)
    # Its own file has the same structure, and a single module can be made of ours.
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    plain, saved = (torch.load(p) for p in (tmp_path / "plain.ckpt", full))
    assert saved.keys() == plain.keys()
    assert _structure(saved["state_dict"]) == _structure(plain["state_dict"])
    assert saved["state_dict"]._metadata == plain["state_dict"]._metadata
    assert _structure(saved["optimizer_states"]) == _structure(plain["optimizer_states"])
    assert saved["state_dict"]["embed.weight"].data_ptr() == saved["state_dict"]["head._orig_mod.weight"].data_ptr()
    module = Model.load_from_checkpoint(full)
    assert torch.equal(module.embed.weight, saved["state_dict"]["embed.weight"])

    # After the same steps both forms hold the same.
    end = torch.load(tmp_path / "end_full.ckpt")
    other = _format_checkpoint(_load_distributed_checkpoint(tmp_path / "end_sharded.ckpt"))
    torch.testing.assert_close(other["state_dict"], end["state_dict"], rtol=0, atol=0)
    by_name, by_number = other["optimizer_states"][0], end["optimizer_states"][0]
    for named, numbered in zip(by_name["param_groups"], by_number["param_groups"], strict=True):
        assert len(named["params"]) == len(numbered["params"]) > 0
        for name, number in zip(named["params"], numbered["params"], strict=True):
            pair = by_name["state"].get(name), by_number["state"].get(number)
            torch.testing.assert_close(*pair, rtol=0, atol=0)


def _structure(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: _structure(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_structure(v) for v in value]
    return type(value)
