"""Embeddings whose rows are looked up on the ranks that hold them: the same rows, the same gradients."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from cases import CASES, VOCAB, Base, Mlp, Record, assert_same_training, train
from multiprocess import join, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_deepcompile import CompileConfig
from lightning_deepcompile.capture.lookups import exchange_lookups
from lightning_deepcompile.runtime import load_extension
from lightning_deepcompile.runtime.lookups import look_up, look_up_gradient, most_indices

# The operators ----------------------------------------------------------------------------------------------------


def _against_whole_tables(device_type: str) -> None:
    """Tables, batches and dtypes at random, the same on all ranks, except for the indices and how many there are."""
    device = join(device_type)
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    host = group if device_type == "cpu" else dist.new_group(backend="gloo").group_name
    draw = random.Random(11)
    ways = set()
    for _ in range(60):
        rows, width, most = draw.randint(1, 40), draw.randint(1, 5), draw.randint(0, 9)
        storage, compute = draw.choice([(torch.float32, torch.float32), (torch.float32, torch.bfloat16),
                                        (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64)])  # fmt: skip
        wire = draw.choice([None, torch.float32])
        padding = draw.choice([-1, draw.randrange(rows)])
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        table = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(storage)
        counts = [draw.choice([most, draw.randint(0, most)]) for _ in range(world)]
        integers = draw.choice([torch.int32, torch.int64])
        everybody = [torch.randint(rows, (1, count), generator=generator).to(integers) for count in counts]
        slopes = [torch.randn(1, count, width, generator=generator).to(compute) for count in counts]

        share = -(-rows // world)
        padded = F.pad(table, (0, 0, 0, share * world - rows))
        shard = padded[rank * share : (rank + 1) * share].to(device).requires_grad_()
        indices = everybody[rank].to(device)
        limit = most_indices(indices, "table", host)
        assert limit.device.type == "cpu" and int(limit) == max(counts)
        found = look_up(shard, indices, limit, "table", rows, padding, compute, wire, group)
        assert found.dtype == compute
        torch.testing.assert_close(
            found.detach().cpu(), F.embedding(everybody[rank], table.to(compute)), rtol=0, atol=0
        )
        (gradient,) = torch.autograd.grad(found, shard, slopes[rank].to(device))
        assert gradient.shape == shard.shape and gradient.dtype == storage

        expected = torch.zeros(share * world, width, dtype=torch.float64)
        for theirs, slope in zip(everybody, slopes, strict=True):
            kept = theirs[0] != padding
            expected.index_add_(0, theirs[0][kept].long(), slope[0][kept].double() / world)
        mine = expected[rank * share : (rank + 1) * share]
        ways.add("empty" if max(counts) == 0 else "whole" if max(counts) * world > rows else "rows")
        coarse = torch.bfloat16 in (storage, compute)  # a whole gradient is rounded to bf16 before it travels
        torch.testing.assert_close(
            gradient.double().cpu(), mine, rtol=2e-2 if coarse else 1e-5, atol=2e-2 if coarse else 1e-6
        )
        if coarse and storage is torch.float32 and max(counts) * world <= rows:
            torch.testing.assert_close(gradient.double().cpu(), mine, rtol=1e-5, atol=1e-6)  # rows are added in fp32
    assert ways == {"empty", "whole", "rows"}


@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_and_gradients_are_those_of_the_whole_table(world_size: int) -> None:
    run_ranks(_against_whole_tables, world_size, "cpu", timeout=90)


@pytest.mark.gpu
def test_rows_and_gradients_are_those_of_the_whole_table_on_gpus() -> None:
    run_ranks(_against_whole_tables, 2, "cuda", timeout=120)


def _mistakes() -> str:
    join("cpu")
    group = dist.group.WORLD.group_name
    limit, shard = torch.tensor(2), torch.zeros(4, 3)
    for wrong in (-1, 7):
        with pytest.raises(
            IndexError, match=f"'words' is out of range: it has 7 rows. Seen: {min(wrong, 2)} to {max(wrong, 2)}"
        ):
            look_up(shard, torch.tensor([2, wrong]), limit, "words", 7, -1, torch.float32, None, group)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    start = time.monotonic()
    with pytest.raises(
        RuntimeError, match="Exchanging rows of 'words' failed on rank 0.*look at its error first"
    ) as caught:
        for _ in range(100):
            most_indices(torch.tensor([2]), "words", group)
    assert time.monotonic() - start < 30
    return str(caught.value)


def test_what_goes_wrong_is_named() -> None:
    assert run_ranks(_mistakes, 2, timeout=60)[0]


def test_tracers_know_the_operators() -> None:
    load_extension()
    shard, indices, limit = torch.zeros(4, 3), torch.zeros(2, 5, dtype=torch.int64), torch.tensor(10)
    with torch._subclasses.FakeTensorMode() as mode:
        shard, indices, limit = map(mode.from_tensor, (shard, indices, limit))
        assert most_indices(indices, "t", "0").device.type == "cpu"
        found = look_up(shard, indices, limit, "t", 7, -1, torch.bfloat16, None, "0")
        assert found.shape == (2, 5, 3) and found.dtype == torch.bfloat16
        gradient = look_up_gradient(found, indices, limit, "t", 4, 7, -1, torch.float32, None, "0")
        assert gradient.shape == (4, 3) and gradient.dtype == torch.float32


# Training -----------------------------------------------------------------------------------------------------------


class Bags(Base):
    """A table with a padding index, looked up twice; one by positions; one that a head shares, which is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, 12, padding_idx=-3)
        self.positions = nn.Embedding(12, 12)
        self.shared = nn.Embedding(VOCAB, 12)
        self.mix = nn.Linear(12, 12)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.mix(torch.tanh(x)) + F.embedding(tokens.flip(1).int(), weight=self.words.weight, padding_idx=1)
        return (x + self.shared(tokens)) @ self.shared.weight.t()


class Ragged(Mlp):
    """Every rank cuts its batches to lengths of its own."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        length = 5 + (batch_idx * (2 + self.global_rank) + 3 * self.global_rank) % 7
        return super().training_step(batch[:, :length], batch_idx)


BUILDS = {**CASES, "bags": Bags, "ragged": Ragged}
EXCHANGED = {"bags": 3, "mlp": 1, "frozen": 1, "graph_break": 1, "llama": 1, "gpt_tied": 0}
CLIPPED = {"bags": 0.02}
# Case, what compiles regions, micro-batches per step, settings.
Run = tuple[str, str, int, tuple[str, ...]]
RUNS: list[Run] = [("bags", "eager", 3, ()), ("mlp", "inductor", 3, ()), ("gpt_tied", "eager", 1, ())]
RUNS += [("frozen", "eager", 1, ("states", "parameters"))]
OTHERS: list[Run] = [("mlp", "eager", 3, ()), ("llama", "inductor", 3, ()), ("graph_break", "eager", 1, ())]
OTHERS += [("llama", "eager", 1, ("states", "parameters"))]


class Exchange(pl.Callback):
    """Exchanges the rows of tables of any size."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        engine = trainer.strategy.engine
        assert engine.capture.lookups is None, "which small tables are not worth"
        found = exchange_lookups(engine.model, 3, None, engine.host_group, least_bytes=0, least_rows=0)
        engine.capture.lookups = found


def _run(run: Run, exchanges: bool, accelerator: str) -> Record:
    from lightning_deepcompile import DeepCompileStrategy

    case, backend, accumulate, offloads = run
    config = CompileConfig(region_backend=backend, offload=list(offloads) or "auto")
    return train(
        BUILDS[case],
        DeepCompileStrategy(compile=config),
        world_size=int(os.environ["WORLD_SIZE"]),
        rank=int(os.environ["RANK"]),
        accumulate=accumulate,
        gradient_clip_val=CLIPPED.get(case),
        callbacks=[Exchange()] if exchanges else [],
        inspect=lambda trainer: (trainer.strategy.summary(), trainer.strategy.programs()),
        accelerator=accelerator,
    )


def _train_all(runs: list[Run], accelerator: str) -> dict[Any, Record]:
    return {run: _run(run, True, accelerator) for run in runs}


def _check(world_size: int, runs: list[Run], accelerator: str) -> None:
    for results in run_ranks(_train_all, world_size, runs, accelerator, timeout=380):
        for run, record in results.items():
            case, _, accumulate, _ = run
            expected = train(
                BUILDS[case], "auto", world_size=1, rank=0, data_world=world_size, accumulate=accumulate,
                accelerator=accelerator, gradient_clip_val=CLIPPED.get(case),
            )  # fmt: skip
            assert_same_training(record, expected, params=True)
            summary, programs = record.extra
            assert summary.exchanged_lookups == EXCHANGED[case], run
            if case == "mlp":
                forward, backward = programs["frame0.forward"], programs["frame0.backward"]
                assert forward.splitlines()[1].startswith("  gather "), "launched before the hosts wait for each other"
                assert "look up embed.weight" in forward and "look up gradient embed.weight" in backward
                assert "gather   embed (" not in forward and "reduce   embed (" not in backward


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_is_that_of_one_process(world_size: int) -> None:
    """Two ranks exchange rows; three have more tokens than that pays for, and take the whole table in the operator."""
    others = OTHERS if "TEST_ALL" in os.environ else []
    _check(world_size, RUNS + others if world_size == 2 else RUNS[:1] + others[:1], "cpu")


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_training_is_that_of_one_gpu() -> None:
    _check(2, RUNS + OTHERS, "gpu")


def _train_ragged(accelerator: str) -> list[Record]:
    return [_run(("ragged", "eager", 2, ()), exchanges, accelerator) for exchanges in (False, True)]


def _check_ragged(accelerator: str) -> None:
    for gathered, exchanged in run_ranks(_train_ragged, 2, accelerator):
        assert_same_training(exchanged, gathered, params=True)
        assert [record.extra[0].exchanged_lookups > 0 for record in (gathered, exchanged)] == [False, True]


def test_every_rank_may_have_its_own_number_of_tokens() -> None:
    _check_ragged("cpu")


@pytest.mark.gpu
def test_every_gpu_may_have_its_own_number_of_tokens() -> None:
    _check_ragged("gpu")
