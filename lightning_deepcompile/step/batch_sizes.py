"""The sizes of a batch's tensors: if they change, a compiler may make other graphs, and a step may take more memory."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, nn

_DEEPEST, _MOST = 6, 1000
"""Objects in objects, and all that are looked at: a batch may refer to what is none of it, and that to itself."""


def sizes_of(batch: Any) -> Hashable:
    """Returns the sizes and dtypes of all tensors and arrays in `batch`, wherever they are, with its structure.

    Numbers and texts do not count: they change with every batch, as its index does.

    Args:
        batch: A tensor, or anything that contains some.
    """
    found: list[Hashable] = []
    _look(batch, found, 0)
    return tuple(found)


def _look(value: Any, found: list[Hashable], depth: int) -> None:
    if len(found) >= _MOST:
        return
    if isinstance(value, Tensor) and value.is_nested:  # its sizes are data
        found.append("nested")
    elif isinstance(shape := getattr(value, "shape", None), tuple):
        found.append((tuple(shape), str(getattr(value, "dtype", ""))))
    elif value is None or isinstance(value, bool):
        found.append(value)
    elif isinstance(value, Mapping):
        found.append(len(value))
        for key, one in value.items():
            found.append(str(key))
            _look(one, found, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        found.append(len(value))
        for one in value:
            _look(one, found, depth + 1)
    else:
        found.append(str(type(value)))
        if depth < _DEEPEST and not isinstance(value, type | nn.Module):
            for one in getattr(value, "__dict__", {}).values():
                _look(one, found, depth + 1)


def elements_of(sizes: Hashable) -> int:
    """Returns the elements of all tensors in a batch.

    Args:
        sizes: As of `sizes_of`.
    """
    return sum(map(math.prod, _shapes(sizes)))


def _shapes(sizes: Hashable) -> list[tuple[int, ...]]:
    found = sizes if isinstance(sizes, tuple) else ()
    return [one[0] for one in found if isinstance(one, tuple) and one and isinstance(one[0], tuple)]


class LargestBatch:
    """Tracks the most elements of a batch, and its longest dimension: attention takes the square of that.

    Args:
        most: Both so far; zeros if there was none.

    Attributes:
        most: Both so far.
    """

    def __init__(self, most: tuple[int, int] = (0, 0)) -> None:
        self.most = most

    def grows(self, sizes: Hashable) -> bool:
        """Returns whether a batch is larger than all before, in either; the first one is not.

        Args:
            sizes: As of `sizes_of`.
        """
        longest = max((size for shape in _shapes(sizes) for size in shape), default=0)
        before, self.most = self.most, (max(self.most[0], elements_of(sizes)), max(self.most[1], longest))
        return before != (0, 0) and self.most != before
