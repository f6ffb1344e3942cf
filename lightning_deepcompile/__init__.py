"""Distributed training of unmodified LightningModules, compiled: ``Trainer(strategy="deepcompile")``.

Importing this package costs next to nothing (PyTorch imports it through an entry point at its own start); the names
below are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_deepcompile._autoload import install as _install

if TYPE_CHECKING:
    from lightning_deepcompile.config import CompileConfig
    from lightning_deepcompile.runtime import dc
    from lightning_deepcompile.summary import Summary
    from lightning_deepcompile.trainer.monitor import DeepCompileMonitor
    from lightning_deepcompile.trainer.precision import DeepCompilePrecision
    from lightning_deepcompile.trainer.strategy import DeepCompileStrategy

__version__ = "0.1.0"
__all__ = [
    "CompileConfig",
    "DeepCompileMonitor",
    "DeepCompilePrecision",
    "DeepCompileStrategy",
    "Summary",
    "__version__",
    "dc",
]

_HOMES = {
    "CompileConfig": "lightning_deepcompile.config",
    "DeepCompileMonitor": "lightning_deepcompile.trainer.monitor",
    "DeepCompilePrecision": "lightning_deepcompile.trainer.precision",
    "DeepCompileStrategy": "lightning_deepcompile.trainer.strategy",
    "Summary": "lightning_deepcompile.summary",
    "dc": "lightning_deepcompile.runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


_install()
