"""Registers our strategies as soon as Lightning is imported, without an import of this package by the user.

Lightning reads no entry point when it looks up a strategy by name. But it imports torch first, and torch calls every
entry point of the group ``torch.backends`` at the end of its own import. The module ``lightning_deepcompile_autoload``,
which lies beside the package, is one of them and calls :func:`install`, which waits for Lightning's registries to be
imported, and adds our names to them.

An error here would make ``import torch`` fail for everybody on the machine. So this module (and the package's
``__init__``, which is imported with it) uses only the standard library, and :func:`install` never raises.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: The packages of Lightning that have a registry of strategies, and the registry's name there. Fabric, and the package
#: `pytorch_lightning`, which is a class tree of its own, do not run our strategies: there the names end in an error.
_REGISTRIES = {
    "lightning.pytorch.strategies": "StrategyRegistry",
    "pytorch_lightning.strategies": "StrategyRegistry",
    "lightning.fabric.strategies": "STRATEGY_REGISTRY",
    "lightning_fabric.strategies": "STRATEGY_REGISTRY",
}
_CLI = "lightning.pytorch.cli"


def install() -> None:
    """Registers the strategies with Lightning: now if it is imported already, else right after it is.

    It may be called any number of times, and never raises.
    """
    try:
        for name in _REGISTRIES:
            if (module := sys.modules.get(name)) is not None:
                _register(module)
        if (module := sys.modules.get(_CLI)) is not None:
            _name_classes(module)
        # The finder stays for the life of the process: removing it while another thread iterates over `sys.meta_path`
        # would make that thread skip a finder.
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception as error:
        _warn(error)


def _register(module: ModuleType) -> None:
    """Adds our names to the registry of `module`, which is one of Lightning's ``strategies`` packages."""
    try:
        # A module that is still being executed has no registry yet; the loader below comes back to it.
        if (registry := getattr(module, _REGISTRIES[module.__name__], None)) is not None:
            from lightning_deepcompile.registry import register_refusals, register_strategies

            if module.__name__ == "lightning.pytorch.strategies":
                register_strategies(registry)
            else:
                register_refusals(registry, module.__name__.partition(".strategies")[0])
    except Exception as error:
        _warn(error)


def _name_classes(module: ModuleType) -> None:
    """Imports the strategy for LightningCLI, which knows short names of classes that are imported, and their settings.

    That makes ``--trainer.strategy deepcompile --trainer.strategy.stage 2`` a command line that it can read.
    """
    try:
        if "jsonargparse" in sys.modules:  # else there is no LightningCLI, though the module can be imported
            importlib.import_module("lightning_deepcompile.trainer.short_names")
    except Exception as error:
        _warn(error)


def _warn(error: Exception) -> None:
    try:
        warnings.warn(
            f"lightning_deepcompile could not register with Lightning ({type(error).__name__}: {error}). The Trainer "
            'will not know strategy="deepcompile"; pass lightning_deepcompile.DeepCompileStrategy() instead.',
            RuntimeWarning,
            stacklevel=2,
        )
    except Warning:  # the user asked for warnings to be errors; `import torch` must succeed even so
        print(f"lightning_deepcompile: {error}", file=sys.stderr)


class _Finder:
    """Finds Lightning's modules as the other finders do, and calls us when one was executed."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in (*_REGISTRIES, _CLI) or name in self._searching:
            return None
        # Other import hooks may ask all finders in turn, including this one.
        self._searching.add(name)
        try:
            spec = self._ask_the_others(name, path, target)
        finally:
            self._searching.discard(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            then = _name_classes if name == _CLI else _register
            # Python asks for no more than the methods.
            spec.loader = _Loader(spec.loader, then)  # type: ignore[assignment]
        return spec

    def _ask_the_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            search = getattr(finder, "find_spec", None)
            if finder is not self and search is not None and (spec := search(name, path, target)) is not None:
                return spec
        return None


class _Loader:
    """Executes a module with the loader it stands for, then calls `then` with it."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module shows no trace of this loader: resources, sources and reloading depend on these
        # attributes.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
