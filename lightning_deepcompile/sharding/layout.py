"""The places of all parameters' shards: blocks of parameters that communicate together, rows per rank, flat offsets.

Pure arithmetic without tensors, so that it can be tested for any world size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

ALIGNMENT = 128
"""Elements: shards start on multiples of it, which aligns every start to 16 bytes (vector loads, NCCL) in any dtype."""

_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class ParamSpec:
    """The properties of a parameter before sharding.

    Args:
        name: Fully qualified name; of tied names the first.
        shape: Global shape, at least one dimension.
        dtype: Storage dtype of the shards.
        requires_grad: Whether gradient shards are needed.
        block: The block it communicates with.
        gather_dtype: Dtype in which it is gathered and computed with.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    block: str
    gather_dtype: torch.dtype


def rows_of(rows: int, rows_padded: int, rank: int) -> tuple[int, int]:
    """Returns the half-open range of `rows` rows that `rank` holds where each rank has room for `rows_padded`."""
    return min(rank * rows_padded, rows), min((rank + 1) * rows_padded, rows)


@dataclass(frozen=True)
class ShardLayout:
    """One parameter's place in a flat buffer: each rank holds ``rows_padded`` rows, contiguous, from ``offset`` on.

    Args:
        spec: The parameter.
        rows_padded: Rows per rank, ``ceil(rows / world)``; the last ranks' surplus rows are zero.
        offset: Start of the shard in the flat buffer, in elements.
    """

    spec: ParamSpec
    rows_padded: int
    offset: int

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of every rank's shard, the padding included: equal on all ranks."""
        return (self.rows_padded, *self.spec.shape[1:])

    @property
    def shard_numel(self) -> int:
        """Elements of every rank's shard, the padding included."""
        return math.prod(self.shard_shape)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of every rank's shard as it is gathered, the padding included."""
        return self.shard_numel * self.spec.gather_dtype.itemsize

    def rows_of(self, rank: int) -> tuple[int, int]:
        """The half-open range of the parameter's rows that `rank` holds; empty where ranks outnumber rows."""
        return rows_of(self.spec.shape[0], self.rows_padded, rank)


@dataclass(frozen=True)
class FlatLayout:
    """The shards of one block and dtype, one after another in one flat buffer per rank.

    Neighbours in memory are gathered, cast and reduced together, so one block costs few kernel launches.
    """

    block: str
    dtype: torch.dtype
    shards: tuple[ShardLayout, ...]
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes of every rank's buffer."""
        return self.numel * self.dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Bytes of every rank's buffer as it is gathered."""
        return self.numel * max(shard.spec.gather_dtype.itemsize for shard in self.shards)

    @property
    def is_trained(self) -> bool:
        """True if its parameters have gradients: either all of them have, or none."""
        return self.shards[0].spec.requires_grad


def lay_out_flat(specs: Iterable[ParamSpec], world_size: int) -> list[FlatLayout]:
    """Lays out `specs` for `world_size` ranks, one flat buffer per block, dtype and ``requires_grad``.

    Args:
        specs: Parameters in registration order.
        world_size: Number of ranks, at least 1.

    Returns:
        The layouts in order of first appearance. Frozen parameters have buffers of their own, as they need none for
        gradients.
    """
    groups: dict[tuple[str, torch.dtype, bool], list[ParamSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.block, spec.dtype, spec.requires_grad), []).append(spec)
    flats = []
    for (block, dtype, _), members in groups.items():
        offset, shards = 0, []
        for spec in members:
            shard = ShardLayout(spec, rows_padded=-(-spec.shape[0] // world_size), offset=offset)
            shards.append(shard)
            offset += -(-shard.shard_numel // ALIGNMENT) * ALIGNMENT
        flats.append(FlatLayout(block, dtype, tuple(shards), offset))
    return flats


def assign_blocks(module: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Assigns each parameter to a block: the entry of the outermost repeated list of modules that it belongs to.

    A list counts as repeated if it has two entries or more. An entry that is only a stage, with a stack of layers of
    one class inside, is divided into its layers: as one block a whole encoder would be gathered at once. Parameters
    outside any list (embeddings, final norm and head) form a block per uninterrupted run in registration order, so that
    a final norm travels with the head rather than alone.

    Args:
        module: The model; its ``ModuleList`` and ``Sequential`` children are the lists.
        names: Parameter names in registration order.

    Returns:
        Parameter name to block name. An entry of a list is named after its path (``model.layers.3``), a run after its
        first and last module.
    """
    entries = set(_entries(module, ""))
    blocks: dict[str, str] = {}
    run: list[str] = []

    def close_run() -> None:
        owners = [name.rpartition(".")[0] or name for name in run]
        label = owners[0] if owners[0] == owners[-1] else f"{owners[0]}+{owners[-1]}"
        blocks.update(dict.fromkeys(run, label))
        run.clear()

    for name in names:
        parts = name.split(".")
        entry = next((path for n in range(1, len(parts)) if (path := ".".join(parts[:n])) in entries), None)
        if entry is None:
            run.append(name)
            continue
        if run:
            close_run()
        blocks[name] = entry
    if run:
        close_run()
    return blocks


def _entries(module: nn.Module, path: str) -> Iterator[str]:
    """Paths of the list entries inside `module` that are blocks."""
    children = list(module.named_children())
    repeated = isinstance(module, _LISTS) and len(children) >= 2
    classes = Counter(type(child) for _, child in children)
    for name, child in children:
        below = f"{path}.{name}" if path else name
        # A stage is a stack, or the only entry of its class that holds one (an encoder between an embedding and a
        # head). Layers are alike, and may hold stacks themselves (of experts).
        stage = _is_stack(child) or (classes[type(child)] == 1 and any(map(_is_stack, child.modules())))
        if repeated and not stage:
            yield below
        else:
            yield from _entries(child, below)


def _is_stack(module: nn.Module) -> bool:
    """Returns whether `module` is a list with two entries of one class that have modules inside."""
    if not isinstance(module, _LISTS):
        return False
    layers = Counter(type(entry) for entry in module.children() if next(entry.children(), None) is not None)
    return any(count >= 2 for count in layers.values())
