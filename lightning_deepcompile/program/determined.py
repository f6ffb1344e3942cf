"""Finds what a parameter alone determines, and which of it fewer bytes can carry than the gathered parameter.

A value is determined by a parameter if it depends on this parameter and constants alone. A rank can compute its rows of
such a value from its rows of the parameter, if the operators between them work element by element, move dimensions, or
take maxima: of rows, which other ranks need not know, or of everything, which ranks exchange. Sums are left out, as
their last bits depend on their order.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lightning_deepcompile import compat
from lightning_deepcompile.program.graph import args_of, is_gather, is_random, nbytes

aten = torch.ops.aten

_CAST = torch.ops.prims.convert_element_type.default
_COPIES = frozenset([_CAST, aten.clone.default, aten.alias.default, aten.detach.default])
_VIEWS = frozenset([aten.view.default, aten.reshape.default, compat.UNSAFE_VIEW])
_MAXIMA = frozenset([aten.max.default, aten.amax.default])
_MINIMA = frozenset([aten.min.default, aten.amin.default])
_CONSTANTS = frozenset([aten.full.default, aten.scalar_tensor.default])
_EXCHANGED = frozenset([torch.float32, torch.bfloat16, torch.float16])  # as float32, without rounding


@dataclass(frozen=True)
class Part:
    """A rank's part of a value.

    Args:
        rows: The dimension that the parameter's rows became; None: all ranks compute the whole value.
        exchanged: Whether it depends on maxima that ranks have exchanged.
    """

    rows: int | None
    exchanged: bool = False


@dataclass
class Determined:
    """The values that are gathered instead of one parameter.

    Args:
        gather: The parameter's gather.
        parts: How ranks compute the nodes that it determines.
        keys: Of the nodes that compute `values`; equal computations of a parameter have equal keys, in any graph.
        values: The nodes that others read: gathered if they have rows, else computed on all ranks.
    """

    gather: fx.Node
    parts: Mapping[fx.Node, Part]
    keys: dict[fx.Node, str] = field(default_factory=dict)
    values: list[fx.Node] = field(default_factory=list)

    @property
    def id(self) -> int:
        """The parameter's id."""
        return int(args_of(self.gather)[1])

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes that compute `values`, in order; the gather is not one of them."""
        return [node for node in self.keys if node is not self.gather]

    @property
    def exchanged(self) -> list[fx.Node]:
        """The maxima and minima over the rows of all ranks among them; in the same order in any graph."""
        return sorted(filter(self.is_exchanged, self.nodes), key=self.keys.__getitem__)

    def is_exchanged(self, node: fx.Node) -> bool:
        """Returns whether `node` is a maximum, or minimum, over the rows of all ranks."""
        return _is_maximum(node) and self.parts[args_of(node)[0]].rows is not None and self.parts[node].rows is None


def is_minimum(node: fx.Node) -> bool:
    """Returns whether `node` is a minimum of its input."""
    return node.target in _MINIMA


def is_reshape(node: fx.Node) -> bool:
    """Returns whether `node` names the sizes of its result."""
    return node.target in _VIEWS


def _is_maximum(node: fx.Node) -> bool:
    return node.target in _MAXIMA or is_minimum(node)


def find_determined(graph: fx.Graph) -> list[Determined]:
    """Finds the matrices for which fewer bytes can be gathered than their own.

    Args:
        graph: A forward, backward or inference graph, with one gather for each parameter.

    Returns:
        For each of them, what is gathered instead; in the order of the graph.
    """
    own: dict[fx.Node, fx.Node] = {}  # the gather that determines a node
    parts: dict[fx.Node, Part] = {}
    constants: set[fx.Node] = set()
    for node in graph.nodes:
        if is_gather(node):
            if _is_matrix(node):
                own[node], parts[node] = node, Part(0)
        elif node.op == "call_function":
            sources = [source for source in node.all_input_nodes if source not in constants]
            if not sources and node.target in _CONSTANTS:
                constants.add(node)
            roots = {own.get(source) for source in sources}
            if len(roots) == 1 and (root := roots.pop()) is not None and (part := _part(node, parts)) is not None:
                own[node], parts[node] = root, part
    members: dict[fx.Node, list[fx.Node]] = {}
    for node, root in own.items():
        members.setdefault(root, []).append(node)
    found = [_narrowed(root, nodes, parts) for root, nodes in members.items()]
    return [one for one in found if one is not None]


def _is_matrix(gather: fx.Node) -> bool:
    """Returns whether it is worth a look: vectors are small, and one row cannot be told from a broadcast."""
    shape = gather.meta["val"].shape
    return len(shape) > 1 and shape[0] > 1


def _narrowed(root: fx.Node, members: list[fx.Node], parts: Mapping[fx.Node, Part]) -> Determined | None:
    inside = set(members)
    cuts: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in members:
        below = frozenset().union(*(cuts[source] for source in node.all_input_nodes if source in inside))
        cuts[node] = frozenset([node]) if node is root or _is_cheaper(node, below, parts) else below
    read = [node for node in members if any(user not in inside for user in node.users)]
    chosen: frozenset[fx.Node] = frozenset().union(*(cuts[node] for node in read))
    if not chosen or root in chosen or _bytes(chosen, parts) >= nbytes(root):
        return None
    result = Determined(root, parts)
    needed, pending = set(), list(chosen)
    while pending:
        node = pending.pop()
        if node not in needed and node is not root:
            needed.add(node)
            pending += [source for source in node.all_input_nodes if source in inside]
    for node in members:
        if node is root or node in needed:
            result.keys[node] = _key(node, result.keys)
    # A value of all ranks that is needed on the way, and read elsewhere, is handed on as it is.
    on_the_way = {n for n in needed if parts[n].rows is None and any(user not in needed for user in n.users)}
    result.values = sorted(chosen | on_the_way, key=result.keys.__getitem__)
    return result if all(_can_be_laid_out(node, parts[node]) for node in result.values) else None


def _is_cheaper(node: fx.Node, below: frozenset[fx.Node], parts: Mapping[fx.Node, Part]) -> bool:
    """Returns whether to take `node` rather than the values below it; of values of all ranks the last is taken."""
    before, after = _bytes(below, parts), _bytes(frozenset([node]), parts)
    return after < before or (parts[node].rows is None and after <= before)


def _bytes(nodes: frozenset[fx.Node], parts: Mapping[fx.Node, Part]) -> int:
    """Bytes that travel; a value of all ranks counts with its elements, so that no dtype of it is preferred."""
    return sum(nbytes(node) if parts[node].rows is not None else node.meta["val"].numel() for node in nodes)


def _can_be_laid_out(node: fx.Node, part: Part) -> bool:
    """Returns whether the value, gathered with its rows first, has the strides that its readers were traced with."""
    value = node.meta["val"]
    if part.rows is None:
        return value.is_contiguous()
    return value.movedim(part.rows, 0).is_contiguous() or value.is_contiguous()


def _key(node: fx.Node, keys: Mapping[fx.Node, str]) -> str:
    if is_gather(node):
        return str(args_of(node)[3])

    def named(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        return keys[value] if value in keys else f"{value.target} {value.args} {value.kwargs}"

    arguments = fx.node.map_aggregate((node.args, node.kwargs), named)
    text = f"{node.target} {arguments!r} {node.meta['val'].dtype} {tuple(node.meta['val'].shape)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _part(node: fx.Node, parts: Mapping[fx.Node, Part]) -> Part | None:
    """Returns how a rank computes its part of `node`; None if it cannot."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    if not isinstance(node.target, compat.OpOverload) or is_random(node):
        return None
    source: Any = next(iter(node.args), None)
    if _is_maximum(node):
        return None if node.kwargs else _part_of_maximum(node, parts[source])
    if node.target in _COPIES or _is_elementwise(node.target):
        return _part_of_elements(node, parts)
    before = parts.get(source)
    if before is None or len(node.all_input_nodes) > 1 or node.kwargs:
        return None
    rows = before.rows
    if rows is None:
        return before if node.target in _VIEWS or node.target in _MOVES else None
    if node.target in _MOVES:
        moved = _MOVES[node.target](list(range(source.meta["val"].dim())), node.args)
        return Part(moved.index(rows), before.exchanged) if rows in moved else None
    if node.target in _VIEWS:
        return _part_of_view(source.meta["val"].shape, value.shape, before)
    return None


@functools.cache
def _is_elementwise(target: compat.OpOverload) -> bool:
    schema = compat.schema_of(target)
    return torch.Tag.pointwise in target.tags and not schema.is_mutable and len(schema.returns) == 1


def _part_of_elements(node: fx.Node, parts: Mapping[fx.Node, Part]) -> Part | None:
    value = node.meta["val"]
    if any(source.meta["val"].device != value.device for source in node.all_input_nodes):
        return None
    from_end: int | None = None
    for source in node.all_input_nodes:
        part = parts.get(source)
        if part is not None and part.rows is not None:
            behind = source.meta["val"].dim() - 1 - part.rows
            if from_end not in (None, behind):
                return None
            from_end = behind
    exchanged = any(parts[s].exchanged for s in node.all_input_nodes if s in parts)
    if from_end is None:
        return Part(None, exchanged)
    for source in node.all_input_nodes:
        shape = source.meta["val"].shape
        has_rows = source in parts and parts[source].rows is not None
        if not has_rows and len(shape) > from_end and shape[len(shape) - 1 - from_end] != 1:
            return None  # it has a value for every row
    return Part(value.dim() - 1 - from_end, exchanged)


def _part_of_maximum(node: fx.Node, before: Part) -> Part | None:
    source, *options = args_of(node)
    count = source.meta["val"].dim()
    dims = [dim % count for dim in options[0]] if options else []
    dims = dims or list(range(count))
    if before.rows is None:
        return before
    if before.rows in dims:
        allowed = not before.exchanged and node.meta["val"].dtype in _EXCHANGED
        return Part(None, True) if allowed else None
    keeps = len(options) > 1 and bool(options[1])
    return Part(before.rows if keeps else before.rows - sum(dim < before.rows for dim in dims), before.exchanged)


def _part_of_view(old: Sequence[int], new: Sequence[int], before: Part) -> Part | None:
    """The rows stay a dimension if what lies in front of them, and their number, stay the same."""
    assert before.rows is not None
    ahead, rows = math.prod(old[: before.rows]), old[before.rows]
    for dim, size in enumerate(new):
        if size == rows and math.prod(new[:dim]) == ahead:
            return Part(dim, before.exchanged)
    return None


def _permuted(dims: list[int], args: Any) -> list[int]:
    return [dims[dim] for dim in args[1]]


def _transposed(dims: list[int], args: Any) -> list[int]:
    first, second = args[1], args[2]
    dims[first], dims[second] = dims[second], dims[first]
    return dims


def _unsqueezed(dims: list[int], args: Any) -> list[int]:
    dims.insert(args[1] % (len(dims) + 1), -1)
    return dims


_MOVES = {
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.t.default: lambda dims, args: dims[::-1],
    aten.unsqueeze.default: _unsqueezed,
}
"""Where a view takes its dimensions from."""
