"""The memory that a plan may use."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from lightning_deepcompile.options import Rule

_BINARY = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS = _BINARY | {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_LEAST = 2**20  # no budget for training; a smaller number is probably in another unit


class MemoryBudgetError(RuntimeError):
    """No schedule fits into the memory budget."""


def parse_budget(
    value: int | float | str | None, total: int, *, name: str = "memory_budget", default: float = 0.9
) -> int:
    """Converts `value` to bytes.

    Args:
        value: Bytes, a text like ``"24GiB"``, or a fraction of `total` (a float of at most 1); None means `default`.
        total: Bytes of the device.
        name: The argument of `CompileConfig`, for the message.
        default: A fraction.

    Raises:
        ValueError: If it is none of these; the message names the value.
    """
    if value is None:
        value = default
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", value)
        if match and match[2].lower() in _UNITS and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2].lower()])
    elif isinstance(value, float):
        if 0 < value <= 1 and math.isfinite(value):
            return int(value * total)
    elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return value
    raise ValueError(f"CompileConfig({name}={value!r}): expected bytes, a text like '24GiB', or a fraction up to 1.0.")


_COUNT = "bytes, a text like '64MiB'"
_BUDGET = "bytes, a text like '24GiB' or '90%', a fraction up to 1.0"


@dataclass(frozen=True)
class _Bytes(Rule):
    """Bytes as `parse_budget` reads them.

    Args:
        budget: Whether they are a part of some memory: then it may be a fraction, and is no tiny number.
    """

    budget: bool

    @property
    def expected(self) -> str:  # type: ignore[override] # says it of this object
        """The rule, in words."""
        return _BUDGET if self.budget else _COUNT

    def complaint(self, value: Any) -> str:
        """Describes the problem with `value`; "" if there is none."""
        if self.budget and type(value) is int and 0 < value < _LEAST:
            share = f", or '{value}%' for a part" if value <= 100 else ""
            return f"that is {value} bytes. Did you mean '{value}GiB'{share}? '{value}B' is read as so few bytes."
        value = as_fraction(value)
        try:
            parse_budget(value, total=1)
        except ValueError:
            return f"expected {self.expected}."
        return "" if self.budget or not isinstance(value, float) else f"expected {self.expected}."


Budget = Annotated[int | float | str, _Bytes(budget=True)]
"""A part of some memory."""
ByteCount = Annotated[int | str, _Bytes(budget=False)]
"""A number of bytes."""


def as_fraction(value: Any) -> Any:
    """The float that a text like ``"90%"`` stands for; anything else unchanged."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", value) if isinstance(value, str) else None
    return float(match[1]) / 100 if match and 0 < float(match[1]) <= 100 else value
