"""Lists that steps append to: ``self.outputs.append(loss)``, read and emptied when the epoch ends.

Dynamo recompiles a step for every length of a list that it sees, and leaves it uncompiled after sixteen. Here it sees a
list that is empty whenever a step begins; items that the step appends move to the user's list at its end. This covers
lists that the step's code uses for nothing else.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Set
from typing import Any

from torch import nn


class _Appended:
    """Replaces a list while a step runs."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def append(self, item: Any) -> None:
        """Appends an item, like a list."""
        self.items.append(item)


class Appends:
    """Stands in for lists that steps append to; one per module, as Dynamo guards on the objects."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stand_ins: dict[str, _Appended] = {}

    @contextlib.contextmanager
    def deferred(self, names: Set[str]) -> Iterator[None]:
        """Replaces lists for the duration of a step.

        Args:
            names: Attributes of the module that the step appends to and uses for nothing else.
        """
        attributes = vars(self._module)
        replaced = {name: attributes[name] for name in sorted(names) if type(attributes.get(name)) in (list, deque)}
        for name in replaced:
            stand_in = attributes[name] = self._stand_ins.setdefault(name, _Appended())
            stand_in.items.clear()
        try:
            yield
        finally:
            for name, real in replaced.items():
                real.extend(self._stand_ins[name].items)
                attributes[name] = real
                self._stand_ins[name].items.clear()
