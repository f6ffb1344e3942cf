"""Modules: the base class of layers, and the function that a module's call runs.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

__all__ = ["BatchNorm", "hooked_forward"]


def hooked_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's `forward` with the hooks around it: a call runs it unless something else was put in its place."""
    return module._call_impl
