"""Copies between device and pinned host memory, alone and beside matmuls: a part of ``runtime.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from beside import WIDTH, beside
from torch import Tensor

SAVED = (4096, 14336)
"""A saved tensor of a block of Llama-3-8B at 4096 tokens, in bf16: 112 MiB."""


class _Plain:
    """The reference for the runtime: copies from and to pinned memory, each way on a stream of its own."""

    def __init__(self, saved: Tensor) -> None:
        self._saved, self._target = saved, torch.empty_like(saved)
        self._left, self._back = (torch.empty(saved.shape, dtype=saved.dtype, pin_memory=True) for _ in range(2))
        self._streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(self, out: bool, back: bool) -> None:
        current = torch.cuda.current_stream()
        for stream, wanted, target, source in (
            (self._streams[0], out, self._left, self._saved),
            (self._streams[1], back, self._target, self._back),
        ):
            if wanted:
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for stream in self._streams:
            current.wait_stream(stream)


class _Runtime:
    """The same by the operators that programs call for saved tensors."""

    def __init__(self, saved: Tensor, graph: int) -> None:
        self._saved, self._graph = saved, graph
        self._away = torch.ops.dc.offload_tensors_fused(graph, [saved])

    def copy(self, out: bool, back: bool) -> None:
        under_way: list[Tensor] = []
        if out:
            under_way += torch.ops.dc.offload_tensors_fused(self._graph, [self._saved])
        if back:
            torch.ops.dc.reload_tensors_fused(self._graph, self._away)
            under_way += self._away
        torch.ops.dc.wait_copies_fused(self._graph, under_way)


def table(graph: int, device: torch.device, milliseconds: Callable[[Callable[[], Any]], float]) -> list[str]:
    """Lines of text. Collective.

    Args:
        graph: A registered graph.
        device: Of this rank; all ranks copy at the same time.
        milliseconds: Times a call on the slowest rank.
    """
    saved = torch.randn(SAVED, device=device).bfloat16()
    gigabytes = saved.nbytes / 1e9
    plain, ours = _Plain(saved), _Runtime(saved, graph)
    lines = [
        f"{'copies':12} {'alone, GB/s each way':>24} {f'beside {WIDTH}² matmuls':>26} {'matmuls slower by':>22}",
        f"{'':12} {'plain':>12}{'runtime':>12} {'plain':>14}{'runtime':>12} {'plain':>12}{'runtime':>10}",
    ]
    for name, out, back in (("out", True, False), ("in", False, True), ("both ways", True, True)):
        alone, loaded = [], []
        for side in (plain, ours):

            def copy(side: _Plain | _Runtime = side, out: bool = out, back: bool = back) -> None:
                side.copy(out, back)

            alone.append(milliseconds(copy))
            loaded.append(beside(copy, alone[-1], device, repeat=5))
        speeds = [1e3 * gigabytes / ms for ms in (*alone, loaded[0].ms, loaded[1].ms)]
        lines.append(
            f"{name:12} {speeds[0]:12.1f}{speeds[1]:12.1f} {speeds[2]:14.1f}{speeds[3]:12.1f} "
            f"{loaded[0].slower:12.1%}{loaded[1].slower:10.1%}"
        )
    return lines
