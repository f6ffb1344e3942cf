"""Makes Lightning know our strategies as soon as Lightning is imported, without anybody importing this package.

Lightning reads no entry point when it looks up a strategy by name. But it imports torch first, and torch calls every
entry point of the group ``torch.backends`` at the end of its own import. :func:`install` is one of them: it waits for
Lightning's registry to be imported, and adds our names to it.

An error here would make ``import torch`` fail for everybody on the machine. So this module (and the package's
``__init__``, which is imported with it) uses the standard library alone, and :func:`install` never raises.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["install"]

_LIGHTNING = "lightning.pytorch.strategies"
# The other name of the same project is a class tree of its own, which our strategy is no part of. Where it is the only
# one installed, the name resolves all the same, to an error that says what to install.
_FALLBACK = "pytorch_lightning.strategies"
_CLI = "lightning.pytorch.cli"


def install() -> None:
    """Registers the strategies with Lightning: now if it is imported already, else right after it is.

    It may be called any number of times, and never raises.
    """
    try:
        if (module := sys.modules.get(_LIGHTNING)) is not None:
            _register(module)
        if (module := sys.modules.get(_CLI)) is not None:
            _name_classes(module)
        # The finder stays for the life of the process, as taking it out while another thread walks through
        # `sys.meta_path` would make that thread skip a finder.
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception as error:
        _warn(error)


def _register(module: ModuleType) -> None:
    """Adds our names to the registry of `module`, which is Lightning's ``strategies`` package."""
    try:
        # A module that is still being executed has no registry yet; the loader below comes back to it.
        if (registry := getattr(module, "StrategyRegistry", None)) is not None:
            from lightning_deepcompile.registry import register_strategies

            register_strategies(registry)
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


def _has_lightning() -> bool:
    try:
        return find_spec("lightning") is not None
    except (ImportError, ValueError):  # hidden on purpose, or half imported
        return False


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
    """Finds two modules of Lightning's as the other finders do, and has us told when they were executed."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in (_LIGHTNING, _FALLBACK, _CLI) or name in self._searching:
            return None
        # Import hooks of others may ask all finders in turn, this one included.
        self._searching.add(name)
        try:
            if name == _FALLBACK and _has_lightning():
                return None
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
        # From here on the module looks as if nobody had stood in between: resources, sources and reloading go by these.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
