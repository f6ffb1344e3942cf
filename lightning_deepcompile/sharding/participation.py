"""Takes part in the communication of other ranks' programs without computing, where ranks run different ones in turns.

A rank gathers the same parameters as the other, releases them when the other does, and contributes zeros to the means
of gradients. So all ranks have gathered the same at any time, and every gradient is the mean over all of them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_deepcompile import compat
from lightning_deepcompile.program.instructions import AT_BOUNDARY, TABLE
from lightning_deepcompile.program.program import DERIVE, LOCAL_ID
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.shards import ShardedModel

_ROWS = {row.collective: row for row in TABLE.values() if row.collective}


class Participation:
    """Communicates by signatures (`Program.signature`, `Agreement.check_uncompiled`).

    Args:
        model: The sharded model.
        runtime: ``_C.Runtime`` that communicates.
        stage: ZeRO stage.
        new_graph_id: Returns a new runtime id for a graph.
        begin_backward: Begins a backward pass, unless one has begun.
    """

    def __init__(
        self,
        model: ShardedModel,
        runtime: Any,
        stage: int,
        new_graph_id: Callable[[], int],
        begin_backward: Callable[[], None],
    ) -> None:
        self._model, self._runtime, self._stage = model, runtime, stage
        self._new_graph_id, self._begin_backward = new_graph_id, begin_backward
        self._graphs: dict[tuple[int, ...], int] = {}

    @torch.no_grad()
    def __call__(self, signature: str) -> None:
        """Does the communication of a program, or other code, with this signature."""
        header, *lines = signature.splitlines()
        collectives = [_parsed(line) for line in lines]
        with compat.below_autograd():
            if "program" not in header:
                self._with_code(collectives)
                return
            if header.startswith("backward"):
                self._begin_backward()
            (members,) = [ids for kind, ids in collectives if kind == TABLE["end"].collective] or [()]
            graph = self._graph_of(members or self._all())
            for kind, ids in collectives:
                self._with_instruction(graph, kind, ids)

    def _graph_of(self, members: tuple[int, ...]) -> int:
        if members not in self._graphs:
            graph = self._graphs[members] = self._new_graph_id()
            ids = self._ids(members)
            register = self._runtime.setup.register_graph
            register(graph, ids, stage=self._stage, reduce="every")
            register(graph | AT_BOUNDARY, ids, stage=self._stage, reduce="boundary")
        return self._graphs[members]

    def _all(self) -> tuple[int, ...]:
        parameters = (parameter.ds_id for parameter in self._model.parameters)
        return tuple(ds_id & LOCAL_ID for ds_id in (*parameters, *self._model.derived.gathered))

    def _ids(self, numbers: tuple[int, ...]) -> list[int]:
        return [self._runtime.serial << 32 | number for number in numbers]

    def _parameters(self, numbers: tuple[int, ...]) -> list[ShardedParameter]:
        return [self._model.by_id[ds_id] for ds_id in self._ids(numbers)]

    def _no_gradients(self, numbers: tuple[int, ...]) -> list[torch.Tensor]:
        return [_zeros(parameter, parameter.info.dtype) for parameter in self._parameters(numbers)]

    def _with_instruction(self, graph: int, kind: str, numbers: tuple[int, ...]) -> None:
        if kind == DERIVE:
            self._model.derived.refresh_numbers(numbers)
            return
        if kind == "keep":  # names what is not released
            return
        if kind not in _ROWS:
            raise RuntimeError(f"This rank cannot take part in `{kind}`. This is a bug: please report it.")
        traits = _ROWS[kind]
        if traits.effect[0] == "launch and wait":
            for parameter in self._parameters(numbers):
                blocking = self._gather if traits.effect[1] == "parameters" else self._reduce
                blocking(parameter, parameter.info.dtype)
            return
        ids = self._ids(numbers)
        given: dict[str, Sequence[Any]] = {"shards": (), "ids": ids}
        given["dtypes"] = [self._model.derived.dtype_of(i) for i in ids] if "dtypes" in traits.arguments else ()
        given["tensors"] = self._no_gradients(numbers) if "tensors" in traits.arguments else ()
        traits.overload(*traits.values(graph, **given))

    def _with_code(self, collectives: list[tuple[str, tuple[int, ...]]]) -> None:
        for text, numbers in collectives:
            kind, _, dtype = text.partition(" ")
            (parameter,) = self._parameters(numbers)
            (self._gather if kind == "gather" else self._reduce)(parameter, getattr(torch, dtype))

    @staticmethod
    def _gather(parameter: ShardedParameter, dtype: torch.dtype) -> None:
        torch.ops.dc.gather(parameter.leaf, parameter.ds_id, parameter.layout.spec.shape, dtype)

    @staticmethod
    def _reduce(parameter: ShardedParameter, dtype: torch.dtype) -> None:
        leaf, zeros = parameter.leaf, _zeros(parameter, dtype)
        shard = torch.ops.dc.reduce(zeros, parameter.ds_id, parameter.layout.shard_shape, leaf.dtype)
        leaf.grad = shard if leaf.grad is None else leaf.grad + shard  # merged when the pass ends


def _zeros(parameter: ShardedParameter, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(parameter.layout.spec.shape, dtype=dtype, device=parameter.leaf.device)


def _parsed(line: str) -> tuple[str, tuple[int, ...]]:
    """Returns a kind of collective, and the local ids of its parameters."""
    kind, _, ids = line.rpartition(" (")
    return kind, ast.literal_eval(f"({ids}")
