"""Loads the C++ extension at first use, with an error that says how to build it."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from lightning_deepcompile.installation import rebuild_command


class ExtensionNotBuiltError(RuntimeError):
    """The C++ runtime is missing, or was built for another PyTorch."""


@functools.cache
def load_extension() -> ModuleType:
    """Imports ``lightning_deepcompile._C`` and registers the operators' fake kernels and derivatives.

    Returns:
        The extension module; it has ``Runtime`` and ``build_info``.

    Raises:
        ExtensionNotBuiltError: If the extension was not built or does not load with this PyTorch.
    """
    try:
        module = importlib.import_module("lightning_deepcompile._C")
    except ImportError as error:
        raise ExtensionNotBuiltError(
            f"The C++ runtime of lightning_deepcompile could not be loaded ({error}). It is built on installation, for "
            f"the PyTorch that is installed then (now {torch.__version__}). Build it again, with g++ (C++20): "
            f"`{rebuild_command()}`. "
            "`python -m lightning_deepcompile` shows what is missing."
        ) from error
    from lightning_deepcompile.runtime import ops

    ops.register()
    return module
