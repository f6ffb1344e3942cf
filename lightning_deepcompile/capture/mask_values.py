"""Proves that an attention mask is the causal mask, by computing it a few rows at a time: whole, it may fill a device.

With symbolic sizes, it is computed for one length, from operators that are known to be local: the elements of their
result do not depend on the length. So the mask of a shorter text is the upper left part of the mask that was computed,
and one comparison is a proof for all lengths up to that one. A guard has longer texts compiled anew. Other symbolic
sizes, such as the number of rows of a batch, have no value here: what depends on them, other than by repeating
elements, is not proved.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_deepcompile import compat
from lightning_deepcompile.capture.dynamo_graph import computed, name_of

_log = logging.getLogger(__name__)

_ELEMENTWISE = frozenset(
    "clone add sub mul neg abs floordiv floor_divide mod remainder minimum maximum clamp "
    "lt le gt ge eq ne less less_equal greater greater_equal not_equal and_ or_ xor inv invert "
    "logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not "
    "where masked_fill bool int long float type contiguous to".split()
)
"""Operators that compute an element from the elements that broadcasting puts beside it."""

_REPEATING = frozenset("expand expand_as broadcast_to".split())
_CONSTANT = frozenset("ones zeros full new_ones new_zeros new_full ones_like zeros_like full_like".split())
_SHORTEST = 2048
"""The least length that a proof is for, so that texts seldom exceed it."""
_SMALL, _ROWS, _LARGEST = 1 << 24, 1 << 26, 1 << 28
"""Elements of a value that is computed whole, of rows that are computed at a time, and of what may be computed whole
where that cannot be done in rows."""


@torch.no_grad()
def equals_causal(mask: fx.Node, *, sized: bool) -> bool:
    """Returns whether `mask` is the causal mask; if it is, adds a guard to a symbolic length.

    Args:
        mask: A node whose value is boolean, has two dimensions or more, and is not written to. It is computed by pure
            operators.
        sized: Whether it is computed from symbolic sizes.
    """
    *_, rows, size = mask.meta["example_value"].shape
    hint = compat.hint_of(size)
    if hint is None or not statically_known_true(size == rows):
        return False
    length = hint if isinstance(size, int) else max(_SHORTEST, 1 << (hint - 1).bit_length())
    values, step = _Values(size, length, local=sized), max(_ROWS // length, 1)
    with compat.real_tensors():
        try:
            for low in range(0, length, step):
                value = values.rows(mask, low, min(low + step, length))
                columns = torch.arange(length, device=value.device)
                if not bool((value == (columns <= columns[low : low + step, None])).all()):
                    return False
        except _TooLargeError as reason:
            _log.info(
                "An attention mask of %d positions was not analysed: %s is not computed row by row.", length, reason
            )
            return False
        except (_NotLocalError, IndexError, RuntimeError):  # the latter: shapes that differ without repetition
            return False
    return bool(size <= length)  # which is a guard


class _NotLocalError(Exception):
    """An operator is not known to be local, or depends on another symbolic size."""


class _TooLargeError(Exception):
    """A value that is not computed in rows takes too much memory."""


class _Values:
    """Computes values for one length.

    A value may have size 1, or no leading dimension, where the one in the graph repeats elements.

    Args:
        size: The length, symbolic or not.
        length: The number that stands for it.
        local: Whether operators must be known to be local.
    """

    def __init__(self, size: int | torch.SymInt, length: int, *, local: bool) -> None:
        self._size, self._length, self._local = size, length, local
        self._known: dict[fx.Node, Any] = {}

    def rows(self, node: fx.Node, low: int, high: int) -> Tensor:
        """Returns some rows of a value that is computed with the mask's rows and columns, as it is broadcast there."""
        if self._elements(node) > max(_SMALL, self._length):
            if name_of(node) in _ELEMENTWISE:
                return self._call(node, lambda one: self.rows(one, low, high))
            if name_of(node) in _REPEATING or self._adds_dimensions(node):
                return self.rows(_tensor(node.args[0]), low, high)
        value = self.of(node)
        return value[..., low:high, :] if value.dim() > 1 and value.shape[-2] == self._length else value

    def of(self, node: fx.Node) -> Any:
        """Returns a value.

        Raises:
            _NotLocalError: If it is not known to be a part of the value for any greater length.
            _TooLargeError: If it is large.
        """
        if node not in self._known:
            if self._elements(node) > max(_SMALL, self._length, _LARGEST):
                raise _TooLargeError(f"`{name_of(node)}`")
            value = self._compute(node) if self._local else computed(node, self.of)
            if self._local and not isinstance(value, Tensor):
                raise _NotLocalError(name_of(node))
            self._known[node] = value
        return self._known[node]

    def _elements(self, node: fx.Node) -> int:
        """Returns the number of elements of a value, without those of a batch with symbolic sizes."""
        example = node.meta.get("example_value")
        if not isinstance(example, Tensor):
            return 0
        sizes = [self._length if self._is_length(size) else size for size in example.shape]
        return math.prod(size for size in sizes if isinstance(size, int))

    def _adds_dimensions(self, node: fx.Node) -> bool:
        """Returns whether a value is that of its source, with dimensions of size 1 before its own."""
        if name_of(node) not in ("unsqueeze", "getitem") or not isinstance(node.args[0], fx.Node):
            return False
        before, after = (one.meta["example_value"].shape for one in (node.args[0], node))
        if len(before) < 2 or len(before) > len(after) or tuple(after[-2:]) != tuple(before[-2:]):
            return False
        index: Any = node.args[1]
        parts = list(index) if isinstance(index, tuple) else [index]
        while parts and parts[0] is None:
            parts.pop(0)
        whole = name_of(node) == "unsqueeze" or all(part is ... or part == slice(None) for part in parts)
        return whole and all(size == 1 for size in before[:-2])

    def _compute(self, node: fx.Node) -> Any:
        name = name_of(node)
        if name in _ELEMENTWISE | _CONSTANT:
            return self._call(node, self.of)
        if name in _REPEATING:
            return self.of(_tensor(node.args[0]))
        if name == "unsqueeze" and len(node.args) == 2 and type(node.args[1]) is int:
            return self._in_full(node.args[0]).unsqueeze(node.args[1])
        one = {"arange": self._positions, "getitem": self._part, "cumsum": self._sums, "diff": self._differences}
        if name not in one:
            raise _NotLocalError(name)
        return one[name](node)

    def _call(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
        for one in node.all_input_nodes if self._local else ():
            _tensor(one)
        return computed(node, value_of)

    def _positions(self, node: fx.Node) -> Tensor:
        """Returns the value of an `arange` of constants, or from zero to the length."""
        if not node.all_input_nodes:
            return self._call(node, self.of)
        if len(node.args) not in (1, 2) or not set(node.kwargs) <= {"device", "dtype"}:
            raise _NotLocalError("arange")
        *start, end = node.args
        if start not in ([], [0]) or not isinstance(end, fx.Node) or not self._is_length(end.meta["example_value"]):
            raise _NotLocalError("arange")
        options: Any = node.kwargs
        return torch.arange(self._length, **options)

    def _part(self, node: fx.Node) -> Tensor:
        """Returns an indexed value: by slices from the start, and by positions that are not negative."""
        source, index = _tensor(node.args[0]), node.args[1]
        value, dim = self._in_full(source), 0
        found: list[Any] = []
        for part in index if isinstance(index, tuple) else (index,):
            found.append(part)
            if part is None:
                continue
            whole = self._is_whole(source, value, dim)
            if not whole and value.shape[dim] != 1:
                raise _NotLocalError("getitem")  # of which the length decides how much there is
            if isinstance(part, fx.Node):
                example = _tensor(part).meta["example_value"]
                if example.is_floating_point() or example.dtype == torch.bool:
                    raise _NotLocalError("getitem")
                # All elements of what is not whole are equal.
                ones = (1,) * example.dim()
                found[-1] = self._in_full(part) if whole else value.new_zeros(ones, dtype=torch.long)
                if bool((found[-1] < 0).any()):
                    raise _NotLocalError("getitem")  # counted from the end
            elif type(part) is int and part >= 0:
                found[-1] = part if whole else 0
            elif not isinstance(part, slice) or not _from_start(part):
                raise _NotLocalError("getitem")
            dim += 1
        return value[tuple(found)]

    def _sums(self, node: fx.Node) -> Tensor:
        """Returns sums of all elements up to each."""
        dim: Any = node.args[1] if len(node.args) == 2 else node.kwargs.get("dim")
        if len(node.args) + len(node.kwargs) != 2:
            raise _NotLocalError("cumsum")
        return torch.cumsum(self._along(node.args[0], dim), dim)

    def _differences(self, node: fx.Node) -> Tensor:
        """Returns differences from the element before, of which the first one is given."""
        dim: Any = node.kwargs.get("dim", -1)
        first = node.kwargs.get("prepend")
        if len(node.args) != 1 or not set(node.kwargs) <= {"dim", "prepend"} or not isinstance(first, fx.Node):
            raise _NotLocalError("diff")
        value = self._along(node.args[0], dim)
        if not statically_known_true(_tensor(first).meta["example_value"].shape[dim] == 1):
            raise _NotLocalError("diff")
        return torch.diff(value, dim=dim, prepend=self._in_full(first))

    def _along(self, source: Any, dim: Any) -> Tensor:
        """Returns a value that repeats nothing in a dimension."""
        value = self._in_full(source)
        if type(dim) is not int or not self._is_whole(source, value, dim):
            raise _NotLocalError("a dimension")
        return value

    def _in_full(self, node: Any) -> Tensor:
        """Returns a value with all dimensions of the one in the graph."""
        value = self.of(_tensor(node))
        return value[(None,) * (node.meta["example_value"].dim() - value.dim()) + (...,)]

    def _is_whole(self, node: fx.Node, value: Tensor, dim: int) -> bool:
        """Returns whether a value has all elements of a dimension."""
        size = node.meta["example_value"].shape[dim]
        return bool(value.shape[dim] == (self._length if self._is_length(size) else size if type(size) is int else -1))

    def _is_length(self, size: Any) -> bool:
        return isinstance(size, int | torch.SymInt) and statically_known_true(size == self._size)


def _tensor(node: Any) -> fx.Node:
    """Returns `node`, which must stand for a tensor."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("example_value"), Tensor):
        raise _NotLocalError("a size")
    return node


def _from_start(part: slice) -> bool:
    stops = part.stop is None or (type(part.stop) is int and part.stop >= 0)
    return part.start in (None, 0) and part.step in (None, 1) and stops
