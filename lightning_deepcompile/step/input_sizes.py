"""The sizes that inputs of steps have had, on all ranks: which vary, and what new ones cost."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_deepcompile import compat
from lightning_deepcompile.program.printer import format_count
from lightning_deepcompile.ranks.exchange import alike, maxima

_VARIES = 3
"""Different sizes with which a dimension varies. A smaller last batch is the second size, and no more."""

_DEEPEST, _MOST = 4, 200
"""Objects in objects, and inputs, that are looked at."""

_COUNTED = frozenset({"batch_idx", "dataloader_idx"})
"""Arguments that differ in every call, and of which Dynamo makes no other graph for long."""


class InputSizes:
    """Finds the inputs whose sizes vary, and counts the graphs that new sizes cost.

    A dimension that varied in one step is symbolic from the first graph of another step on, such as validation, and if
    a step is traced again. Otherwise the first graph would be of one size, and dropped with the second batch. So is one
    that differs between the ranks in the first step.

    Where another dimension than the first varies for the first time, a graph is made anyway, and first dimensions are
    symbolic in it, too: ragged batches have few rows at times, and their number would cost the next graph.
    """

    def __init__(self) -> None:
        self._sizes: defaultdict[tuple[str, str], set[int]] = defaultdict(set)  # by step and input
        self._last: dict[tuple[str, str], int] = {}
        self._new: tuple[str, ...] = ()  # inputs of a size that no call of the step had before
        self._changed: tuple[str, ...] = ()  # inputs of another size than in the call before
        self._graphs: Counter[tuple[str, ...]] = Counter()
        self._second: set[str] = set()  # inputs of which a step has its second size
        self._differ: set[str] = set()  # inputs of which ranks have had different sizes in their first step

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
        self._second = {key[1] for key in known if self._sizes[key] == {self._last[key]} != {inputs[key]}}
        self._last.update(inputs)
        for key, size in inputs.items():
            self._sizes[key].add(size)

    def compare(self, name: str, group: dist.ProcessGroup) -> None:
        """Finds the inputs whose sizes differ between ranks; a collective, in a step of all ranks."""
        sizes = {place: size for (step, place), size in self._last.items() if step == name}
        if alike("\n".join(sizes), group):
            numbers = [float(size) for size in sizes.values()]
            found = maxima([*numbers, *(-number for number in numbers)], group)
            pairs = zip(sizes, found[: len(sizes)], found[len(sizes) :], strict=True)
            self._differ = {place for place, most, negated in pairs if most != -negated}

    def mark(
        self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, first: bool = True
    ) -> None:
        """Makes dimensions that vary symbolic in the graph that is about to be made; call before a step runs.

        Args:
            step: As of `begin`.
            args: Its arguments.
            kwargs: Its keyword arguments.
            first: Whether it is compiled for the first time.
        """
        if not first and not self._second:
            return
        inputs = [(place, tensor, dim) for place, _, tensor, dim in _inputs(step, args, kwargs) if tensor is not None]
        varies = self._varies if first else self._second.__contains__
        found = [(tensor, dim) for place, tensor, dim in inputs if varies(place)]
        rows = {tensor.shape[0] for tensor, _ in found}
        found += [(tensor, dim) for _, tensor, dim in inputs if dim == 0 and tensor.shape[0] in rows]
        for tensor, dim in found:
            compat.mark_dynamic(tensor, dim)

    def _varies(self, place: str) -> bool:
        return place in self._differ or len(self._sizes_of(place)) >= _VARIES

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
