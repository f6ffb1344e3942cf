"""The sizes that inputs of steps have had: which vary, and what new ones cost."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_deepcompile import compat
from lightning_deepcompile.program.printer import format_count

__all__ = ["InputSizes"]

_VARIES = 3
"""Different sizes with which a dimension varies. A smaller last batch is the second size, and no more."""

_DEEPEST, _MOST = 4, 200
"""Objects in objects, and inputs, that are looked at."""

_COUNTED = frozenset({"batch_idx", "dataloader_idx"})
"""Arguments that differ in every call, and of which Dynamo makes no other graph for long."""


class InputSizes:
    """Finds the inputs whose sizes vary, and counts the graphs that new sizes cost.

    A dimension that varied in one step is symbolic from the first graph of another step on, such as validation, and if
    a step is traced again. Otherwise the first graph would be of one size, and dropped with the second batch.
    """

    def __init__(self) -> None:
        self._sizes: defaultdict[tuple[str, str], set[int]] = defaultdict(set)  # by step and input
        self._last: dict[tuple[str, str], int] = {}
        self._new: tuple[str, ...] = ()  # inputs of a size that no call of the step had before
        self._changed: tuple[str, ...] = ()  # inputs of another size than in the call before
        self._graphs: Counter[tuple[str, ...]] = Counter()

    def begin(self, name: str, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call before a step runs.

        Args:
            name: The step's name.
            step: The step, whose signature names its arguments.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        inputs = {(name, place): size for place, size, _, _ in _inputs(step, args, kwargs)}
        known = {key: size for key, size in inputs.items() if key in self._last}
        self._new = tuple(key[1] for key, size in known.items() if size not in self._sizes[key])
        self._changed = tuple(key[1] for key, size in known.items() if size != self._last[key])
        self._last.update(inputs)
        for key, size in inputs.items():
            self._sizes[key].add(size)

    def mark(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Makes dimensions that have varied symbolic; call before a step is compiled for the first time."""
        for place, _, tensor, dim in _inputs(step, args, kwargs):
            if tensor is not None and len(self._sizes_of(place)) >= _VARIES:
                compat.mark_dynamic(tensor, dim)

    def _sizes_of(self, place: str) -> set[int]:
        """The sizes that an input has had, in all steps."""
        return set().union(*(sizes for (_, other), sizes in self._sizes.items() if other == place))

    def captured(self, graphs: int) -> None:
        """Call after a step has run.

        Args:
            graphs: The number of graphs that were captured meanwhile.
        """
        if graphs and (cause := self._new or self._changed):
            self._graphs[cause] += graphs

    def describe(self) -> list[str]:
        """Returns the inputs of which new sizes cost graphs, the most expensive first."""
        return [
            f"{self._describe(places)}: {format_count(count, 'graph')}" for places, count in self._graphs.most_common()
        ]

    def _describe(self, places: tuple[str, ...]) -> str:
        first, sizes = places[0], sorted(self._sizes_of(places[0]))
        others = f" and {format_count(len(places) - 1, 'other')}" if len(places) > 1 else ""
        shown = ", ".join(map(str, sizes)) if len(sizes) < 4 else f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}"
        return f"{first}{others} ({shown})"


def _inputs(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, int, Tensor | None, int]]:
    """The dimensions of tensors, the lengths of lists, and numbers, each with its name, and where it is of a tensor."""
    names = [*inspect.signature(step).parameters, *(f"args[{index}]" for index in range(len(args)))]
    found = 0
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if name in _COUNTED:
            continue
        for one in _look(name, value, 0):
            yield one
            if (found := found + 1) >= _MOST:
                return


def _look(name: str, value: Any, depth: int) -> Iterator[tuple[str, int, Tensor | None, int]]:
    if isinstance(value, Tensor):
        if not value.is_nested:  # its sizes are data
            for dim, size in enumerate(value.shape):
                yield f"{name}, dimension {dim}", size, value, dim
    elif isinstance(value, int) and not isinstance(value, bool):
        yield name, value, None, 0
    elif depth < _DEEPEST and isinstance(value, Mapping):
        for key, one in value.items():
            yield from _look(f"{name}[{key!r}]", one, depth + 1)
    elif depth < _DEEPEST and isinstance(value, list | tuple):
        yield f"len({name})", len(value), None, 0
        for index, one in enumerate(value):
            yield from _look(f"{name}[{index}]", one, depth + 1)
