"""Hybrid sharding on 2 x 2 ranks: equal to an unsharded process, and checkpoints for any ranks, however they share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, Base, Record, assert_same_training, train
from lightning.pytorch import Trainer
from multiprocess import run_ranks, said
from test_checkpoint import SAVED_AFTER, SaveAt, fit, ours
from test_handover import Small
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from lightning_deepcompile import CompileConfig, DeepCompileStrategy

# Model, ZeRO stage, micro-batches per step, clipping by norm.
Run = tuple[str, int, int, float | None]
RUNS: list[Run] = [("small", 3, 2, 0.05), ("small", 2, 2, None)]
if "TEST_ALL" in os.environ:  # all are trained in one launch
    RUNS += [("gpt_tied", 2, 2, None), ("skipped", 1, 2, None)]
MODELS = {**CASES, "small": Small}


def _inspect(trainer: Trainer) -> dict[str, Any]:
    engine = trainer.strategy.engine
    parameter = engine.model.parameters[0]
    return {
        "shard": (parameter.layout.rows_of(engine.model.ranks.shard_rank), parameter.dtensor.placements),
        "summary": str(trainer.strategy.summary()).splitlines()[1].split(maxsplit=1)[1],
    }


def _train_all(accelerator: str = "cpu", mesh: tuple[int, int] = (2, 2)) -> list[Record]:
    rank = int(os.environ["RANK"])

    def different(case: str) -> Base:
        torch.manual_seed(3 + rank)  # all shall start with rank 0's values, the replicas too
        return MODELS[case]()

    return [
        train(
            lambda case=case: different(case),
            DeepCompileStrategy(stage=stage, device_mesh=mesh, compile=CompileConfig(region_backend="eager")),
            world_size=mesh[0] * mesh[1],
            rank=rank,
            steps=3,
            accumulate=accumulate,
            gradient_clip_val=clip,
            inspect=_inspect,
            accelerator=accelerator,
        )
        for case, stage, accumulate, clip in RUNS
    ]


def _save(folder: Path, accelerator: str = "cpu") -> Record:
    save = SaveAt(folder / "sharded.ckpt", SAVED_AFTER)
    record, trainer = fit(ours("sharded", device_mesh=(2, 2)), save, accelerator=accelerator)
    trainer.save_checkpoint(folder / "end.ckpt")
    full = SaveAt(folder / "full.ckpt", SAVED_AFTER + 1)
    again, _ = fit(ours(device_mesh=(2, 2)), full, resume=folder / "sharded.ckpt", accelerator=accelerator)
    assert all(torch.equal(again.params[name], value) for name, value in record.params.items())
    # As many ranks, which now all share.
    spread, other = fit(ours(), resume=folder / "sharded.ckpt", accelerator=accelerator)
    assert (trainer.strategy.engine.model.ranks.shards, other.strategy.engine.model.ranks.shards) == (2, 4)
    for key, value in record.params.items():
        torch.testing.assert_close(spread.params[key], value, rtol=1e-6, atol=1e-6)
    return record


def _resume(folder: Path, accelerator: str = "cpu") -> list[Record]:
    return [fit(ours(), resume=folder / name, accelerator=accelerator)[0] for name in ("sharded.ckpt", "full.ckpt")]


def _on_four_ranks(folder: Path) -> tuple[list[Record], Record]:
    return _train_all(), _save(folder)


def _on_two_ranks(folder: Path) -> tuple[list[Record], list[Record], str]:
    rank, compile = int(os.environ["RANK"]), CompileConfig(region_backend="eager")
    resumed = _resume(folder)
    replicas = init_device_mesh("cpu", (2, 1))  # nothing is shared
    one_node = DeepCompileStrategy(sharding_strategy="HYBRID_SHARD", compile=compile)  # everything is
    strategies = [DeepCompileStrategy(device_mesh=replicas, compile=compile), one_node]
    trained = [train(Small, strategy, world_size=2, rank=rank, steps=2) for strategy in strategies]
    assert one_node.stage == 3 and one_node.engine.model.ranks.shards == 2
    with pytest.raises(ValueError, match="has a single dimension"):
        DeepCompileStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"device_mesh=\(1, 3\)\): that is 3 ranks, and there are 2") as error:
        train(Small, DeepCompileStrategy(device_mesh=(1, 3)), world_size=2, rank=rank)
    return resumed, trained, str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid")


@pytest.fixture(scope="module")
def four(folder: Path) -> list[tuple[list[Record], Record]]:
    return run_ranks(_on_four_ranks, 4, folder, timeout=350)


@pytest.fixture(scope="module")
def two(four: Any, folder: Path) -> list[tuple[list[Record], list[Record], str]]:
    return run_ranks(_on_two_ranks, 2, folder, timeout=200)


pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("hybrid")]


def test_equals_unsharded(four: list[tuple[list[Record], Record]]) -> None:
    _check([records for records, _ in four], "cpu", (2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("mesh", [(2, 2), (2, 4), (4, 2)])
def test_equals_unsharded_on_gpus(mesh: tuple[int, int]) -> None:
    _check(run_ranks(_train_all, mesh[0] * mesh[1], "gpu", mesh, timeout=350), "gpu", mesh)


def _check(ranks: list[list[Record]], accelerator: str, mesh: tuple[int, int]) -> None:
    replicas, shards = mesh
    summary = f"{replicas} times {shards} ({'process_group' if accelerator == 'cpu' else 'nccl'})"
    for number, (case, _, accumulate, clip) in enumerate(RUNS):
        expected = train(
            MODELS[case], "auto", world_size=1, rank=0, data_world=replicas * shards, steps=3, accumulate=accumulate,
            gradient_clip_val=clip, accelerator=accelerator,
        )  # fmt: skip
        for rank, records in enumerate(ranks):
            assert_same_training(records[number], expected, params=True)
            rows, placements = records[number].extra["shard"]
            assert (rows[0] == 0) == (rank % shards == 0)  # neighbours share
            assert placements == (Replicate(), Shard(0))
            assert records[number].extra["summary"] == summary


def test_checkpoints_go_on_with_other_ranks(four: Any, two: Any, folder: Path) -> None:
    expected = four[0][1]
    for records, _, _ in two:
        _check_resumed(records, expected)
    # Replicas do not write the same again: the files hold nothing but what the metadata refers to.
    stored = FileSystemReader(folder / "end.ckpt").read_metadata().storage_data.values()
    sizes = sum(file.stat().st_size for file in (folder / "end.ckpt").glob("*.distcp"))
    assert sizes == sum(info.length for info in stored)


@pytest.mark.gpu
def test_checkpoints_go_on_with_other_nodes_on_gpus(tmp_path: Path) -> None:
    """Ranks that share a GPU are nodes of their own: four nodes save, two go on."""
    expected = run_ranks(_save, 4, tmp_path, "gpu", timeout=350)[0]
    for records in run_ranks(_resume, 2, tmp_path, "gpu", timeout=200):
        _check_resumed(records, expected)


def _check_resumed(records: list[Record], expected: Record) -> None:
    for record in records:
        for name, value in expected.params.items():
            torch.testing.assert_close(record.params[name], value, rtol=1e-6, atol=1e-6)


def test_meshes_of_two_ranks(two: Any) -> None:
    expected = train(Small, "auto", world_size=1, rank=0, data_world=2, steps=2)
    for _, records, _ in two:
        for record in records:
            assert_same_training(record, expected, params=True)
    assert len({said(error) for _, _, error in two}) == 1


@pytest.mark.parametrize("mesh", [(2,), (2, 0), "2x2", (2, 2.0), (1, 2, 2)])
def test_what_is_no_mesh(mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"device_mesh=.*a tuple of two numbers"):
        DeepCompileStrategy(device_mesh=mesh)
