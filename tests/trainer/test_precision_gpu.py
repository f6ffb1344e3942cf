"""Every precision on GPUs: accumulated, clipped, saved and resumed training follows that of one without a strategy."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import ROWS, Base, Record, Recorder, Tokens, assert_same_training, gpt, llama
from multiprocess import GPU_RANKS, devices, run_ranks
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

WORLD, ACCUMULATE, BATCHES = GPU_RANKS, 2, 4  # per epoch; there are two epochs, and a checkpoint in between
BATCH = WORLD * max(1, 2 * ROWS // WORLD)  # of all ranks together: more rows are learnt more slowly
MODELS: dict[str, Callable[[], Base]] = {"gpt": gpt(), "llama": llama(layers=2)}

# Relative differences of losses. In fp32 only sums are added up in another order. Elsewhere values are rounded at other
# places (gathered parameters and what they touch are 16 bits wide, where autocast alone keeps norms, embeddings and
# gradients in fp32; the mean over ranks is rounded, too). Such errors have either sign in each of the many terms of a
# loss: it may differ by one unit in the last place, 2**-8 for bf16 and 2**-11 for fp16, and falls by far more.
TOLERANCES = {"32-true": 1e-5, "bf16-mixed": 2**-8, "bf16-true": 2**-8, "16-mixed": 2**-11, "16-true": 2**-11}


@dataclass
class Outcome:
    """The outcome of a training; the scale of the loss and the checkpoint's tensors if there are any."""

    record: Record
    scale: float | None
    stored: set[torch.dtype]


def _steep(model: str) -> Base:
    """A model whose loss is computed in fp32 and falls fast."""
    torch.manual_seed(3)
    module = MODELS[model]()

    class Steep(type(module)):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.logits(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.7, momentum=0.5)

    module.__class__ = Steep
    return module


def _trainer(strategy: Any, accelerator: str, ranks: int, precision: str, epochs: int) -> tuple[pl.Trainer, Record]:
    recorder = Recorder()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        **devices(ranks),
        precision=precision,
        max_epochs=epochs,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[recorder],
    )
    return trainer, recorder.record


def _data(rank: int, world: int) -> DataLoader[Tensor]:
    rows = Tokens(1, BATCH, rank, world).data.repeat(BATCHES, 1)
    return DataLoader(rows, batch_size=BATCH // world)


def _alone(model: str, accelerator: str, precision: str) -> Outcome:
    trainer, record = _trainer("auto", accelerator, 1, precision, 2)
    trainer.fit(_steep(model), _data(0, 1))
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return Outcome(record, None if scaler is None else scaler.get_scale(), set())


def _sharded(model: str, accelerator: str, precision: str, path: Path) -> Outcome:
    """Trains for an epoch, saves, forgets everything, and goes on from the checkpoint; nothing is compiled again."""
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    strategy = DeepCompileStrategy(
        compile=CompileConfig(region_backend="eager", schedule=None),
        timeout=timedelta(seconds=60),
        state_dict_type="full" if model == "gpt" else "sharded",
    )
    data, module = _data(int(os.environ["RANK"]), WORLD), _steep(model)
    trainer, record = _trainer(strategy, accelerator, WORLD, precision, 1)
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data, ckpt_path=path)
    assert strategy.summary().graphs == 1
    scaler = trainer.precision_plugin.scaler
    dtypes = {parameter.dtype for parameter in module.parameters()}
    return Outcome(record, None if scaler is None else scaler.get_scale(), dtypes)


def _sharded_all(accelerator: str, folder: str) -> dict[tuple[str, str], Outcome]:
    return {
        (model, precision): _sharded(model, accelerator, precision, Path(folder, f"{model}-{precision}.ckpt"))
        for model in MODELS
        for precision in TOLERANCES
    }


def _check(accelerator: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(_sharded_all, WORLD, accelerator, folder, timeout=450)
    for (model, precision), actual in ranks[0].items():
        expected = _alone(model, accelerator, precision)
        where, tolerance = f"{model}, {precision}", TOLERANCES[precision]
        losses, alone = actual.record.losses, expected.record.losses
        assert losses == ranks[-1][model, precision].record.losses
        assert losses == pytest.approx(alone, rel=tolerance), where
        assert len(losses) == 2 * BATCHES and losses[-1] < 0.9 * losses[0], where
        wanted = {"16-true": torch.float16, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
        assert actual.stored == {wanted}, where
        assert actual.scale == expected.scale and (actual.scale is None) == (precision != "16-mixed"), where
        norms = [sum(float(g.float().square().sum()) for g in step.values() if g is not None) ** 0.5
                 for step in actual.record.grads]  # fmt: skip
        assert max(norms) > 0.5, f"{where}: nothing was clipped"
        if precision == "32-true":
            assert_same_training(actual.record, expected.record, params=True)


def test_every_precision_follows_one_gpu() -> None:
    _check("gpu")
