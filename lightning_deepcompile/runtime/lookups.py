"""Operators that look up rows of a sharded table where the rows are: an exchanged embedding in a graph.

A gather moves the whole table to every rank, and its gradient, nearly all zeros, back. These operators move the indices
to the ranks that hold the rows, the rows back, and the gradient's rows likewise: with few tokens per rank a small part
of the bytes (vocabulary-parallel embeddings, known from Megatron-LM, without dividing any arithmetic).

The number of tokens may differ between ranks and steps. So the ranks' processes agree, in every pass, on the largest
number (`most_indices`, on the host, before anything is launched): every rank sends that many, and all ranks gather the
whole table instead if that is less. Like the operators of `statistics`, each takes a result of the one before it, which
keeps their order in every rank's program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_deepcompile import compat

_WAITS = (torch.Tag.cudagraph_unsafe,)  # for other ranks' hosts
_OTHERS = "If another rank failed, look at its error first; else ranks took different paths through the model."


@torch.library.custom_op("lightning_deepcompile::most_indices", mutates_args=(), tags=_WAITS)
def most_indices(indices: Tensor, name: str, host_group: str, after: Tensor | None = None) -> Tensor:
    """Returns the largest number of indices that any rank has.

    Args:
        indices: This rank's, of any shape.
        name: Of the table.
        host_group: Name of the process group, one of the ranks' CPUs.
        after: Must have been computed before.

    Returns:
        An int64 scalar on the CPU.
    """
    most = torch.tensor(indices.numel())
    with _naming(name):
        dist.all_reduce(most, dist.ReduceOp.MAX, group=compat.process_group(host_group))
    return most


@most_indices.register_fake
def _(indices: Tensor, name: str, host_group: str, after: Tensor | None = None) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("lightning_deepcompile::look_up", mutates_args=(), tags=_WAITS)
def look_up(
    shard: Tensor,
    indices: Tensor,
    most: Tensor,
    name: str,
    rows: int,
    padding: int,
    dtype: torch.dtype,
    wire: torch.dtype | None,
    group: str,
    after: Tensor | None = None,
) -> Tensor:
    """``F.embedding(indices, table)`` of a table whose rows are divided among the ranks.

    Args:
        shard: This rank's rows, ``(n, width)``: all ranks have equally many, the last may be padding.
        indices: What to look up, integers of any shape.
        most: From `most_indices`.
        name: Of the table.
        rows: Of the whole table, without padding.
        padding: The index whose row gets no gradient; -1 for none.
        dtype: Of the result.
        wire: In which whole gradients travel; None for the one they are computed in.
        group: Name of the process group among which the table is divided.
        after: Must have been computed before.

    Returns:
        Shape ``(*indices.shape, width)``; bit for bit what the whole table, cast to `dtype`, would give.

    Raises:
        IndexError: On CPU, for an index that the table does not have. (On GPUs it is an assertion of the device.)
    """
    ranks = compat.process_group(group)
    flat, limit, width = indices.reshape(-1), int(most), shard.shape[1]
    _check(flat, rows, name)
    if limit == 0:
        return shard.new_empty((*indices.shape, width), dtype=dtype)
    with _naming(name):
        if _prefers_whole(limit, ranks, rows):
            part = shard.to(dtype)
            table = part.new_empty(ranks.size() * len(part), width)
            compat.all_gather_into(table, part, ranks)
            return table[flat].view(*indices.shape, width)
        everybody = _gather_padded(flat, limit, ranks)
        mine = everybody - ranks.rank() * len(shard)
        # Rows of others' tables are sent, too, and nobody reads them: what goes where would have to be known here.
        found = shard.index_select(0, mine.clamp(0, len(shard) - 1)).to(dtype)
        received = torch.empty_like(found)
        compat.all_to_all_into(received, found, ranks)
    places = flat.long() // len(shard) * limit + torch.arange(len(flat), device=flat.device)
    return received.index_select(0, places).view(*indices.shape, width)


@look_up.register_fake
def _(
    shard: Tensor,
    indices: Tensor,
    most: Tensor,
    name: str,
    rows: int,
    padding: int,
    dtype: torch.dtype,
    *_: Any,
    **__: Any,
) -> Tensor:
    return shard.new_empty((*indices.shape, shard.shape[1]), dtype=dtype)


@torch.library.custom_op("lightning_deepcompile::look_up_gradient", mutates_args=(), tags=_WAITS)
def look_up_gradient(
    gradient: Tensor,
    indices: Tensor,
    most: Tensor,
    name: str,
    shard_rows: int,
    rows: int,
    padding: int,
    dtype: torch.dtype,
    wire: torch.dtype | None,
    group: str,
    after: Tensor | None = None,
) -> Tensor:
    """The derivative of `look_up`: this rank's shard of the mean gradient over the ranks.

    Args:
        gradient: Of the result, ``(*indices.shape, width)``.
        indices: What was looked up.
        most: From `most_indices`.
        name: Of the table.
        shard_rows: Rows of a shard.
        rows: Of the whole table, without padding.
        padding: The index whose row gets no gradient; -1 for none.
        dtype: Of the shard.
        wire: In which whole gradients travel; None for `gradient`'s.
        group: Name of the process group.
        after: Must have been computed before.

    Returns:
        Shape ``(shard_rows, width)``. Rows are added up in fp32 at least, in the order of the ranks.
    """
    ranks = compat.process_group(group)
    flat, limit, width = indices.reshape(-1), int(most), gradient.shape[-1]
    by_row = gradient.reshape(-1, width)
    if limit == 0:
        return gradient.new_zeros((shard_rows, width), dtype=dtype)
    with _naming(name):
        if _prefers_whole(limit, ranks, rows):
            whole = torch.ops.aten.embedding_dense_backward(by_row, flat, ranks.size() * shard_rows, padding, False)
            whole = whole.to(wire or whole.dtype)
            total = whole.new_empty(shard_rows, width)
            compat.reduce_scatter_mean_into(total, whole, ranks)
            return total.to(dtype, copy=False)
        everybody = _gather_padded(flat, limit, ranks)
        by_row = _gather_padded(by_row, limit, ranks)
    mine = everybody - ranks.rank() * shard_rows
    elsewhere = (mine < 0) | (mine >= shard_rows) | (everybody == padding)
    # One more row, for the indices of other ranks; the operator is told that it is padding.
    mine = mine.masked_fill(elsewhere, shard_rows)
    terms = by_row.to(torch.promote_types(dtype, torch.float32)) / ranks.size()
    total = torch.ops.aten.embedding_dense_backward(terms, mine, shard_rows + 1, shard_rows, False)
    return total[:shard_rows].to(dtype)


@look_up_gradient.register_fake
def _(gradient: Tensor, indices: Tensor, most: Tensor, name: str, shard_rows: int, *settings: Any, **_: Any) -> Tensor:
    dtype = settings[2]  # behind the table's rows and the padding
    return gradient.new_empty((shard_rows, gradient.shape[-1]), dtype=dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Not the shard: a derivative does not read it, and saved tensors are kept.
    shard, indices, most, *settings, _ = inputs
    ctx.save_for_backward(indices, most)
    ctx.shard_rows, ctx.dtype, ctx.settings = shard.shape[0], shard.dtype, settings


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    indices, most = ctx.saved_tensors
    name, rows, padding, _, wire, group = ctx.settings
    shard = look_up_gradient(gradient, indices, most, name, ctx.shard_rows, rows, padding, ctx.dtype, wire, group)
    return shard, *[None] * 9


look_up.register_autograd(_backward, setup_context=_remember)


def lookup_ops() -> tuple[compat.OpOverload, ...]:
    """The operators of this module, as they appear in graphs."""
    names = torch.ops.lightning_deepcompile
    return names.most_indices.default, names.look_up.default, names.look_up_gradient.default


def looked_up(arguments: tuple[Any, ...]) -> str:
    """The name of the table, from the arguments of one of `lookup_ops`."""
    return next(argument for argument in arguments if isinstance(argument, str))


def _prefers_whole(most: int, ranks: dist.ProcessGroup, rows: int) -> bool:
    return most * ranks.size() > rows


def _gather_padded(mine: Tensor, length: int, ranks: dist.ProcessGroup) -> Tensor:
    """Gathers every rank's `mine`, each filled up to `length` rows with -1, an index that no rank has."""
    if len(mine) < length:
        mine = torch.cat([mine, mine.new_full((length - len(mine), *mine.shape[1:]), -1)])
    everybody = mine.new_empty(ranks.size() * length, *mine.shape[1:])
    compat.all_gather_into(everybody, mine.contiguous(), ranks)
    return everybody


def _check(indices: Tensor, rows: int, name: str) -> None:
    """Raises for an index out of range: no rank has its row, and the result would be another row."""
    fits = ((indices >= 0) & (indices < rows)).all()
    text = f"An index into {name!r} is out of range: it has {rows} rows."
    if indices.is_cuda:
        compat.assert_on_device(fits, text)
    elif not fits:
        raise IndexError(f"{text} Seen: {int(indices.min())} to {int(indices.max())}.")


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"Exchanging rows of {name!r} failed on rank {dist.get_rank()}: {error} {_OTHERS}"
        ) from error
