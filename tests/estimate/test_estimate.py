"""Predictions of steps that run nowhere: the programs and numbers of training, and errors that say what to do."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gpt import GPT
from multiprocess import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.estimate.estimate import StepEstimate
from lightning_deepcompile.estimate.tracing import EstimateError
from lightning_deepcompile.plan.memory_need import MemoryNeed
from lightning_deepcompile.trainer.estimate_command import main


def _small() -> GPT:
    return GPT(layers=3, width=64, heads=2)


def _strategy(**settings: Any) -> DeepCompileStrategy:
    return DeepCompileStrategy(compile=CompileConfig(region_backend="eager", **settings))


def _trained(folder: str) -> tuple[dict[str, str], MemoryNeed | None, float]:
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=_strategy(), max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(_small(), DataLoader(torch.randint(0, 256, (8, 33)), batch_size=4))
    strategy = trainer.strategy
    assert isinstance(strategy, DeepCompileStrategy)
    engine = strategy.engine
    return strategy.programs(), engine.tuner._foresight.need, engine.capture.frames.flops_done


def test_an_estimate_has_the_programs_and_the_needs_of_two_ranks_that_train(tmp_path: Path) -> None:
    (programs, need, operations), other = run_ranks(_trained, 2, str(tmp_path))
    assert other[0] == programs
    module = _small()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    estimate = _strategy().estimate(module, torch.zeros(4, 33, dtype=torch.long), ranks=2, device="cpu")
    assert estimate.programs == programs
    assert estimate.traced == need
    assert estimate.operations == operations
    assert estimate.fits and not estimate.moves
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(hasattr(parameter, "device_mesh") for parameter in module.parameters())


class Wide(pl.LightningModule):
    """200 million parameters, without memory until `configure_model`; half of them are not compiled if so wished."""

    def __init__(self, *, uncompiled: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.uncompiled = uncompiled

    def configure_model(self) -> None:
        if not self.blocks:
            self.blocks.extend(nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(6))

    def training_step(self, batch: Tensor, number: int = 0) -> Tensor:
        if self.uncompiled:
            batch = self.apart(batch)
        for block in self.blocks[3:] if self.uncompiled else self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()

    @torch.compiler.disable
    def apart(self, batch: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            batch = batch + block(batch)
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@functools.cache
def _estimate(memory: str | int, ranks: int = 8) -> StepEstimate:
    return _strategy().estimate(Wide(), torch.zeros(4096, 2048), ranks=ranks, device_memory=memory)


def test_memory_follows_from_ranks_and_moves_from_memory() -> None:
    roomy, more = _estimate("80GiB"), _estimate("80GiB", ranks=16)
    shards = 6 * 2 * 2048 * 8192 * 4
    for estimate, ranks in ((roomy, 8), (more, 16)):
        standing = estimate.need.standing
        assert estimate.fits and not estimate.moves
        assert standing.shards == pytest.approx(shards / ranks, rel=0.01)
        assert standing.states == pytest.approx(2 * standing.shards, rel=0.01)  # as AdamW keeps on a small parameter
        assert standing.gradients <= standing.shards
    assert 0 < roomy.compute_seconds <= roomy.seconds < 1

    def device_with(budget: int) -> int:
        return int((budget + (600 << 20)) / 0.9) + 1  # a tenth is left, and what libraries take

    tight = _estimate(device_with((roomy.least + roomy.peak) // 2))
    assert tight.fits and tight.peak <= tight.budget < roomy.peak
    assert any("saved tensors" in move for move in tight.moves)
    alone = _estimate("1.2GiB", ranks=1)  # gradients alone take more
    assert not alone.fits and alone.least > alone.budget
    assert alone.ranks_needed != 1 and "does not fit" in str(alone) and "what would do" in str(alone)


class Quantised(Wide):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit

        return AdamW8bit(self.parameters())


def test_states_of_one_byte_count_as_such() -> None:
    estimate = _strategy().estimate(Quantised(), torch.zeros(64, 2048), ranks=8, device_memory="80GiB")
    standing = estimate.need.standing
    assert standing.states == pytest.approx(2.03 / 4 * standing.shards, rel=0.01)


def test_what_is_not_compiled_is_counted_by_blocks() -> None:
    batch = torch.zeros(512, 2048)
    compiled, apart = (
        _strategy().estimate(Wide(uncompiled=uncompiled), batch, ranks=8) for uncompiled in (False, True)
    )
    assert not compiled.notes
    (note,) = [note for note in apart.notes if "apart" in note]
    assert "counted by blocks" in note
    # Two blocks stay gathered, and each of three saves its wide activations for backward.
    block = 2 * 2048 * 8192 * 4
    assert apart.need.standing.other >= 2 * block + 3 * 512 * 8192 * 4


class Peeks(Wide):
    """Builds as its own weights say."""

    def configure_model(self) -> None:
        super().configure_model()
        if float(self.blocks[0][0].weight.sum()) > 0:
            self.more = nn.Linear(2, 2)


class Manual(Wide):
    """Steps by itself."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, number: int = 0) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 1.0)
        optimizer.step()
        self.lr_schedulers().step(loss)


class Branches(Wide):
    """Asks for a value in the step."""

    def training_step(self, batch: Tensor) -> Tensor:
        loss = super().training_step(batch)
        return loss if loss.item() > 0 else loss * 2


class NoLoss(Wide):
    """Trains nothing."""

    def training_step(self, batch: Tensor) -> None:
        super().training_step(batch)


def fine() -> tuple[Wide, Tensor]:
    return Wide(), torch.zeros(8, 2048)


def nothing() -> None:
    """Returns nothing."""


def without_batch() -> Wide:
    return Wide()


def fails() -> None:
    raise OSError("no such file: weights.bin")


not_a_function = 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["test_estimate"], ["expected module:function"]),
        (["no_such_module:build"], ["no module 'no_such_module'"]),
        (["test_estimate:absent"], ["has no function 'absent'", "fine"]),
        (["test_estimate:not_a_function"], ["has no function 'not_a_function'"]),
        (["test_estimate:nothing"], ["returned nothing", "(module, batch)"]),
        (["test_estimate:without_batch"], ["example_input_array"]),
        (["test_estimate:fails"], ["no such file: weights.bin", "no memory"]),
        (["test_estimate:fine", "--ranks", "0"], ["ranks=0", "from 1 to"]),
        (["test_estimate:fine", "--device-memory", "80"], ["device_memory", "'80'", "80GiB"]),
        (["test_estimate:fine", "--device", "TPU"], ["'TPU'", "H100"]),
    ],
)
def test_errors_of_the_command_name_the_argument(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Peeks, "Peeks cannot be built without memory"),
        (NoLoss, "returns no loss"),
    ],
)
def test_modules_that_cannot_be_estimated_say_why(kind: type[Wide], words: str) -> None:
    with pytest.raises(EstimateError, match=words):
        _strategy().estimate(kind(), torch.zeros(8, 2048), ranks=2)


def test_a_step_that_steps_its_optimizer_itself_needs_the_same() -> None:
    batch = torch.zeros(8, 2048)
    expected, manual = (_strategy().estimate(kind(), batch, ranks=2) for kind in (Wide, Manual))
    assert (manual.need, manual.peak, manual.operations) == (expected.need, expected.peak, expected.operations)
    assert manual.seconds == pytest.approx(expected.seconds)
    assert any("steps its optimizers itself" in note for note in manual.notes) and not expected.notes


def test_replicas_share_nothing() -> None:
    batch = torch.zeros(8, 2048)
    pair = _strategy().estimate(Wide(), batch, ranks=2)
    config = CompileConfig(region_backend="eager")
    hybrid = DeepCompileStrategy(device_mesh=(8, 2), compile=config).estimate(Wide(), batch, ranks=16)
    assert (hybrid.need, hybrid.peak, hybrid.programs) == (pair.need, pair.peak, pair.programs)
    assert hybrid.seconds > pair.seconds, "gradients are averaged over nodes"
    named = DeepCompileStrategy(sharding_strategy="HYBRID_SHARD", compile=config).estimate(Wide(), batch, ranks=16)
    assert named.need == _strategy().estimate(Wide(), batch, ranks=8).need, "the ranks of a node share"
    for mesh, words in (((2, 2), "must multiply"), ("auto", "needs running ranks")):
        with pytest.raises(ValueError, match=words):
            DeepCompileStrategy(device_mesh=mesh, compile=config).estimate(Wide(), batch, ranks=16)


def test_the_command_prints_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    main(["test_estimate:fine", "--ranks", "2", "--device", "h200", "--precision", "32-true"])
    told = capsys.readouterr().out
    assert "0.20 billion parameters on 2 ranks of H200" in told and "fits as it is" in told and "ms" in told


class WithoutMemory(Wide):
    """Its blocks are built on the meta device."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            super().configure_model()


def test_a_module_on_the_meta_device_needs_the_same() -> None:
    estimate = _strategy().estimate(WithoutMemory(), torch.zeros(4096, 2048), ranks=8, device_memory="80GiB")
    assert estimate.need == _estimate("80GiB").need
