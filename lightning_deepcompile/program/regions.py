"""Cuts a normalized graph into regions: the pieces of compute between which parameters are gathered and released.

A region belongs to one block of parameters (a transformer layer). A new one starts where the graph turns to the gathers
or the gradients of another block, or to the next piece of rows. Of all positions between the two uses, the cut takes
the one across which the fewest bytes are alive, so that regions exchange little (usually only the hidden states).
Cheap values are recomputed in every region that reads them, if that keeps fewer bytes alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import fx

from lightning_deepcompile import compat
from lightning_deepcompile.program.graph import (
    args_of,
    is_compute,
    is_element,
    is_gather,
    is_lookup,
    is_piece,
    is_reduce,
    is_scalar,
    is_view,
    looked_up_name,
    nbytes,
    source_gather,
)

# A value that two regions, or two layers, share may be one layer's own: if such values were hoisted, those of all
# layers would be alive at once.
_MAX_SHARED_BY_TWO = 1 << 20
_MAX_SHARED_BY_MANY = 128 << 20
_CAST = torch.ops.prims.convert_element_type.default
_ATEN = torch.ops.aten
# Element-wise operators, which are fused into their readers.
_CHEAP = frozenset(
    [_CAST, _ATEN.mul.Tensor, _ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.neg.default]
    + [_ATEN.view.default, _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.expand.default]
)
_MOST_STEPS = 6


@dataclass
class Region:
    """A run of compute nodes.

    Args:
        nodes: Its nodes, in order.
        blocks: Names of the blocks whose parameters it reads or whose gradients it produces, in order of use.
        inputs: Nodes outside of it that it reads, gathers included, in order of first use.
        outputs: Its nodes that others read.
    """

    nodes: list[fx.Node]
    blocks: list[str] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


def cut_regions(graph: fx.Graph, block_of: Callable[[int | str], str]) -> list[Region]:
    """Cuts `graph` into regions.

    Args:
        graph: Normalized graph. Some of its nodes are moved, or copied, to where they are read.
        block_of: Parameter id, or name, to block name.

    Returns:
        The regions in execution order. Gathers, reductions, placeholders and the arithmetic of sizes belong to none.
    """
    order = [n for n in graph.nodes if is_compute(n)]
    if not order:
        return []
    labels = _labels(order, block_of)
    bounds = [0, *_cuts(order, labels), len(order)]
    pieces = [order[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]
    label_of = dict(zip(order, labels, strict=True))
    _compute_where_read(pieces, label_of)
    shared = _shared_by_regions(pieces, label_of)
    if shared:
        moved = set(shared)
        pieces = [shared, *([n for n in piece if n not in moved] for piece in pieces)]
    return [_describe(piece, label_of) for piece in pieces if piece]


def _labels(order: list[fx.Node], block_of: Callable[[int | str], str]) -> list[str | None]:
    """The block that each node works for, where it reads a parameter or produces a gradient; else None."""
    gathered = {block_of(args_of(n)[1]) for node in order for n in node.all_input_nodes if is_gather(n)}
    labels: list[str | None] = []
    for node in order:
        label = None
        if is_lookup(node):
            label = block_of(looked_up_name(node))
        elif not is_view(node):
            for source in node.all_input_nodes:
                gather = source_gather(source)
                if gather is not None:
                    label = block_of(args_of(gather)[1])
        if label is None:
            for user in node.users:
                # A gradient of a block that is gathered anyway says nothing: weight gradients may come late.
                if is_reduce(user) and (block := block_of(args_of(user)[1])) not in gathered:
                    label = block
        labels.append(label)
    return labels


def _cuts(order: list[fx.Node], labels: list[str | None]) -> list[int]:
    """Positions of the cuts: between two labels, or two pieces of rows, where the fewest bytes are alive."""
    alive = _live_bytes(order)
    cuts: list[int] = []
    previous: dict[str, object] = {}
    at = 0
    for position, (node, label) in enumerate(zip(order, labels, strict=True)):
        # Rows of a layer's input and of targets are one piece if their bounds are the same.
        taken = [] if is_piece(node) else [args_of(n)[1:3] for n in node.all_input_nodes if is_piece(n)]
        piece = taken[0] if taken else None
        uses = {key: value for key, value in (("block", label), ("piece", piece)) if value is not None}
        if not uses:
            continue
        if any(previous.get(key, value) != value for key, value in uses.items()):
            allowed = [c for c in range(at + 1, position + 1) if not is_element(order[c])]
            if allowed:
                cuts.append(min(allowed, key=lambda c: (alive[c], c)))
        previous, at = previous | uses, position
    return cuts


def _live_bytes(order: list[fx.Node]) -> list[int]:
    """``live[c]``: bytes produced before position c and read at or after it (graph outputs are alive to the end)."""
    position = {node: i for i, node in enumerate(order)}
    change = [0] * (len(order) + 2)
    for i, node in enumerate(order):
        last = max((position.get(user, -1) for user in node.users), default=-1)
        if last > i:
            size = nbytes(node)
            change[i + 1] += size
            change[last + 1] -= size
    live, total = [], 0
    for delta in change[: len(order) + 1]:
        total += delta
        live.append(total)
    return live


def _compute_where_read(pieces: list[list[fx.Node]], label_of: dict[fx.Node, str | None]) -> None:
    """Makes a piece recompute cheap values of earlier pieces, in place, if that keeps fewer bytes alive.

    Such values are casts to a wider dtype, and element-wise results of values that the piece reads anyway, as the
    hidden states over their norm.
    """
    number_of = {node: number for number, piece in enumerate(pieces) for node in piece}
    changed: list[fx.Node] = []
    for number, piece in enumerate(pieces):
        read = dict.fromkeys(s for n in piece for s in n.all_input_nodes if number_of.get(s) != number)
        needed: set[fx.Node] = set()  # inputs of the recomputed values
        copies: dict[fx.Node, fx.Node] = {}
        # Casts first: what is computed of them can then be computed of their narrow sources.
        for value in sorted((n for n in read if n in number_of), key=lambda n: not _widens(n)):
            steps = _cheap_steps(value, read.keys() - {value} - copies.keys())
            sources = {s for step in steps for s in step.all_input_nodes} - set(steps)
            added = sum(nbytes(s) for s in sources if s not in read)
            if not steps or value in needed or added >= nbytes(value):
                continue
            for step in steps:
                if step not in copies:
                    with step.graph.inserting_before(piece[0]):
                        copy = step.graph.node_copy(step)
                    for source in step.all_input_nodes:
                        copy.replace_input_with(source, copies.get(source, source))
                    copies[step] = copy
                    copy.meta["val"] = torch.empty_like(step.meta["val"])
                    label_of[copy] = label_of[step]
            for user in [u for u in value.users if number_of.get(u) == number]:
                user.replace_input_with(value, copies[value])
            needed |= sources
            read.update(dict.fromkeys(sources))
            changed.append(value)
        number_of.update(dict.fromkeys(copies.values(), number))
        piece[:0] = copies.values()
    while changed:
        node = changed.pop()
        if not node.users and node in number_of:
            changed += node.all_input_nodes
            pieces[number_of.pop(node)].remove(node)
            node.graph.erase_node(node)


def _cheap_steps(value: fx.Node, there: Set[fx.Node]) -> list[fx.Node]:
    """The cheap nodes that compute `value` from values in `there`, or from a narrower one; empty if there are none."""
    steps: dict[fx.Node, None] = {}
    pending = [value]
    while pending:
        node = pending.pop()
        if node in steps:
            continue
        sources = node.all_input_nodes
        if node.target not in _CHEAP or len(steps) == _MOST_STEPS or not all(map(_is_tensor, sources)):
            narrow = _widens(value) and all(map(_is_tensor, value.all_input_nodes))
            return [value] if narrow else []
        steps[node] = None
        pending += [n for n in sources if n not in there]
    return sorted(steps)


def _is_tensor(node: fx.Node) -> bool:
    """Returns whether `node` is a tensor that always exists: a parameter is there at times only."""
    return isinstance(node.meta.get("val"), torch.Tensor) and node.op != "get_attr" and source_gather(node) is None


def _widens(node: fx.Node) -> bool:
    """Returns whether `node` casts to a wider dtype."""
    if node.target is not _CAST:
        return False
    before, after = args_of(node)[0].meta["val"].dtype, node.meta["val"].dtype
    return bool(before.is_floating_point and after.is_floating_point and after.itemsize > before.itemsize)


def _shared_by_regions(pieces: list[list[fx.Node]], label_of: Mapping[fx.Node, str | None]) -> list[fx.Node]:
    """Nodes to compute once, before all regions: independent of parameters, small, and read by several regions.

    Their results must be small, and so must be the values that they are computed of: a factor per row may need whole
    rows.

    Rotary tables and masks are built in the region of the first layer; when they are moved out, the first layer is like
    all others and is compiled once with them. Seed look-ups carry the layer's number as a constant and are moved, too.
    """
    region_of = {node: k for k, piece in enumerate(pieces) for node in piece}
    blocks_of = [{label_of[node] for node in piece} - {None} for piece in pieces]
    independent: set[fx.Node] = set()
    for node in region_of:
        if not is_lookup(node) and all(_is_free(source, independent) for source in node.all_input_nodes):
            independent.add(node)
    wanted: set[fx.Node] = set()
    for node in filter(independent.__contains__, region_of):
        if node in wanted:
            continue
        readers = {region_of[user] for user in node.users if user in region_of} - {region_of[node]}
        is_seed = compat.is_seed(node)
        if not readers and not is_seed:
            continue
        others = set().union(*(blocks_of[k] for k in readers)) - blocks_of[region_of[node]]
        limit = _MAX_SHARED_BY_TWO if len(readers) == 1 or len(others) < 2 else _MAX_SHARED_BY_MANY
        moved = _with_sources(node, independent) - wanted
        kept = [one for one in moved if any(user not in moved | wanted for user in one.users)]
        if is_seed or sum(map(nbytes, kept)) <= limit:
            wanted |= moved
    return [node for piece in pieces for node in piece if node in wanted]


def _with_sources(node: fx.Node, among: set[fx.Node]) -> set[fx.Node]:
    """`node`, and those of `among` that it is computed of; a tuple and its elements stay together."""
    found, pending = {node}, [node]
    while pending:
        current = pending.pop()
        elements = [user for user in current.users if is_element(user)]
        for other in (*current.all_input_nodes, *elements):
            if other in among and other not in found:
                found.add(other)
                pending.append(other)
    return found


def _is_free(source: fx.Node, independent: set[fx.Node]) -> bool:
    """Returns whether `source` exists before the first region: no parameter, no gradient, nor computed from one."""
    if source.op == "placeholder":
        return not compat.is_tangent(source)
    return source.op == "get_attr" or source in independent or (is_scalar(source) and not is_compute(source))


def _describe(nodes: list[fx.Node], label_of: Mapping[fx.Node, str | None]) -> Region:
    region = Region(nodes)
    inside = set(nodes)
    seen: set[fx.Node] = set()
    for node in nodes:
        label = label_of[node]
        if label is not None and label not in region.blocks:
            region.blocks.append(label)
        for source in node.all_input_nodes:
            if source not in inside and source not in seen and source.op != "get_attr":
                seen.add(source)
                region.inputs.append(source)
    region.outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    return region
