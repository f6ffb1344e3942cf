"""F-strings that Dynamo gets wrong (see `compat_bytecode.spelled_out`) are other code while a step runs."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import lightning.pytorch as pl
from torch import nn

from lightning_deepcompile.compat_bytecode import spelled_out

__all__ = ["FormatStrings"]


class FormatStrings:
    """Replaces a LightningModule's methods with such f-strings; one per module, as Dynamo guards on functions.

    Args:
        module: The module; methods of LightningModules inside of it are looked at, too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._spelled_out = [
            (child, name, method)
            for child in module.modules()
            if isinstance(child, pl.LightningModule)
            for name, method in _spelled_out_methods(child).items()
        ]

    @contextlib.contextmanager
    def spelled_out(self) -> Iterator[None]:
        """For the duration of a step."""
        placed = [place for place in self._spelled_out if place[1] not in vars(place[0])]
        for child, name, method in placed:
            vars(child)[name] = method
        try:
            yield
        finally:
            for child, name, _ in placed:
                vars(child).pop(name, None)


def _spelled_out_methods(module: pl.LightningModule) -> dict[str, types.MethodType]:
    found: dict[str, types.MethodType] = {}
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, pl.LightningModule)]
    for kind in reversed(kinds[: kinds.index(pl.LightningModule)]):
        for name, function in vars(kind).items():
            found.pop(name, None)  # what a base class calls so
            if isinstance(function, types.FunctionType) and (copy := spelled_out(function)) is not function:
                found[name] = types.MethodType(copy, module)
    return found
