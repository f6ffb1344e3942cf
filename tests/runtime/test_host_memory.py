"""Host memory that is missing or refused: said on all ranks before anything waits for it."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import ROWS, VOCAB, Base, Tokens
from multiprocess import run_ranks, said
from test_engine import make_engine, one_step, sgd
from test_offload_activations import BATCH
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.__main__ import collect
from lightning_deepcompile.plan.budget import MemoryBudgetError
from lightning_deepcompile.runtime import load_extension

# Refusals -------------------------------------------------------------------------------------------------------------


class Wide(Base):
    """Refuses more memory to a rank's process from a given moment on; its optimizer states take 97 MiB.

    That is far more than what the process happens to free before it asks for theirs.
    """

    def __init__(self, moment: str) -> None:
        super().__init__()
        self.moment = moment
        self.embed = nn.Embedding(VOCAB, 1024)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(24))
        self.head = nn.Linear(1024, VOCAB)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.become_poor("setup")
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.become_poor("step")

    def become_poor(self, moment: str) -> None:
        if moment == self.moment and os.environ["RANK"] == "1":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), resource.RLIM_INFINITY))


REFUSED: dict[str, dict[str, Any]] = {
    "setup": {"offload": ["states"]},
    "step": {"offload": "auto", "memory_budget": 118 << 20},
}


def _refused() -> list[tuple[str, int, int]]:
    answers = []
    for moment, settings in REFUSED.items():
        config = CompileConfig(region_backend="eager", schedule=None, host_memory_budget="1GiB", **settings)
        trainer = pl.Trainer(
            strategy=DeepCompileStrategy(compile=config), accelerator="cpu", devices=2, max_steps=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )  # fmt: skip
        data = Tokens(3, 2 * ROWS, int(os.environ["RANK"]), 2)
        try:
            trainer.fit(Wide(moment), DataLoader(data, batch_size=ROWS))
        except MemoryBudgetError as error:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            held = trainer.strategy.engine.runtime.stats()["host_bytes"]
            answers.append((str(error), trainer.global_step, held))
    return answers


def test_a_refusal_on_one_rank_is_said_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step where it is known that all states leave, else before the optimizer's first."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what was freed before is no reserve of the process
    first, second = (
        [(said(text), *rest) for text, *rest in one] for one in run_ranks(_refused, 2, timeout=120, fresh=True)
    )
    assert [text for text, *_ in first] == [text for text, *_ in second] and len(first) == 2, (first, second)
    for text, steps, held in first + second:
        # A budget this small has saved tensors leave, too: some 3 MiB.
        assert steps == 0 and held < 8 << 20, "nothing was trained, and what states took is given back"
        assert text.startswith("Rank 1 of 2 could not take ") and "the host refused " in text, text
        assert "held of at most 536870912 (" in text and "host_memory_budget=" in text, text


def test_saved_tensors_stay_where_others_hold_the_memory(mesh: DeviceMesh) -> None:
    """Other ranks wait for a step, so it is not given up; the budget holds for everything together."""
    budget = 4 << 20
    plain = make_engine(mesh, schedule=None)
    expected = [one_step(plain, BATCH, optimizer) for optimizer in [sgd(plain)] for _ in range(3)]
    plain.close()
    engine = make_engine(mesh, schedule=None, offload=["activations"], host_memory_budget=budget)
    optimizer = sgd(engine)
    losses = [one_step(engine, BATCH, optimizer)]
    stats = engine.runtime.stats()
    assert stats["stayed_tensors"] == 0 and stats["host_bytes"] > 0
    engine.runtime.memory.free_unused()
    buffer = engine.runtime.states.host_buffer(torch.empty(3_900_000, dtype=torch.uint8, device="meta"))
    with pytest.warns(UserWarning, match="no host memory for .* `host_memory_budget`.* saved tensors stay on cpu"):
        losses.append(one_step(engine, BATCH, optimizer))
    stats = engine.runtime.stats()
    assert stats["stayed_tensors"] > 0 and buffer.nbytes < stats["host_bytes"] <= budget
    del buffer
    engine.runtime.memory.free_unused()
    losses.append(one_step(engine, BATCH, optimizer))
    assert engine.runtime.stats()["stayed_tensors"] == stats["stayed_tensors"], "all leave again"
    assert losses == expected
    engine.close()


def test_the_report_tells_of_host_memory() -> None:
    memory = collect()["host memory"]
    assert memory.keys() == {"available", "/dev/shm", "ulimit -l"}
    assert "GiB" in memory["available"] and "MiB free" in memory["/dev/shm"]


def test_reserved_memory_stays_until_it_is_given_up(mesh: DeviceMesh) -> None:
    group, sizes = torch.distributed.group.WORLD, [100, 700_000, 700_000]
    runtime = load_extension().Runtime(group, group, torch.device("cpu"))
    runtime.states.reserve(sizes)
    for _ in range(2):
        assert runtime.stats()["host_bytes"] == 2 << 20
        buffers = [runtime.states.host_buffer(torch.empty(size, dtype=torch.uint8, device="meta")) for size in sizes]
        assert runtime.stats()["host_bytes"] == 2 << 20 and len({buffer.data_ptr() for buffer in buffers}) == 3
        del buffers
        runtime.states.synchronize()  # frees what nobody uses, as before a checkpoint
    runtime.states.reserve([])
    runtime.states.synchronize()
    assert runtime.stats()["host_bytes"] == 0
    runtime.close()
