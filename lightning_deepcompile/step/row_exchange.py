"""Collects the rows of parameters and gradients on the ranks that step on them unsharded, and sends rows back.

One collective moves all tensors of a chunk and of a dtype. Every rank sends as many elements of a tensor as any other:
its rows and their padding. The padding ends up behind the collected rows, and is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_deepcompile import compat
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.sharding.parameter import ShardedParameter


@dataclass(eq=False)
class Owned:
    """A parameter on which one rank steps unsharded.

    Args:
        parameter: Its shards.
        owner: The shard rank that steps on it.
        whole: The unsharded tensor on the owner while the optimizer steps; empty between steps, and on other ranks.
    """

    parameter: ShardedParameter
    owner: int
    whole: Tensor

    def empty(self) -> None:
        """Frees the collected tensor."""
        self.whole.grad = None
        self.whole.data = self.whole.data.new_empty(0)


class RowExchange:
    """Moves rows between shards and owners; its methods are collectives of the ranks that share parameters.

    Attributes:
        sent: Bytes that this rank has sent to others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.sent = 0

    @torch.no_grad()
    def collect(self, chunk: Sequence[Owned], gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """Starts collecting parameters and gradients on their owners.

        Args:
            chunk: The parameters, the same on all ranks.
            gradients: This rank's rows of the gradient of each; None on all ranks for those without.

        Returns:
            A function that waits for it, on the device if possible, and fills ``whole`` and ``whole.grad``.
        """
        filled = [self._collect(*part) for part in _by_dtype(chunk, gradients)]
        return lambda: _call(filled)

    @torch.no_grad()
    def send_back(self, chunk: Sequence[Owned]) -> Callable[[], None]:
        """Starts sending the rows of the owners' tensors to the shards.

        Args:
            chunk: The parameters, the same on all ranks.

        Returns:
            A function that waits for it, as `collect`'s, and writes to the shards.
        """
        written = [self._send_back(part) for part, _ in _by_dtype(chunk, [None] * len(chunk))]
        return lambda: _call(written)

    def _collect(self, chunk: list[Owned], gradients: list[Tensor | None]) -> Callable[[], None]:
        shards, mine = self._ranks.shards, self._ranks.shard_rank
        sizes = [0] * shards
        for one, gradient in zip(chunk, gradients, strict=True):
            sizes[one.owner] += one.parameter.layout.shard_numel * (1 if gradient is None else 2)
        places = _starts(sizes)
        first = chunk[0].parameter.local
        send = first.new_empty(sum(sizes))
        for one, gradient in zip(chunk, gradients, strict=True):
            for rows in (one.parameter.local, gradient):
                if rows is not None:
                    place = places[one.owner]
                    send[place : place + rows.numel()].view(rows.shape).copy_(rows)
                    places[one.owner] += one.parameter.layout.shard_numel
        received = first.new_empty(shards * sizes[mine])
        wait = self._exchange(received, send, [sizes[mine]] * shards, sizes)

        @torch.no_grad()
        def fill() -> None:
            wait()
            rows = received.view(shards, sizes[mine])
            place = 0
            for one, gradient in zip(chunk, gradients, strict=True):
                if one.owner != mine:
                    continue
                size = one.parameter.layout.shard_numel
                one.whole.grad = None  # before the shape changes
                one.whole.data = _joined(rows[:, place : place + size], one.parameter)
                place += size
                if gradient is not None:
                    one.whole.grad = _joined(rows[:, place : place + size], one.parameter)
                    place += size

        return fill

    def _send_back(self, chunk: list[Owned]) -> Callable[[], None]:
        shards, mine = self._ranks.shards, self._ranks.shard_rank
        sizes = [0] * shards
        for one in chunk:
            sizes[one.owner] += one.parameter.layout.shard_numel
        send = chunk[0].parameter.local.new_empty(shards, sizes[mine])
        place = 0
        for one in chunk:
            if one.owner == mine:
                size = one.parameter.layout.shard_numel
                _divide(one.whole.detach(), send[:, place : place + size], one.parameter)
                place += size
        received = send.new_empty(sum(sizes))
        wait = self._exchange(received, send.view(-1), sizes, [sizes[mine]] * shards)

        @torch.no_grad()
        def write() -> None:
            wait()
            places = _starts(sizes)
            for one in chunk:
                local, place = one.parameter.local, places[one.owner]
                local.copy_(received[place : place + local.numel()].view(local.shape))
                places[one.owner] += one.parameter.layout.shard_numel

        return write

    def _exchange(self, received: Tensor, send: Tensor, into: list[int], out: list[int]) -> Callable[[], None]:
        self.sent += (send.numel() - out[self._ranks.shard_rank]) * send.itemsize
        return compat.all_to_all_uneven(received, send, into, out, self._ranks.shard_group)


def _by_dtype(
    chunk: Sequence[Owned], gradients: Sequence[Tensor | None]
) -> Iterator[tuple[list[Owned], list[Tensor | None]]]:
    for dtype in dict.fromkeys(one.parameter.local.dtype for one in chunk):
        chosen = [i for i, one in enumerate(chunk) if one.parameter.local.dtype == dtype]
        yield [chunk[i] for i in chosen], [gradients[i] for i in chosen]


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += size
    return starts


def _joined(shards: Tensor, parameter: ShardedParameter) -> Tensor:
    """Returns the unsharded tensor; `shards` holds every rank's padded rows, one rank a row."""
    layout = parameter.layout
    padded = shards.reshape(shards.shape[0] * layout.rows_padded, *layout.spec.shape[1:])
    return padded[: layout.spec.shape[0]]


def _divide(whole: Tensor, shards: Tensor, parameter: ShardedParameter) -> None:
    """Writes the rows of an unsharded tensor to `shards`, as `_joined` reads them; padding stays unwritten."""
    layout = parameter.layout
    full, rest = divmod(layout.spec.shape[0], layout.rows_padded)
    rows = whole[: full * layout.rows_padded]
    shards[:full].copy_(rows.reshape(full, layout.shard_numel))
    if rest:
        last = whole[full * layout.rows_padded :]
        shards[full, : last.numel()].copy_(last.reshape(-1))


def _call(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
