"""Finds the equal blocks of a Dynamo graph, such as the layers of a transformer, and makes each a call.

Tracing 32 equal layers with AOTAutograd, and cutting their joint graph in two, takes 32 times as long as for one layer,
and is most of the time before a first step. Equal blocks are therefore traced once (`capture/templates.py`): here each
becomes one node, and after partitioning each is inlined again (`capture/inlining.py`).

A block is the part of a graph that ran inside one module whose parameters form one block of the layout. Two are equal
if they consist of the same operators with the same arguments, on inputs of the same shapes, except for the parameters
that they gather.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from lightning_deepcompile import compat
from lightning_deepcompile.capture.dynamo_graph import CONSTANTS, calls_gather, gathered_id
from lightning_deepcompile.program.graph import attribute

# Fewer blocks, or smaller ones, are not worth a trace of their own.
_FEWEST, _SMALLEST = 3, 10


@dataclass
class Block:
    """A run of nodes of a Dynamo graph that computes the same as other runs of the same `key`.

    Args:
        nodes: Its nodes, in order.
        key: Equal for equal blocks of one graph.
        inputs: The tensors and symbolic sizes that it reads from outside, in order of first use.
        outputs: Those of its nodes that others read: tensors.
        ids: The parameters that it gathers, in order of first use.
    """

    nodes: list[fx.Node]
    key: object = None
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


def find_repeats(gm: fx.GraphModule, block_of: Callable[[int], str]) -> list[list[Block]]:
    """Finds groups of equal blocks, in order of their first nodes.

    Args:
        gm: Dynamo's graph.
        block_of: Parameter id to the name of the layout's block.

    Returns:
        One list per kind of block that repeats often enough; empty for a graph that changes PyTorch's global state in
        an unknown way.
    """
    modes = _modes(gm.graph)
    if modes is None:
        return []
    kinds: dict[object, list[Block]] = defaultdict(list)
    for nodes in _runs(gm, block_of):
        block = Block(nodes)
        large = sum(_size(gm, node) for node in nodes) >= _SMALLEST
        if large and modes[nodes[0]] == modes[nodes[-1]] == _Modes() and _describe(gm, block):
            kinds[block.key].append(block)
    return [blocks for blocks in kinds.values() if len(blocks) >= _FEWEST]


def call_blocks(
    gm: fx.GraphModule, blocks: Sequence[Block], function: Callable[..., tuple[Tensor, ...]]
) -> fx.GraphModule:
    """Returns a copy of `gm` in which each of `blocks` is one call.

    Args:
        gm: Dynamo's graph; it does not change.
        blocks: Blocks of it.
        function: The replacement: takes a block's place among `blocks`, and its inputs; returns its outputs.
    """
    first = {block.nodes[0]: (number, block) for number, block in enumerate(blocks)}
    inside = {node for block in blocks for node in block.nodes}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in first:
            number, block = first[node]
            call = graph.call_function(function, (number, *(copies[source] for source in block.inputs)))
            call.meta["example_value"] = tuple(output.meta["example_value"] for output in block.outputs)
            for index, output in enumerate(block.outputs):
                copies[output] = graph.call_function(operator.getitem, (call, index))
                copies[output].meta = dict(output.meta)
        elif node not in inside:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    called = compat.graph_module(gm, graph)
    called.meta = dict(gm.meta)
    return called


def body_of(gm: fx.GraphModule, block: Block) -> fx.GraphModule:
    """Returns `block` as a graph of its own, from its inputs to a tuple of its outputs.

    Args:
        gm: The graph that it is a block of.
        block: The block.
    """
    graph, copies = fx.Graph(), {}
    for source in block.inputs:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta["example_value"] = source.meta["example_value"]
    for node in block.nodes:
        for source in node.all_input_nodes:
            if source not in copies:  # a checkpointed layer's graph, referred to from outside
                copies[source] = graph.node_copy(source)
        copies[node] = graph.node_copy(node, copies.get)
    graph.output(tuple(copies[node] for node in block.outputs))
    return compat.graph_module(gm, graph)


@dataclass(frozen=True)
class _Modes:
    """The modes around a node: open autocast contexts, and the gradient mode if it was set."""

    autocast: int = 0
    gradients: bool | None = None


def _modes(graph: fx.Graph) -> dict[fx.Node, _Modes] | None:
    """The modes before every node; None if the graph changes others."""
    modes, autocast, gradients = {}, 0, None
    for node in graph.nodes:
        modes[node] = _Modes(autocast, gradients)
        known = node.meta.get("example_value") is not None or isinstance(node.target, compat.OpOverload)
        if node.op != "call_function" or known or _makes_record(node):
            continue
        if node.target is compat.ENTER_AUTOCAST:
            autocast += 1
        elif node.target is compat.EXIT_AUTOCAST:
            autocast -= 1
        elif node.target is compat.SET_GRADIENTS:
            gradients = None if node.args == (True,) else False
        elif node.target is not compat.LOG_USE:
            return None
    return modes


def _makes_record(node: fx.Node) -> bool:
    """Returns whether `node` only puts values together, as an argument of functions that Dynamo does not look into."""
    kind = node.target
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))


def _runs(gm: fx.GraphModule, block_of: Callable[[int], str]) -> Iterator[list[fx.Node]]:
    """Yields runs of nodes, each all that one block's module executed, uninterrupted by other blocks."""
    order = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    blocks_under: dict[str, set[str]] = defaultdict(set)
    for node in order:
        gathered = {block_of(id_) for id_ in _gathered(gm, node)}
        for path in _paths(node):
            blocks_under[path] |= gathered
    label: dict[fx.Node, str] = {}
    spans: dict[str, tuple[int, int]] = {}
    for position, node in enumerate(order):
        names = _names(gm, node, blocks_under, block_of)
        if len(names) != 1:
            continue
        (label[node],) = names
        low, _ = spans.get(label[node], (position, position))
        spans[label[node]] = low, position + 1
    for name, (low, high) in spans.items():
        while high < len(order) and order[high] not in label and _takes_apart(order[high], order[low:high]):
            high += 1
        run = order[low:high]
        if all(label.get(node, name) == name for node in run):
            yield run


def _takes_apart(node: fx.Node, run: list[fx.Node]) -> bool:
    """Returns whether `node` takes an element of a tuple that `run` makes."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source in run and not isinstance(source.meta.get("example_value"), Tensor)


def _names(
    gm: fx.GraphModule, node: fx.Node, blocks_under: dict[str, set[str]], block_of: Callable[[int], str]
) -> set[str]:
    """The block that `node` works for: of the outermost module around it that gathers one block's parameters alone."""
    for path in _paths(node):
        if len(blocks_under[path]) == 1:
            return blocks_under[path]
    return {block_of(id_) for id_ in _gathered(gm, node)}


def _paths(node: fx.Node) -> Iterable[str]:
    """Paths of the modules that `node` was called in, from the outermost on."""
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _gathered(gm: fx.GraphModule, node: fx.Node) -> Iterator[int]:
    """The parameters that `node`, or a subgraph that it refers to, gathers."""
    if calls_gather(node) and (id_ := gathered_id(node)) is not None:
        yield id_
    for source in (node, *node.all_input_nodes):
        body = _body(gm, source)
        if body is not None:
            for inner in body.graph.nodes:
                yield from _gathered(body, inner)


def _size(gm: fx.GraphModule, node: fx.Node) -> int:
    """The number of nodes that `node` stands for."""
    body = _body(gm, node)
    return 1 if body is None else sum(_size(body, inner) for inner in body.graph.nodes)


def _body(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The subgraph (of a checkpointed layer) that `node` is a reference to."""
    if node.op != "get_attr":
        return None
    value = attribute(gm, node)
    return value if isinstance(value, fx.GraphModule) else None


class _Unequal(Exception):
    """A block contains something that cannot be compared, or passed to a function of its own."""


def _describe(gm: fx.GraphModule, block: Block) -> bool:
    """Sets all fields of a block but its nodes; returns False if it cannot be a block."""
    inside = set(block.nodes)
    names: dict[fx.Node, Any] = {}
    ids: dict[int, int] = {}
    lines: list[object] = []
    try:
        for position, node in enumerate(block.nodes):
            for source in node.all_input_nodes:
                if source not in inside and source not in names and _body(gm, source) is None:
                    names[source] = ("in", len(block.inputs))
                    block.inputs.append(source)
            lines.append(_line(gm, node, names, ids))
            names[node] = ("node", position)
        outputs = [n for n in block.nodes if any(user not in inside for user in n.users) and _body(gm, n) is None]
        block.outputs = outputs
        values = [*map(_input_value, block.inputs), *map(_value, outputs)]
    except _Unequal:
        return False
    block.ids = list(ids)
    block.key = (tuple(lines), tuple(values), tuple(names[node] for node in outputs))
    return True


def _line(gm: fx.GraphModule, node: fx.Node, names: dict[fx.Node, Any], ids: dict[int, int]) -> object:
    """Describes the computation of `node`, with the block's own numbers for nodes and parameters."""
    if (body := _body(gm, node)) is not None:
        inner: dict[fx.Node, Any] = {}
        lines = []
        for position, other in enumerate(body.graph.nodes):
            lines.append(_line(body, other, inner, ids))
            inner[other] = ("inner", position)
        return tuple(lines)
    if node.op not in ("call_function", "call_method", "output", "placeholder"):
        raise _Unequal
    args = node.args
    if calls_gather(node):
        if (id_ := gathered_id(node)) is None:
            raise _Unequal
        args = (args[0], ("id", ids.setdefault(id_, len(ids))), *args[2:])
    target = None if node.op in ("output", "placeholder") else compat.called_by(node)
    return node.op, target, _plain(gm, args, names, ids), _plain(gm, node.kwargs, names, ids)


def _plain(gm: fx.GraphModule, value: Any, names: dict[fx.Node, Any], ids: dict[int, int]) -> object:
    """Returns `value` in a form that can be compared and hashed."""
    if isinstance(value, fx.Node):
        if value in names:
            return names[value]
        if _body(gm, value) is None:
            raise _Unequal
        return _line(gm, value, names, ids)
    if isinstance(value, tuple | list):
        return (type(value).__name__, *(_plain(gm, item, names, ids) for item in value))
    if isinstance(value, dict):
        return ("dict", *((key, _plain(gm, item, names, ids)) for key, item in value.items()))
    if isinstance(value, slice):
        return ("slice", *(_plain(gm, item, names, ids) for item in (value.start, value.stop, value.step)))
    if isinstance(value, enum.Enum):
        return type(value), value.name
    if type(value) in CONSTANTS:  # compared by type and text: 1 == 1.0 == True, and 0.0 == -0.0
        return type(value).__name__, repr(value)
    raise _Unequal


def _input_value(node: fx.Node) -> object:
    """The metadata of what enters a block: a tensor, or a symbolic size."""
    value = node.meta.get("example_value")
    return ("size", _size_text(value)) if isinstance(value, torch.SymInt) else _value(node)


def _value(node: fx.Node) -> object:
    """The metadata of a tensor that enters or leaves a block."""
    value = node.meta.get("example_value")
    if type(value) is not compat.FakeTensor or value.layout is not torch.strided:
        raise _Unequal
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return tuple(map(_size_text, sizes)), len(value.shape), value.dtype, value.device, value.requires_grad


def _size_text(size: int | torch.SymInt) -> int | str:
    """A size in a form that can be compared without a guard."""
    if type(size) is int:
        return size
    if compat.hint_of(size) is None:  # it depends on data
        raise _Unequal
    return str(size)
