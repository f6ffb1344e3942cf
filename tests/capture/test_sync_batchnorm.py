"""Synchronized batch norm on two ranks: statistics, and gradients through them, of the concatenated batch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from cases import VOCAB, Base, Record, assert_close, assert_same_training, train
from multiprocess import run_ranks
from torch import Tensor, fx, nn

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.program.normalize import normalize
from lightning_deepcompile.runtime import load_extension

WIDTH = 12


class Branches(Base):
    """Layers of equal size side by side, which nothing orders; one without parameters, one without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm1d(WIDTH),
                nn.BatchNorm1d(WIDTH, momentum=None),
                nn.BatchNorm1d(WIDTH, affine=False),
                nn.BatchNorm1d(WIDTH, track_running_stats=False),
            ]
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        branches = [
            norm(layer(x).transpose(1, 2) * (number + 1))
            for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True))
        ]
        first, *others = (torch.tanh(branch) for branch in branches)
        for other in others:
            first = first + other.square() * 0.5
        return self.head(first.transpose(1, 2) + x)


class Converted(Branches):
    """Of a user who converts the model without the Trainer's help."""

    def configure_model(self) -> None:
        if not isinstance(self.norms[0], nn.SyncBatchNorm):
            self.norms = nn.SyncBatchNorm.convert_sync_batchnorm(self.norms)


def _look(trainer: Any) -> tuple[int, list[str], float]:
    module = trainer.lightning_module.eval()
    tokens = torch.arange(10, device=module.device).view(2, 5)
    with torch.no_grad():
        whole = float(module.logits(tokens).float().square().sum())
    graphs = trainer.strategy.summary().graphs if trainer.world_size > 1 else 0
    return graphs, [type(norm).__name__ for norm in module.norms], whole


def _train_all(accelerator: str) -> dict[str, Record]:
    def run(build: type[Base], backend: str, stage: int = 3, **options: Any) -> Record:
        config = CompileConfig(region_backend=backend, schedule=None)
        return train(
            build, DeepCompileStrategy(stage=stage, compile=config), world_size=2, rank=int(os.environ["RANK"]),
            inspect=_look, accelerator=accelerator, **options,
        )  # fmt: skip

    return {
        "by the Trainer": run(Branches, "inductor", sync_batchnorm=True),
        "by the user, stage 1": run(Converted, "eager", stage=1),
    }


def check(accelerator: str, timeout: float) -> None:
    """Trains on two ranks, and alone with plain batch norm, and compares everything."""
    expected = train(Branches, "auto", world_size=1, rank=0, data_world=2, inspect=_look, accelerator=accelerator)
    for results in run_ranks(_train_all, 2, accelerator, timeout=timeout):
        for name, record in results.items():
            assert_same_training(record, expected, params=True)
            for key, value in expected.buffers.items():
                assert_close(record.buffers[key], value, f"{name}: {key}")
            graphs, kinds, whole = record.extra
            assert graphs == 1 and all("SyncBatchNorm" in kind for kind in kinds), f"{name}: {graphs}, {kinds}"
            assert whole == pytest.approx(expected.extra[2], rel=1e-5)


@pytest.mark.timeout(280)
def test_equals_batch_norm_on_the_whole_batch() -> None:
    check("cpu", 270)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_equals_batch_norm_on_the_whole_batch_on_gpus() -> None:
    check("gpu", 280)


def test_statistics_keep_their_order() -> None:
    """Two that are independent in the graph: the second one waits for the first."""
    load_extension()
    ops = torch.ops.lightning_deepcompile
    graph = fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    first = graph.call_function(ops.gather_statistics.default, (left, "0", 2))
    second = graph.call_function(ops.sum_statistics_gradients.default, (right, "0"))
    graph.output((second, first))
    for node, shape in ((left, (5,)), (right, (2, 5)), (first, (2, 5)), (second, (5,))):
        node.meta["val"] = torch.empty(shape)
    normalize(graph)
    assert second.kwargs == {"after": first} and first.kwargs == {}


class OneRow(Branches):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.norms[0](self.embed(batch[:1, 0])).sum()


@pytest.mark.parametrize("sync", [False, True])
def test_one_value_per_channel_is_refused_as_by_pytorch(sync: bool) -> None:
    messages = []
    for strategy in ("auto", DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))):
        options = {"sync_batchnorm": sync} if strategy != "auto" else {}
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as caught:
            train(OneRow, strategy, world_size=1, rank=0, **options)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "training_step" in [entry.name for entry in caught.traceback]
