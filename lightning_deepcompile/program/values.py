"""The values of a program, by name: its inputs, what regions make, parameters, gradients and sizes.

Instructions name the values that they read and make. A value that no region and no instruction makes is computed
before the first region that reads it: arithmetic of sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx


class Name(str):
    """Refers to a value among arguments, where any other text is a constant."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a program.

    Args:
        meta: Its metadata: a fake tensor, or a number that may be symbolic.
        function: Computes it of other values; None for inputs, and for what regions make.
        args: The function's arguments, in which a `Name` stands for a value.
        kwargs: The same by keyword.
        communicated: Whether it exists from the instruction that gathers or reduces it on; the runtime may do that in
            place of `function`.
        saved: Its number, if it is a saved tensor that may be offloaded.
    """

    meta: Any
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    communicated: bool = False
    saved: int | None = None

    @property
    def reads(self) -> list[Name]:
        """The values that `function` reads."""
        return names_in((self.args, self.kwargs))


def names_in(arguments: Any) -> list[Name]:
    """Returns the values that arguments name, at any depth."""
    found: list[Name] = []

    def look(part: Any) -> Any:
        if isinstance(part, Name):
            found.append(part)
        return part

    fx.node.map_aggregate(arguments, look)
    return found


def parameter_name(number: int) -> Name:
    """The name of a gathered parameter, by its number within the model."""
    return Name(f"parameter_{number}")
