"""Detects that a batch has other sizes than those before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_deepcompile.step.batch_sizes import sizes_of


@dataclass
class _Batch:
    tokens: torch.Tensor
    others: dict[str, Any] = field(default_factory=dict)
    step: int = 0


def test_sizes_count_wherever_they_are_and_values_do_not() -> None:
    def batch(rows: int, step: int) -> Any:
        inner = _Batch(torch.rand(2, 3), {"image": [np.zeros((rows, 4))]}, step)
        return ({"first": inner, "text": str(step)}, step), {"mask": None}

    assert sizes_of(batch(3, 1)) == sizes_of(batch(3, 2))
    assert sizes_of(batch(3, 1)) != sizes_of(batch(1, 1))
    assert sizes_of(torch.zeros(2, dtype=torch.int32)) != sizes_of(torch.zeros(2))
    assert sizes_of([torch.zeros(2)]) != sizes_of([torch.zeros(2), torch.zeros(2)])
    assert sizes_of([torch.zeros(2), None]) != sizes_of([torch.zeros(2), torch.zeros(2)])


def test_a_batch_that_refers_to_itself_is_looked_at_for_a_while() -> None:
    batch = _Batch(torch.rand(2))
    batch.others = {"self": [batch, batch], "nested": torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])}
    assert len(hash_of := sizes_of(batch)) < 2000 and hash(hash_of) == hash(sizes_of(batch))  # type: ignore[arg-type]
