"""Tells an optimizer's counters from rows of parameters of one element, where both have the shape ``(1,)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def counters(states: Iterable[tuple[Sequence[int], Mapping[str, Any]]]) -> set[str]:
    """Returns the names of states that are one number for each parameter, in a tensor of shape ``(1,)``.

    Args:
        states: The shape of each parameter, of this rank's rows if states are those, and its states by name. A state
            that has another shape than one of the parameters is none of its rows.
    """
    return {
        name
        for shape, entries in states
        if tuple(shape) != (1,)
        for name, value in entries.items()
        if isinstance(value, Tensor) and value.shape == (1,) and not isinstance(value, DTensor)
    }
