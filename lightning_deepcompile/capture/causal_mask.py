"""Recognises attention masks that are the causal mask, and replaces them by ``is_causal=True``.

Transformers builds its mask with ordinary operators when it is traced; a mask given as a tensor rules out the flash
attention kernels. If the mask depends only on constants and sizes, it is computed during compilation and compared with
the causal mask element by element (`mask_values.py`). With operators that are not known to be pure, and if anything may
write to the mask in place, the call does not change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from lightning_deepcompile import compat
from lightning_deepcompile.capture.dynamo_graph import (
    VIEWS,
    checkpoint_body,
    checkpoint_operands,
    erase_unused,
    leaves,
    name_of,
)
from lightning_deepcompile.capture.mask_values import equals_causal

_log = logging.getLogger(__name__)
_ATTENTION = F.scaled_dot_product_attention
# Values that the mask's computation may read besides other nodes.
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, slice, type(Ellipsis))
# Functions of torch, of `operator`, and methods of tensors: their value depends on their arguments alone, and is new.
_FRESH = frozenset(
    "arange ones zeros full eye tril triu ones_like zeros_like full_like new_ones new_zeros new_full clone "
    "add sub mul neg abs floordiv floor_divide mod remainder minimum maximum clamp cumsum diff "
    "lt le gt ge eq ne less less_equal greater greater_equal not_equal and_ or_ xor inv invert "
    "logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not "
    "where masked_fill cat concat stack repeat repeat_interleave tile roll flip outer any all".split()
)
# What else reads positions or masks without writing to them or returning their memory.
_READERS = frozenset("embedding linear matmul bmm pow exp sin cos softmax scaled_dot_product_attention".split())


def recognize_causal_masks(gm: fx.GraphModule) -> int:
    """Replaces ``attn_mask=<the causal mask>`` by ``is_causal=True``, in place, also inside checkpointed layers.

    Args:
        gm: Dynamo's graph, before AOTAutograd.

    Returns:
        How many attention calls were changed.
    """
    changed = _rewrite(gm, {})
    if changed:
        _log.info("Recognised the causal mask in %d attention calls.", changed)
    return changed


def _rewrite(gm: fx.GraphModule, verdicts: dict[fx.Node, bool]) -> int:
    """Rewrites the attention calls of `gm`; `verdicts` says which of its inputs are the causal mask."""
    changed = 0
    dropped: set[fx.Node] = set()

    def is_causal(mask: fx.Node) -> bool:
        if mask not in verdicts:
            verdicts[mask] = _is_causal(mask)
        return verdicts[mask]

    for node in gm.graph.nodes:
        if compat.is_checkpoint(node):
            pairs = checkpoint_operands(gm, node)
            changed += (
                _rewrite(checkpoint_body(gm, node), {inner: is_causal(outer) for inner, outer in pairs}) if pairs else 0
            )
        if node.op != "call_function" or node.target is not _ATTENTION:
            continue
        mask = _argument(node, 3, "attn_mask")
        if isinstance(mask, fx.Node) and is_causal(mask) and _lengths_match(node, mask):
            _set_causal(node)
            dropped.add(mask)
            changed += 1
    if changed:
        erase_unused({node for mask in dropped for node in _constant_ancestors(mask) or ()})
        gm.recompile()
    return changed


def _argument(attention: fx.Node, position: int, name: str) -> Any:
    return attention.args[position] if len(attention.args) > position else attention.kwargs.get(name)


def _set_causal(attention: fx.Node) -> None:
    args = list(attention.args)
    kwargs = {key: value for key, value in attention.kwargs.items() if key != "attn_mask"}
    if len(args) > 3:
        args[3] = None
    if len(args) > 5:
        args[5] = True
    else:
        kwargs["is_causal"] = True
    attention.args, attention.kwargs = tuple(args), kwargs


def _lengths_match(attention: fx.Node, mask: fx.Node) -> bool:
    """Returns whether query and key have equal lengths: only then is `is_causal` the mask that was proved."""
    lengths = []
    for position, name in enumerate(("query", "key")):
        source = _argument(attention, position, name)
        value = source.meta.get("example_value") if isinstance(source, fx.Node) else None
        if not isinstance(value, torch.Tensor):
            return False
        lengths.append(value.shape[-2])
    lengths += mask.meta["example_value"].shape[-2:]
    return all(statically_known_true(lengths[0] == length) for length in lengths[1:])


def _is_causal(mask: fx.Node) -> bool:
    example = mask.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.dtype != torch.bool or example.dim() < 2:
        return False
    if not statically_known_true(example.shape[-1] == example.shape[-2]):
        return False
    ancestors = _constant_ancestors(mask)
    if ancestors is None:
        return False
    gm = mask.graph.owning_module
    assert gm is not None
    if _may_be_written(gm, ancestors):
        return False
    inputs = [one.meta.get("example_value") for node in ancestors for one in node.all_input_nodes]
    return equals_causal(mask, sized=any(isinstance(size, torch.SymInt) for size in (*inputs, *example.shape)))


def _constant_ancestors(mask: fx.Node) -> set[fx.Node] | None:
    """All nodes that `mask` is computed from, but for sizes; None if one of them depends on data or state."""
    ancestors: set[fx.Node] = set()
    pending = [mask]
    while pending:
        node = pending.pop()
        if node in ancestors or isinstance(node.meta.get("example_value"), torch.SymInt):
            continue
        if name_of(node) not in _FRESH | VIEWS:
            return None
        if not all(isinstance(leaf, _PLAIN) for leaf in leaves((node.args, node.kwargs))):
            return None
        ancestors.add(node)
        pending.extend(node.all_input_nodes)
    return ancestors


def _may_be_written(gm: fx.GraphModule, nodes: Iterable[fx.Node], *, operands: bool = False) -> bool:
    """Returns whether anything in `gm` may write to memory that one of `nodes` returns.

    Args:
        gm: The graph.
        nodes: Nodes of it.
        operands: Whether the graph is called by another: then returning their memory counts, as the caller may write to
            it.
    """
    aliases = set(nodes)
    pending = list(aliases)
    while pending:
        views = {user for user in pending.pop().users if name_of(user) in VIEWS} - aliases
        aliases |= views
        pending += views
    for user in {user for node in aliases for user in node.users}:
        if compat.is_checkpoint(user):
            inner = [i for i, o in checkpoint_operands(gm, user) if o in aliases]
            if not inner or _may_be_written(checkpoint_body(gm, user), inner, operands=True):
                return True
        elif user.op == "output":
            if operands:
                return True
        elif "out" in user.kwargs or name_of(user) not in _FRESH | VIEWS | _READERS:
            return True
    return False
