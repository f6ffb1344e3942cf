"""Recognises attention masks that are the causal mask, and replaces them by ``is_causal=True``.

Transformers builds its mask with ordinary operators when it is traced; a mask given as a tensor rules out the flash
attention kernels. If the mask depends only on constants, it is computed during compilation and compared with the causal
mask element by element: that is a proof for the graph's static shapes. A long sequence's mask, which would fill a
device, is computed a few rows at a time. Masks with symbolic sizes take another proof (`symbolic_mask.py`). With
operators that are not known to be pure, and if anything may write to the mask in place, the call does not change.
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
    computed,
    erase_unused,
    leaves,
    name_of,
)
from lightning_deepcompile.capture.symbolic_mask import ELEMENTWISE, is_causal_for_all_sizes

__all__ = ["recognize_causal_masks"]

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
# Elements of a mask: of what is computed whole, of rows that are computed at a time, and of what may be computed whole
# where that cannot be done in rows.
_SMALL, _ROWS, _LARGEST = 1 << 24, 1 << 26, 1 << 28
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
    if any(not isinstance(size, int) for size in example.shape):
        return is_causal_for_all_sizes(mask)
    return _equals_causal(mask, example.shape[-1])


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


@torch.no_grad()
def _equals_causal(mask: fx.Node, length: int) -> bool:
    rows = _Rows(length)
    step = max(_ROWS // length, 1)
    with compat.real_tensors():
        for low in range(0, length, step):
            high = min(low + step, length)
            try:
                value = rows.of(mask, low, high)
            except _TooLargeError as reason:
                _log.info(
                    "An attention mask of %d positions was not analysed: %s is not computed row by row.", length, reason
                )
                return False
            columns = torch.arange(length, device=value.device)
            if not bool((value == (columns <= columns[low:high, None])).all()):
                return False
    return True


class _TooLargeError(Exception):
    """The values to compute at once take too much memory."""


class _Rows:
    """Computes rows of masks from constants.

    A value may be smaller than the one in the graph if broadcasting makes up for it.

    Args:
        length: The number of all rows.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._whole: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node, low: int, high: int) -> Any:
        """Returns rows `low` to `high` of the value of `node`; all of it if it has one row for all, or none.

        Raises:
            _TooLargeError: If it has to be computed whole, and is large.
        """
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor) or example.numel() <= max(_SMALL, self._length):
            return self._rows_of_whole(node, low, high)
        name, source = name_of(node), node.args[0]
        if name in ELEMENTWISE or (name == "to" and all(not isinstance(a, fx.Node) for a in node.args[1:])):
            return computed(node, lambda n: self.of(n, low, high))
        if name in ("expand", "expand_as", "broadcast_to", "unsqueeze", "getitem") and isinstance(source, fx.Node):
            before = source.meta["example_value"]
            ends_alike = before.dim() > 1 and all(
                one in (1, other) for one, other in zip(before.shape[-2:], example.shape[-2:], strict=True)
            )
            adds = name == "unsqueeze" or (name == "getitem" and _adds_dimensions(node.args[1]))
            expands = name not in ("unsqueeze", "getitem")
            if ends_alike and (expands or (adds and all(size == 1 for size in before.shape[:-2]))):
                return self.of(source, low, high)  # broadcasting has the same effect
        if example.numel() > _LARGEST:
            raise _TooLargeError(f"`{name}`")
        return self._rows_of_whole(node, low, high)

    def _rows_of_whole(self, node: fx.Node, low: int, high: int) -> Any:
        value = self._compute_whole(node)
        has_rows = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-2] == self._length
        return value[..., low:high, :] if has_rows else value

    def _compute_whole(self, node: fx.Node) -> Any:
        if node not in self._whole:
            self._whole[node] = computed(node, self._compute_whole)
        return self._whole[node]


def _adds_dimensions(index: Any) -> bool:
    """Returns whether ``x[index]`` is `x` with dimensions of size 1 before its own."""
    parts = list(index) if isinstance(index, tuple) else [index]
    while parts and parts[0] is None:
        parts.pop(0)
    return all(part is ... or part == slice(None) for part in parts)
