"""Matrix products beside reductions, with a GPU's multiprocessors divided and not: a part of ``runtime.py``."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from beside import AHEAD
from torch import Tensor

from lightning_deepcompile.runtime.multiprocessors import Multiprocessors

COMMUNICATION = 24  # multiprocessors that NCCL takes of an H200 by itself
TOKENS = 1024
WEIGHTS = {"q, o": (4096, 4096), "gate, up": (14336, 4096), "down": (4096, 14336)}
"""Shapes of a Llama-3-8B block's weights."""
PRODUCTS = 12  # in one measurement


class _Communicates:
    """Stands for a runtime that always communicates."""

    def communicates(self) -> bool:
        return True


def table(undivided: Callable[[], None], divided: Callable[[], None], device: torch.device) -> list[str]:
    """Lines of text. Collective.

    Args:
        undivided: Queues the reduction of a layer, with NCCL's own choice of thread blocks.
        divided: The same with `COMMUNICATION` thread blocks, which lie in pairs.
        device: Of this rank.
    """
    runtime = _Communicates()  # known by a weak reference alone
    multiprocessors = Multiprocessors(device, COMMUNICATION, runtime)
    lines = [
        f"{'products, us':16} {'alone':>8} {'of ' + str(multiprocessors.compute) + ' SMs':>12} "
        f"{'beside reductions':>18} {'of ' + str(multiprocessors.compute) + ' SMs':>12}"
    ]
    for name, run in _products(device):
        times = []
        for reduce in (None, undivided):
            times.append(_microseconds(run, reduce, device))
            multiprocessors.divide()
            times.append(_microseconds(run, reduce and divided, device))
            multiprocessors.end()
        lines.append(f"{name:16} {times[0]:8.0f} {times[1]:12.0f} {times[2]:18.0f} {times[3]:12.0f}")
    return lines


def _products(device: torch.device) -> list[tuple[str, Callable[[], Tensor]]]:
    """Forward, and the gradients of input and weight."""
    products: list[tuple[str, Callable[[], Tensor]]] = []
    for name, (out, inner) in WEIGHTS.items():
        x, weight, grad = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in ((TOKENS, inner), (out, inner), (TOKENS, out))
        )
        products.append((name, lambda x=x, weight=weight: x @ weight.t()))
        products.append((f"{name}, d input", lambda grad=grad, weight=weight: grad @ weight))
        products.append((f"{name}, d weight", lambda grad=grad, x=x: grad.t() @ x))
    return products


def _microseconds(run: Callable[[], Any], reduce: Callable[[], None] | None, device: torch.device) -> float:
    """Of one product, median on the slowest rank, while reductions run on another stream."""
    side = torch.cuda.Stream()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(PRODUCTS + 1)]
    run()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(AHEAD)  # until both streams are filled
    side.wait_stream(torch.cuda.current_stream())
    if reduce is not None:
        with torch.cuda.stream(side):
            for _ in range(PRODUCTS):  # each takes longer than a product
                reduce()
    for mark in marks[:-1]:
        mark.record()
        run()
    marks[-1].record()
    torch.cuda.synchronize()
    one = median(before.elapsed_time(after) for before, after in zip(marks, marks[1:], strict=False))
    slowest = torch.tensor(one, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return 1e3 * slowest.item()
