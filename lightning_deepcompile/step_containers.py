"""Lists and dicts that steps fill: ``self.outputs.append(loss)``, read and emptied when the epoch ends.

Dynamo compiles a step anew for every length of a list that it sees. Here it sees one that is empty whenever a step
begins, and what the step appends to that goes to the user's list when it is over. Whatever else a step does with the
list runs on the host, between two graphs, on the user's own.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_deepcompile.step_numbers import plain

__all__ = ["StepContainers", "StepDeque", "StepDict", "StepList"]

_FEW = 64
"""Containers of more entries are not looked through for others: that would cost time in every step."""

_GROWING = 3
"""After so many steps that changed its size, a container is one that steps fill. Others are full sooner."""

on_host = torch.compiler.disable


class _StandIn:
    """Takes a container's place while a step runs.

    Attributes:
        real: The user's container.
    """

    def __init__(self, real: Any) -> None:
        self.real = real
        self._lent: list[_StandIn] = []  # in the place of what is inside of it

    def settle(self) -> Any:
        """The user's container, with all that was meant for it."""
        for one in self._lent:
            one.settle()
        return self.real

    def _lend(self, value: Any) -> Any:
        if type(value) not in _KINDS:
            return value
        self._lent.append(_KINDS[type(value)](value))
        return self._lent[-1]

    @on_host
    def __getitem__(self, key: Any) -> Any:
        return self._lend(self.settle()[key])

    @on_host
    def __setitem__(self, key: Any, value: Any) -> None:
        self.settle()[key] = plain(value)

    @on_host
    def __delitem__(self, key: Any) -> None:
        del self.settle()[key]

    @on_host
    def __len__(self) -> int:
        return len(self.settle())

    @on_host
    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.settle()))

    @on_host
    def __contains__(self, value: Any) -> bool:
        return value in self.settle()

    @on_host
    def __eq__(self, other: object) -> bool:
        return self.settle() == (other.settle() if isinstance(other, _StandIn) else other)

    @on_host
    def __repr__(self) -> str:
        return repr(self.settle())

    @on_host
    def clear(self) -> None:
        """As the container's."""
        self.settle().clear()

    @on_host
    def copy(self) -> Any:
        """As the container's."""
        return self.settle().copy()

    __hash__ = None  # type: ignore[assignment]


class StepList(_StandIn, MutableSequence[Any]):
    """In the place of a list."""

    def __init__(self, real: list[Any]) -> None:
        super().__init__(real)
        self._new: list[Any] = []  # Dynamo guards on it: it must be empty whenever a step begins

    def settle(self) -> Any:
        """The user's list, with all that was appended."""
        super().settle()
        self.real.extend(map(plain, self._new))
        self._new.clear()
        return self.real

    def append(self, value: Any) -> None:
        """As a list's; inside of the graph."""
        self._new.append(value)

    @on_host
    def insert(self, index: int, value: Any) -> None:
        """As a list's."""
        self.settle().insert(index, plain(value))

    @on_host
    def sort(self, **options: Any) -> None:
        """As a list's."""
        self.settle().sort(**options)

    @on_host
    def __add__(self, other: Any) -> list[Any]:
        return self.settle() + list(other)


class StepDeque(StepList):
    """In the place of a deque. Those of bounded length always have one: inside of graphs they would forget nothing."""

    @on_host
    def appendleft(self, value: Any) -> None:
        """As a deque's."""
        self.settle().appendleft(plain(value))

    @on_host
    def extendleft(self, values: Any) -> None:
        """As a deque's."""
        self.settle().extendleft(map(plain, values))

    @on_host
    def popleft(self) -> Any:
        """As a deque's."""
        return self.settle().popleft()

    @on_host
    def rotate(self, steps: int = 1) -> None:
        """As a deque's."""
        self.settle().rotate(steps)

    @property
    def maxlen(self) -> int | None:
        """As a deque's."""
        return self.real.maxlen


class StepDict(_StandIn, MutableMapping[Any, Any]):
    """In the place of a dict."""


_KINDS: dict[type, type[_StandIn]] = {list: StepList, deque: StepDeque, dict: StepDict, defaultdict: StepDict}


class StepContainers:
    """Watches a LightningModule's own lists and dicts, and gives those that steps fill a stand-in.

    Args:
        module: The module; LightningModules inside of it are watched, too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [child for child in module.modules() if isinstance(child, pl.LightningModule)]
        self._ignored = frozenset(vars(pl.LightningModule()))
        self._growing: dict[tuple[int, str], type[_StandIn]] = {}
        self._changes: Counter[tuple[int, str]] = Counter()  # steps that have changed its size

    def run(self, step: Callable[[], Any]) -> Any:
        """Runs a step in which stand-ins are in place.

        Args:
            step: The step.

        Returns:
            What it returns, with the user's containers.
        """
        with self._stood_in_for():
            result = step()
            return _without_stand_ins(result) if self._growing else result

    @contextlib.contextmanager
    def _stood_in_for(self) -> Iterator[None]:
        before = self._sizes()
        used = {}
        for number, name in before:
            value = vars(self._modules[number])[name]
            if type(value) is deque and value.maxlen is not None:
                self._growing[number, name] = StepDeque
        for (number, name), kind in self._growing.items():
            attributes = vars(self._modules[number])
            if _KINDS.get(type(attributes.get(name))) is kind:
                attributes[name] = used[number, name] = kind(attributes[name])
        try:
            yield
        except TypeError as error:
            if not any(kind.__name__ in str(error) for kind in _KINDS.values()):
                raise
            raise TypeError(
                f"{error}: a step passes on a list or dict of the LightningModule that it also fills. Pass `list(...)` "
                "of it; or, where it grows with every step, which would be compiled anew each time, use it in a hook "
                "such as `on_train_batch_end`."
            ) from error
        finally:
            for (number, name), stand_in in used.items():
                real, attributes = stand_in.settle(), vars(self._modules[number])
                if attributes.get(name) is stand_in:  # else the step has put something else there
                    attributes[name] = real
        self._changes.update(place for place, size in self._sizes().items() if before.get(place) != size)
        for place in [place for place, count in self._changes.items() if count >= _GROWING]:
            del self._changes[place]
            self._growing[place] = _KINDS[type(vars(self._modules[place[0]])[place[1]])]

    def _sizes(self) -> dict[tuple[int, str], tuple[int, ...]]:
        return {
            (number, name): _sizes_of(value)
            for number, module in enumerate(self._modules)
            for name, value in vars(module).items()
            if type(value) in _KINDS and name not in self._ignored
        }


def _without_stand_ins(value: Any) -> Any:
    if isinstance(value, _StandIn):
        return value.settle()
    if type(value) is dict:
        return {key: _without_stand_ins(item) for key, item in value.items()}
    return type(value)(map(_without_stand_ins, value)) if type(value) in (list, tuple) else value


def _sizes_of(value: Any) -> tuple[int, ...]:
    """The length of a container, and of those inside of it."""
    if len(value) > _FEW:
        return (len(value),)
    inside = value.values() if isinstance(value, dict) else value
    return (len(value), *(len(one) for one in inside if type(one) in _KINDS))
