"""Determines which regions may be called again with the same inputs, with the same result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from lightning_deepcompile import compat
from lightning_deepcompile.program.graph import named_args
from lightning_deepcompile.runtime.pieces import piece_ops

_PLAIN_PYTHON = ("_operator", "builtins", "math", "torch")


def is_repeatable(nodes: Iterable[fx.Node]) -> bool:
    """Returns whether `nodes` only compute: they write to none of their inputs, and draw no random numbers.

    Operators that are not PyTorch's own might do anything (communicate, for one), so they count as not repeatable, as
    do higher-order operators.
    """
    return all(_only_computes(node) for node in nodes)


def _only_computes(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target in piece_ops():
        return True
    target = node.target
    if isinstance(target, compat.OpOverload):
        if target.namespace not in ("aten", "prims") or compat.schema_of(target).is_mutable:
            return False
        return torch.Tag.nondeterministic_seeded not in target.tags or _without_dropout(named_args(node))
    return getattr(target, "__module__", "") in _PLAIN_PYTHON


def _without_dropout(arguments: Mapping[str, Any]) -> bool:
    """Returns whether an attention operator draws no random numbers: it has no dropout, or reuses forward's mask."""
    return "dropout_p" in arguments and ("philox_seed" in arguments or arguments["dropout_p"] == 0)
