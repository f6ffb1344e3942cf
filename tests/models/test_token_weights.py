"""Ranks with different work: losses weighted by the tokens of all ranks, shorter batches, and empty ones."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from typing import Any

import torch
from cases import full
from multiprocess import join, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.engine import Engine

WORLD, IGNORED = 2, -100
_Batch = tuple[Tensor, Tensor]


class Causal(nn.Module):
    """Divides as transformers' Trainer does: the sum over this rank's tokens by the number of those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.net = LlamaForCausalLM(LlamaConfig(vocab_size=32, use_cache=False, **sizes))

    def training_step(self, batch: _Batch, items: Tensor, ranks: int) -> Tensor:
        ids, labels = batch
        return self.net(input_ids=ids, labels=labels, num_items_in_batch=items).loss * ranks


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)

    def training_step(self, batch: _Batch, items: Tensor, ranks: int) -> Tensor:
        ids, labels = batch
        logits = self.head(F.gelu(self.layer(self.embed(ids))))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss / items * ranks


def _batch(rows: int, length: int, valid: int, seed: int) -> _Batch:
    ids = torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, valid:] = IGNORED
    return ids, labels


SIZES: list[list[tuple[int, int, int]]] = [
    [(2, 6, 6), (3, 24, 24)],  # rows, length, tokens that count
    [(2, 7, 7), (2, 28, 20)],
    [(1, 24, 24), (4, 6, 3)],
    [(2, 8, 8), (2, 9, 0)],
    [(3, 5, 5), (2, 20, 11)],
]
EMPTY: list[list[tuple[int, int, int]]] = [[(2, 8, 8), (0, 8, 8)], [(0, 5, 5), (2, 7, 7)], [(2, 8, 8), (3, 0, 0)]]


def _differences(kind: type[nn.Module], steps: list[list[tuple[int, int, int]]]) -> list[str]:
    """Returns what differs from a process that trains all ranks' batches."""
    torch._dynamo.reset()
    rank, found = int(os.environ["RANK"]), []
    reference = kind()
    config = CompileConfig(region_backend="eager")
    mesh = init_device_mesh("cpu", (WORLD,))
    engine = Engine(copy.deepcopy(reference), mesh, config, timeout=timedelta(seconds=60))
    optimizer, expected = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (engine.module, reference))
    engine.attach_optimizer(optimizer)
    for step, sizes in enumerate(steps):
        parts = [_batch(*size, seed=10 * step + k) for k, size in enumerate(sizes)]
        items = torch.tensor(sum(int((labels[:, 1:] != IGNORED).sum()) for _, labels in parts))
        loss = engine.run_step("training_step", parts[rank], items, WORLD)
        optimizer.zero_grad()
        engine.backward(loss.backward)
        optimizer.step()
        engine.parameters_changed()
        expected.zero_grad()
        losses: list[Any] = [reference.training_step(part, items, 1) for part in parts]  # type: ignore[operator]
        sum(losses).backward()
        expected.step()
        if not torch.allclose(loss / WORLD, losses[rank], rtol=1e-5, atol=1e-7):
            found.append(f"loss of step {step}: {loss / WORLD} and {losses[rank]}")
    ours = dict(engine.module.named_parameters())
    for name, parameter in reference.named_parameters():
        if not torch.allclose(full(ours[name]), parameter, rtol=1e-5, atol=1e-6):
            found.append(f"{name}: {(full(ours[name]) - parameter).abs().max()}")
    engine.close()
    return found


def _both() -> dict[str, list[str]]:
    join("cpu")
    return {
        "llama": _differences(Causal, SIZES[:3]),
        "plain": _differences(Plain, SIZES[:2] + EMPTY + SIZES[2:]),
    }


def test_every_token_counts_as_in_one_process() -> None:
    for differences in run_ranks(_both, WORLD, timeout=200):
        assert differences == {"llama": [], "plain": []}
