"""The symbolic sizes of a program, with the values that they had in one run of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch

Noted = tuple[Any, ...]
"""The sizes of a program's arguments in one run: of a tensor its shape, of an integer its value, else False."""


def note(args: Iterable[Any]) -> Noted:
    """Returns the sizes of a program's arguments."""
    return tuple(tuple(a.shape) if isinstance(a, torch.Tensor) else type(a) is int and a for a in args)


class Sizes:
    """Values of a program's symbolic sizes.

    Args:
        values: By symbol.
    """

    def __init__(self, values: Mapping[Any, int]) -> None:
        self.values = {symbol: sympy.Integer(value) for symbol, value in values.items()}
        self._known: dict[Any, int] = {}  # sizes of a program are few, and each is asked for often

    def __call__(self, number: int | torch.SymInt) -> int:
        """Returns the value of a size; of one that depends on other symbols, its hint."""
        if not isinstance(number, torch.SymInt):
            return int(number)
        found = self.of(number.node.expr)
        return found if found is not None else int(number.node.hint or 0)

    def of(self, expression: Any) -> int | None:
        """Returns the value of a SymPy expression; None if it depends on other symbols."""
        if expression not in self._known:
            value = expression.xreplace(self.values)
            self._known[expression] = int(value) if value.is_number else -1
        found = self._known[expression]
        return None if found < 0 else found


def tensor_bytes(value: object, sizes: Sizes | None = None) -> int:
    """Bytes of a tensor; 0 for anything else.

    Args:
        value: The value, or its metadata.
        sizes: Values of symbolic sizes; None: they count with their hints.
    """
    if not isinstance(value, torch.Tensor):
        return 0
    numel = value.numel()
    if isinstance(numel, torch.SymInt):
        numel = sizes(numel) if sizes is not None else numel.node.hint if numel.node.hint is not None else 0
    return int(numel) * value.element_size()


def read_sizes(inputs: Iterable[Any], noted: Noted) -> Sizes:
    """Returns the sizes of a run: an integer argument, or a dimension of a tensor, is a symbol's value.

    Args:
        inputs: The metadata of the program's inputs.
        noted: The arguments' sizes, in the same order.
    """
    values: dict[Any, int] = {}
    for value, known in zip(inputs, noted, strict=False):
        pairs: Sequence[tuple[Any, Any]] = ()
        if isinstance(value, torch.SymInt):
            pairs = [(value, known)]
        elif isinstance(value, torch.Tensor) and isinstance(known, tuple):
            pairs = list(zip(value.shape, known, strict=False))
        for size, number in pairs:
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and type(number) is int:
                values.setdefault(size.node.expr, number)
    return Sizes(values)
