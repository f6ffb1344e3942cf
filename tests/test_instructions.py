"""The table of instructions holds: it agrees with the operators, and what is written by it is read by it."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from lightning_deepcompile import compat
from lightning_deepcompile.program.instructions import (
    AT_BOUNDARY,
    TABLE,
    Operation,
    Traits,
)
from lightning_deepcompile.runtime import load_extension

# Names of arguments in the operators' schemas.
SCHEMA = {
    "graph": {"graph_id"},
    "boundary graph": {"graph_id"},
    "shards": {"params", "shard"},
    "ids": {"ids", "ds_id", "chunks"},
    "dtypes": {"dtypes", "dtype"},
    "tensors": {"tensors", "grads", "grad"},
    "size": {"size", "shard_size"},
    "sizes": {"sizes"},
}
OPERATORS = [row for row in TABLE.values() if row.operator]


def test_every_operation_has_one_row() -> None:
    assert set(TABLE) == set(get_args(Operation))
    assert all(op == row.op for op, row in TABLE.items())
    assert [op for op, row in TABLE.items() if not row.operator] == ["compute"]


@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.op)
def test_rows_have_the_arguments_of_their_operators(row: Traits) -> None:
    load_extension()
    names = [argument.name for argument in compat.schema_of(row.overload).arguments]
    assert len(names) == len(row.arguments)
    assert all(name in SCHEMA[argument] for name, argument in zip(names, row.arguments, strict=True))


@pytest.mark.parametrize("row", [row for row in OPERATORS if "graph" in row.arguments[0]], ids=lambda row: row.op)
def test_operators_are_called_with_what_their_rows_say(row: Traits) -> None:
    given = {"shards": [], "ids": [3, 4], "dtypes": [torch.bfloat16] * 2, "tensors": ["a", "b"], "sizes": [8, 16]}
    graph, *others = row.values(7, **given)
    assert graph == (7 | AT_BOUNDARY if row.op == "reduce_at_boundary" else 7)
    assert others == [given[name] for name in row.arguments[1:]]
