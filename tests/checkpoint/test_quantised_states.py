"""Checkpoints of optimizers whose states are quantised (torchao's): states keep their form, for any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchao.optim
from cases import VOCAB, Base
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from multiprocess import run_ranks
from test_checkpoint import SAVED_AFTER, SaveAt, fit, ours
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit

from lightning_deepcompile import CompileConfig, DeepCompileStrategy

EVERYTHING = "TEST_ALL" in os.environ
WIDTH = 80
"""Of matrices of 25 blocks of 256 elements: rows of two or three ranks would end within a block."""


class Net(Base):
    optimizer_name = ""
    settings: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(1))

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)

    def configure_optimizers(self) -> Optimizer:
        return getattr(torchao.optim, self.optimizer_name)(self.parameters(), lr=1e-2, **self.settings)


class EightBits(Net):
    optimizer_name = "AdamW8bit"


class FourBits(Net):
    optimizer_name = "AdamW4bit"


class Fp8(Net):
    optimizer_name = "AdamWFp8"


class Rounded(Net):
    """Weights in bf16 alone, with stochastic rounding."""

    optimizer_name, settings = "_AdamW", {"bf16_stochastic_round": True}

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


class Divided(EightBits):
    """FSDP2 divides the states of its layers into whole blocks of two ranks."""

    fsdp2 = False

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64, bias=False)  # it cannot step on odd rows
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))

    def configure_model(self) -> None:
        for module in (self.embed, self.head, *self.layers) if self.fsdp2 else ():
            fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).unflatten(-1, (2, WIDTH)).sum(-2)
        return self.head(x)


class DividedByFsdp2(Divided):
    fsdp2 = True


class SaveAtStart(pl.Callback):
    """Saves what was loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def save_and_resume(folder: Path, nets: list[type[Net]]) -> dict[str, list[Any]]:
    """Trains, saving sharded; resumes from that, saving full; resumes from that."""
    records: dict[str, list[Any]] = {}
    for net in nets:
        name = net.__name__
        sharded, loaded, full = (folder / f"{name}.{kind}" for kind in ("sharded", "loaded", "full"))
        first = fit(ours("sharded", async_save=True), SaveAt(sharded, SAVED_AFTER), build=net)[0]
        second = fit(ours(), SaveAtStart(loaded), SaveAt(full, SAVED_AFTER + 1), resume=sharded, build=net)[0]
        records[name] = [first, second]
        if EVERYTHING:
            records[name].append(fit(ours(), resume=full, build=net)[0])
    return records


def resume(folder: Path, names: list[tuple[type[Net], str]]) -> list[list[float]]:
    """Resumes on another number of ranks, and saves what was loaded."""
    paths = [(net, folder / f"{net.__name__}.{kind}") for net, kind in names]
    return [
        fit(ours(), SaveAtStart(path.with_suffix(f"{path.suffix}.again")), resume=path, build=net)[0].losses
        for net, path in paths
    ]


def assert_same_states(actual: Path, expected: Path, *, packed_again: bool = False) -> None:
    one, other = (torch.load(path, weights_only=True)["optimizer_states"][0]["state"] for path in (actual, expected))
    assert one.keys() == other.keys()
    for number, entries in other.items():
        for name, value in entries.items():
            mine = one[number][name]
            assert type(mine) is type(value), name
            if packed_again and name != "step":
                mine, value = (torch.empty(value.shape).copy_(tensor) for tensor in (mine, value))
                torch.testing.assert_close(mine, value, rtol=0, atol=0.01 * float(value.abs().max()))
            else:
                for part, its in zip(parts(mine), parts(value), strict=True):
                    assert part.dtype == its.dtype and torch.equal(part.view(torch.uint8), its.view(torch.uint8)), name


def parts(value: Tensor) -> list[Tensor]:
    return [getattr(value, name) for name in ("codes", "scale", "qmap") if hasattr(value, name)] or [value.view(-1)]


@pytest.mark.parametrize(
    "nets",
    [
        pytest.param([EightBits], id="8 bits"),
        pytest.param([FourBits, Fp8, Rounded], id="4 bits, FP8, rounding", marks=pytest.mark.extensive),
    ],
)
def test_states_keep_their_bits_on_any_number_of_ranks(tmp_path: Path, nets: list[type[Net]]) -> None:
    records = run_ranks(save_and_resume, 3, tmp_path, nets, timeout=300.0)[0]
    cases = [(net, kind) for net in nets for kind in ("full", "sharded")]
    if EightBits in nets and EVERYTHING:
        consolidated = tmp_path / "EightBits.consolidated"
        torch.save(_format_checkpoint(_load_distributed_checkpoint(consolidated.with_suffix(".sharded"))), consolidated)
        cases.append((EightBits, "consolidated"))
    others = run_ranks(resume, 2, tmp_path, cases, timeout=300.0)[0]
    for (net, kind), losses in zip(cases, others, strict=True):
        first, *resumed = records[net.__name__]
        skipped = SAVED_AFTER + (kind == "full")
        if net is not Rounded:  # whose random numbers are others
            if kind != "full" or EVERYTHING:
                record = resumed[kind == "full"]
                assert record.losses == first.losses[skipped:], kind
                assert all(torch.equal(record.params[key], value) for key, value in first.params.items()), kind
            assert losses == pytest.approx(first.losses[skipped:], rel=1e-4), kind
        path = tmp_path / f"{net.__name__}.{kind}"
        again, expected = path.with_suffix(f".{kind}.again"), path.with_suffix(".full" if kind == "full" else ".loaded")
        # Lightning's tool unpacks states, which are quantised again.
        assert_same_states(again, expected, packed_again=kind == "consolidated")
    for net in nets:
        states = torch.load(tmp_path / f"{net.__name__}.full", weights_only=True)["optimizer_states"][0]
        net().configure_optimizers().load_state_dict(states)  # as one process would have written it


def save_by_fsdp2(folder: Path) -> list[float]:
    """Trains under FSDP2, saving sharded."""
    theirs = ModelParallelStrategy(2, 1, save_distributed_checkpoint=True)
    record = fit(theirs, SaveAt(folder / "Divided.sharded", SAVED_AFTER), build=DividedByFsdp2)[0]
    return record.losses


@pytest.mark.extensive
def test_states_that_fsdp2_divided_are_quantised_as_whole_tensors(tmp_path: Path) -> None:
    losses = run_ranks(save_by_fsdp2, 2, tmp_path)[0]
    for (resumed,) in run_ranks(resume, 3, tmp_path, [(Divided, "sharded")]):
        assert resumed == pytest.approx(losses[SAVED_AFTER:], rel=1e-3)
    state = torch.load(tmp_path / "Divided.sharded.again", weights_only=True)["optimizer_states"][0]["state"]
    for number in (2, 3):
        assert all(type(state[number][name]) is OptimState8bit for name in ("exp_avg", "exp_avg_sq"))


class Unquantised(Net):
    """Keeps fp32 states, and steps on shards."""

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SaveBoth(pl.Callback):
    """Saves in both forms."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == SAVED_AFTER:
            for kind in ("full", "sharded"):
                trainer.strategy._checkpoints.sharded = kind == "sharded"
                trainer.save_checkpoint(self.path.with_suffix(f".{kind}"))


def save_both(path: Path, net: type[Net]) -> list[float]:
    return fit(ours(), SaveBoth(path), build=net)[0].losses


def values_of(path: Path) -> dict[tuple[int, str], Tensor]:
    states = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    return {
        (number, name): torch.empty(value.shape).copy_(value)
        for number, entries in states.items()
        for name, value in entries.items()
    }


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (EightBits, Unquantised),
        *(
            pytest.param(*classes, marks=pytest.mark.extensive)
            for classes in ((Unquantised, EightBits), (EightBits, FourBits))
        ),
    ],
)
@pytest.mark.parametrize(
    "worlds", [(2, 3), *(pytest.param(worlds, marks=pytest.mark.extensive) for worlds in ((1, 2), (2, 1)))], ids=str
)
def test_another_class_resumes_with_the_same_values(
    saved: type[Net], resumed: type[Net], worlds: tuple[int, int], tmp_path: Path
) -> None:
    """Classes step on shards where states were on owner ranks, or the other way round."""
    path, kinds = tmp_path / resumed.__name__, ("full", "sharded")
    losses = run_ranks(save_both, worlds[0], path, saved)[0]
    results = run_ranks(resume, worlds[1], tmp_path, [(resumed, kind) for kind in kinds])[0]
    expected = values_of(path.with_suffix(".full"))
    # What is not quantised again has the same bits; a code of four bits is one of 16.
    off = {Unquantised: 0.0, EightBits: 0.01, FourBits: 0.12}[resumed]
    form = {Unquantised: Tensor, EightBits: OptimState8bit, FourBits: OptimState4bit}[resumed]
    for kind, its in zip(kinds, results, strict=True):
        again = path.with_suffix(f".{kind}.again")
        actual = values_of(again)
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, rtol=0, atol=off * float(value.abs().max()))
        if resumed is not FourBits:
            assert its == pytest.approx(losses[SAVED_AFTER:], rel=1e-4), kind
        states = torch.load(again, weights_only=True)["optimizer_states"][0]["state"]
        assert type(states[2]["exp_avg"]) is form


def test_quantised_states_stay_on_the_device() -> None:
    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager", offload=["states"]))
    with pytest.raises(
        ValueError, match=r"offload=.'states'.*AdamW8bit \(it keeps quantised states\) stay on the device"
    ):
        fit(strategy, build=EightBits)
