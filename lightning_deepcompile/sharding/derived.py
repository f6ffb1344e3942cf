"""Keeps the values that are derived of parameters, and derives them anew when parameters have changed.

A derived value with rows is a parameter for the runtime: its shard lies in a buffer of its own, and programs gather it
like any other. A value without rows is the same on all ranks, and programs get it as an input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_deepcompile import compat
from lightning_deepcompile.program.program import DerivedBlock, DerivedValue
from lightning_deepcompile.sharding.parameter import ShardedParameter


@dataclass(eq=False, repr=False)
class DerivedShards:
    """The derived values of one model.

    Args:
        parameters: The parameters, by their runtime ids.
        runtime: ``_C.Runtime`` that gathers.
        shards: The number of ranks that share a parameter.

    Attributes:
        nbytes: Bytes of the buffers.
    """

    parameters: Mapping[int, ShardedParameter]
    runtime: Any
    shards: int
    nbytes: int = 0
    _values: dict[int, DerivedValue] = field(default_factory=dict)
    _buffers: dict[int, Tensor] = field(default_factory=dict)
    _masks: dict[int, Tensor] = field(default_factory=dict)
    _blocks: dict[tuple[int, ...], DerivedBlock] = field(default_factory=dict)
    _current: set[int] = field(default_factory=set)  # those that fit their parameters
    _refreshed: list[DerivedBlock] = field(default_factory=list)  # what was derived since they were all out of date
    _lapsed: list[DerivedBlock] = field(default_factory=list)  # the same, before that

    def add(self, blocks: Sequence[DerivedBlock]) -> list[Tensor]:
        """Makes room for the values of a program, unless there is.

        Returns:
            Those that the program gets as inputs, in order.
        """
        values = [value for block in blocks for value in block.values]
        for block in blocks:
            self._blocks[tuple(value.number for value in block.values)] = block
            for place in block.masked:
                self._add_mask(block.sources[place])
        for value in values:
            if (known := self._values.get(value.id)) is None:
                self._add(value)
            elif known != value:  # once in thousands of models: numbers are hashes
                raise RuntimeError(
                    f"Values derived of {self.parameters[value.source].name!r} and "
                    f"{self.parameters[known.source].name!r} have the same number. Rename a module, or convert fewer "
                    "layers to a low precision."
                )
        return [self._buffers[value.id] for value in values if not value.is_gathered]

    def _add(self, value: DerivedValue) -> None:
        parameter = self.parameters[value.source]
        shape = list(value.shape)
        if value.is_gathered:
            shape[0] = parameter.layout.rows_padded
        with self._memory(parameter):
            buffer = torch.empty(shape, dtype=value.dtype, device=parameter.leaf.device)
            if value.is_gathered:
                name = f"{parameter.name} as {str(value.dtype).removeprefix('torch.')}"
                self.runtime.setup.register_param(value.id, name, list(value.shape), buffer, None, None)
        self._values[value.id], self._buffers[value.id] = value, buffer
        self.nbytes += buffer.nbytes

    def _add_mask(self, source: int) -> None:
        parameter = self.parameters[source]
        if source not in self._masks:
            with self._memory(parameter):
                rows = torch.arange(parameter.layout.rows_padded, device=parameter.leaf.device)
                self._masks[source] = rows < parameter.local.shape[0]

    @staticmethod
    def _memory(parameter: ShardedParameter) -> contextlib.AbstractContextManager[Any]:
        """A context for tensors of the kind of the shards, also while a graph is traced."""
        is_fake = isinstance(parameter.leaf, compat.FakeTensor)
        return contextlib.nullcontext() if is_fake else compat.real_tensors()

    @property
    def count(self) -> int:
        """Number of the parameters that values are derived of."""
        return len({value.source for value in self._values.values()})

    @property
    def gathered(self) -> list[int]:
        """Runtime ids of the values that are gathered."""
        return [value.id for value in self._values.values() if value.is_gathered]

    def read(self, ds_id: int) -> Tensor:
        """Returns this rank's part of a derived value; valid until parameters change."""
        return self._buffers[ds_id]

    def source_of(self, ds_id: int) -> ShardedParameter:
        """Returns the parameter of a derived value; of a parameter itself."""
        value = self._values.get(ds_id)
        return self.parameters[ds_id if value is None else value.source]

    def dtype_of(self, ds_id: int) -> torch.dtype:
        """Returns the dtype in which a parameter, or a derived value, is gathered."""
        value = self._values.get(ds_id)
        return self.parameters[ds_id].info.dtype if value is None else value.dtype

    def invalidate(self) -> None:
        """Call when parameters may have changed."""
        self._current.clear()
        if self._refreshed:  # a second call in a row must not forget what the first one remembered
            self._lapsed, self._refreshed = self._refreshed, []

    def refresh_kept(self) -> None:
        """Derives what was derived before the last `invalidate`: it is about to be gathered again."""
        lapsed, self._lapsed = self._lapsed, []
        self.refresh(lapsed)

    @torch.no_grad()
    def refresh(self, blocks: Iterable[DerivedBlock]) -> None:
        """Derives values anew where parameters may have changed; call on all ranks alike.

        Args:
            blocks: Those of a program.
        """
        blocks = [block for block in blocks if any(value.id not in self._current for value in block.values)]
        if not blocks:
            return
        maxima = self._maxima([block for block in blocks if block.compare is not None])
        for block in blocks:
            inputs = [self.parameters[source].leaf.detach() for source in block.sources]
            if block.compare is not None:
                inputs.append(next(maxima))
            block.compute([*inputs, *(self._buffers[value.id] for value in block.values)])
            self._current.update(value.id for value in block.values)
        self._refreshed += blocks
        self.runtime.parameters.order_gathers()

    def _maxima(self, blocks: Sequence[DerivedBlock]) -> Iterator[Tensor]:
        """The maxima over all ranks' rows, for each block."""
        if not blocks:
            return iter(())
        parts = []
        for block in blocks:
            assert block.compare is not None
            inputs = [self.parameters[source].leaf.detach() for source in block.sources]
            parts.append(block.compare([*inputs, *(self._masks[block.sources[place]] for place in block.masked)])[0])
        mine = torch.cat(parts)
        ds_id = blocks[0].sources[0]
        # A gather, not a reduction: collectives drop what is not a number, and a maximum does not.
        every = torch.ops.dc.gather(mine, ds_id, [self.shards * mine.numel()], mine.dtype)
        return iter(every.view(self.shards, -1).amax(0).split([block.maxima for block in blocks]))

    def refresh_numbers(self, numbers: tuple[int, ...]) -> None:
        """Derives values for a program that another rank runs.

        Args:
            numbers: Of its values, block by block.

        Raises:
            RuntimeError: If no program of this rank has the same values of a block.
        """
        blocks, begin = [], 0
        while begin < len(numbers):
            ends = range(begin + 1, len(numbers) + 1)
            block = next((self._blocks[key] for end in ends if (key := numbers[begin:end]) in self._blocks), None)
            if block is None:
                raise RuntimeError(
                    "Another rank runs a step that reads other parameters in a low precision (FP8) than the steps of "
                    "this rank, so this rank cannot quantise them. Let all ranks use the same layers in a step, or "
                    "convert fewer of them (`module_filter_fn` of `convert_to_float8_training`)."
                )
            blocks.append(block)
            begin += len(block.values)
        self.refresh(blocks)
