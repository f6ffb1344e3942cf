"""``self.log`` inside a compiled step: calls are recorded while the step runs, and carried out right after it.

Lightning's ``log`` cannot be traced: it breaks the graph at every call, which separates the loss from the model.
Recording name, value and arguments in a list is traceable, and the replay happens inside the same hook, so metrics are
the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

_Entry = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def _recorder(entries: list[_Entry]) -> Callable[..., None]:
    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        # Undetached, every logged tensor would add an input to the backward graph. A copy, as in Lightning's own `log`:
        # the step may go on to write to the tensor.
        if isinstance(value, Tensor):
            value = value.clone() if kwargs.get("enable_graph", False) else value.detach().clone()
        entries.append((name, value, args, kwargs))

    return log


class DeferredLog:
    """Replaces a module's ``log`` for the duration of a step; one per module, as Dynamo guards on the function."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._entries: list[_Entry] = []
        self._log = _recorder(self._entries)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Records inside, and replays at the end; nothing is replayed after an exception."""
        # Dynamo guards on the list: it must be empty whenever a step begins.
        self._entries.clear()
        previous = self._module.__dict__.get("log")
        self._module.__dict__["log"] = self._log
        try:
            yield
        finally:
            if previous is None:
                del self._module.__dict__["log"]
            else:
                self._module.__dict__["log"] = previous
        entries = list(self._entries)
        self._entries.clear()
        for name, value, args, kwargs in entries:  # numpy's scalars come out of graphs as arrays
            value = value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
            self._module.log(name, value, *args, **kwargs)
