"""Broken, foreign and unsafe checkpoints raise on every rank; hooks and options of loading do what Lightning says."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from multiprocess import run_ranks
from test_checkpoint import Model, fit, ours
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.utils.data import DataLoader

from lightning_deepcompile.checkpoint.location import META
from lightning_deepcompile.checkpoint.sharded import _MetadataUnpickler


class Hooked(Model):
    """Was saved under other names, and puts that right when it is loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["one_row"] = state.pop("renamed") * 2
        state["scale"] = torch.tensor(0.25)


def _broken(folder: Path) -> None:
    """Everything that can be wrong with a checkpoint, on two ranks that are in the middle of a run."""
    rank = int(os.environ["RANK"])
    _, trainer = fit(ours("sharded"))
    strategy, module = trainer.strategy, trainer.lightning_module
    sharded, full = folder / "sharded", folder / "full"
    trainer.save_checkpoint(sharded)
    strategy._checkpoints.sharded = False
    trainer.save_checkpoint(full)

    def variant(name: str, of: Path) -> Path:
        path = folder / name
        if rank == 0:
            (shutil.copytree if of.is_dir() else shutil.copy)(of, path)
        strategy.barrier()
        return path

    def load(path: Path, **kwargs: Any) -> dict[str, Any]:
        strategy.barrier()
        return strategy.load_checkpoint(path, **kwargs)

    # Not whole.
    with pytest.raises(FileNotFoundError, match="does not point to a valid checkpoint: there is nothing"):
        load(folder / "nothing")
    with pytest.raises(ValueError, match="interrupted save"):
        load(folder)
    cut = variant("cut", full)
    if rank == 0:
        os.truncate(cut, cut.stat().st_size // 2)
    with pytest.raises(ValueError, match="cannot be read"):
        load(cut)
    cut = variant("cut_sharded", sharded)
    if rank == 0:
        os.truncate(cut / "__1_0.distcp", 100)
    with pytest.raises(ValueError, match=r"'__1_0.distcp' is truncated \(100 bytes"):
        load(cut)
    if rank == 0:
        (cut / "__1_0.distcp").unlink()
    with pytest.raises(ValueError, match="'__1_0.distcp' is missing"):
        load(cut)
    if rank == 0:
        (cut / ".metadata").unlink()
    with pytest.raises(ValueError, match="no file '.metadata'"):
        load(cut)

    # Not safe.
    unsafe = variant("unsafe", sharded)
    if rank == 0:
        torch.save({"hyper_parameters": Fraction(1, 3)}, unsafe / META)
        torch.save({"state_dict": {}, "hyper_parameters": Fraction(1, 3)}, folder / "unsafe_full")
    for path in (unsafe, folder / "unsafe_full"):
        with pytest.raises(pickle.UnpicklingError, match="add_safe_globals"):
            load(path)
        assert load(path, weights_only=False)["hyper_parameters"] == Fraction(1, 3)
    if rank == 0:
        shutil.copy(sharded / META, unsafe / META)
        (unsafe / ".metadata").write_bytes(pickle.dumps(Fraction(1, 3)))
    with pytest.raises(pickle.UnpicklingError, match="fractions.Fraction"):
        load(unsafe)

    # Not for this model or these optimizers.
    for path in (sharded, full):
        checkpoint = load(path)
        state = checkpoint["state_dict"]
        other = {**state, "more.weight": torch.ones(2)}
        other["lost"] = other.pop("one_row")
        with pytest.raises(RuntimeError, match=r'(?s)Missing.*"one_row".*Unexpected.*"more.weight"'):
            strategy.load_model_state_dict({"state_dict": other})
        with pytest.raises(RuntimeError, match="size mismatch for one_row"):
            strategy.load_model_state_dict({"state_dict": {**state, "one_row": torch.ones(3, 13)}})
        strategy.load_model_state_dict({"state_dict": other}, strict=False)
        optimizer_state = checkpoint["optimizer_states"][0]
        fewer = {**optimizer_state, "param_groups": optimizer_state["param_groups"][:1]}
        with pytest.raises(ValueError, match="1 parameter groups, yours 2"):
            strategy.load_optimizer_state_dict({"optimizer_states": [fewer]})
        moved = copy.deepcopy(optimizer_state["param_groups"])
        moved[0]["params"].append(moved[1]["params"].pop())
        with pytest.raises(ValueError, match="Parameter group 0"):
            strategy.load_optimizer_state_dict({"optimizer_states": [{**optimizer_state, "param_groups": moved}]})
        optimizers, strategy.optimizers = strategy.optimizers, strategy.optimizers * 2
        with pytest.raises(RuntimeError, match="2 optimizers but the checkpoint contains 1 optimizers to load"):
            load(path)
        strategy.optimizers = optimizers
        # One rank's trouble is everybody's.
        if rank == 1:
            del state["one_row"]
        with pytest.raises(RuntimeError, match="Missing key" if rank == 1 else "failed on rank 1"):
            strategy.load_model_state_dict(checkpoint)

    # Names with the mark of a compiled module.
    state = load(full)["state_dict"]
    strategy.load_model_state_dict({"state_dict": {f"_orig_mod.{name}": value for name, value in state.items()}})
    strategy.load_model_state_dict({"state_dict": {n.replace("_orig_mod.", ""): v for n, v in state.items()}})
    torch.testing.assert_close(module.one_row.full_tensor(), state["one_row"], rtol=0, atol=0)

    # A loss scaler's state is found under other strategies' names, and they find ours.
    scaled = {**load(full), "FSDPPrecision": {"scale": 2.0}}
    strategy.save_checkpoint(scaled, folder / "scaled")
    scaled = load(folder / "scaled")
    assert scaled["DeepCompilePrecision"] == {"scale": 2.0}
    strategy.save_checkpoint(scaled, folder / "scaled")
    assert load(folder / "scaled")["MixedPrecision"] == {"scale": 2.0}

    # Optimizer states that are no rows of the parameter.
    optimizer = strategy.optimizers[0]
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter]["same"] = torch.arange(3.0)
    optimizer.state[parameter]["note"] = "text"
    kept = strategy.optimizer_state(optimizer)
    if rank == 0:
        number = kept["param_groups"][0]["params"][0]
        assert kept["state"][number]["same"].tolist() == [0, 1, 2] and kept["state"][number]["note"] == "text"
    optimizer.state[parameter]["same"] = torch.arange(3.0) + rank
    with pytest.raises(RuntimeError, match="'same' of .* differs between ranks"):
        strategy.optimizer_state(optimizer)
    del optimizer.state[parameter]["same"]

    # Where to save.
    with pytest.raises(IsADirectoryError, match="exists and is a directory"):
        trainer.save_checkpoint(folder)
    with pytest.raises(TypeError, match=r"DeepCompileStrategy.save_checkpoint\(..., storage_options=...\)` is not"):
        trainer.save_checkpoint(folder / "x", storage_options={})
    for is_sharded in (False, True):
        strategy._checkpoints.sharded = is_sharded
        with pytest.raises(RuntimeError if rank else OSError, match="failed on rank 0" if rank else ""):
            trainer.save_checkpoint(full / "below_a_file")
    unpicklable = r"local object '_broken\.<locals>\.<lambda>'"  # what Python says of it differs between versions
    with pytest.raises(RuntimeError if rank else AttributeError, match="failed on rank 0" if rank else unpicklable):
        strategy.save_checkpoint({"state_dict": {}, "hyper_parameters": lambda: None}, folder / "unpicklable")
    trainer.save_checkpoint(full)
    assert (full / META).is_file()
    strategy._checkpoints.sharded = False
    trainer.save_checkpoint(full)
    assert full.is_file()
    strategy.barrier()
    for path in (full, sharded):
        strategy.remove_checkpoint(path)
        strategy.barrier()
        assert not path.exists()

    _load_hooks(folder, trainer)


def _load_hooks(folder: Path, trainer: pl.Trainer) -> None:
    for form in ("sharded", "full"):
        trainer.strategy._checkpoints.sharded = form == "sharded"
        before = trainer.lightning_module.one_row.full_tensor()
        state = trainer.strategy.lightning_module_state_dict()
        if state:
            state["renamed"] = state.pop("one_row")
        trainer.strategy.save_checkpoint({"state_dict": state, "pytorch-lightning_version": "2.6.0"}, folder / form)
        rows = DataLoader(torch.zeros(2, 5, dtype=torch.long))
        trainer.validate(Hooked(), rows, ckpt_path=folder / form, verbose=False)
        module = trainer.lightning_module
        torch.testing.assert_close(module.one_row.full_tensor(), before * 2)
        assert float(module.scale) == 0.25


@pytest.mark.timeout(300)
def test_whatever_may_come_as_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(_broken, 2, tmp_path)


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"state_dict_type='none'\): use 'full' or 'sharded'"):
        ours("none")
    with pytest.raises(ValueError, match="contradict"):
        ours("sharded", save_distributed_checkpoint=False)
    assert ours(save_distributed_checkpoint=True)._checkpoints.sharded


class _ByName:
    """Is pickled as an attribute of something, as Python 3.11.0 to 3.11.3 pickle members of enums."""

    def __init__(self, of: Any, name: str) -> None:
        self.reduced = getattr, (of, name)

    def __reduce__(self) -> Any:
        return self.reduced


def test_members_of_enums_are_read_and_no_other_attributes() -> None:
    def load(of: Any, name: str) -> Any:
        return _MetadataUnpickler(io.BytesIO(pickle.dumps(_ByName(of, name)))).load()

    assert load(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT") is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    for of, name in ((torch.Size, "__class__"), (_MEM_FORMAT_ENCODING, "mro")):
        with pytest.raises(pickle.UnpicklingError, match=name):
            load(of, name)
