"""Extracts a region into a graph of its own, with a key that equal regions share.

Nodes are renamed by position, and keys are made of operators, arguments and tensor metadata alone. So the same layer at
another depth, in another process or on another rank has the same key: it is compiled once, and all ranks find their
programs in one plan. For that reason a key does not contain the number of the rank's GPU.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from lightning_deepcompile import compat
from lightning_deepcompile.program.graph import args_of, attribute, is_element, is_view
from lightning_deepcompile.program.regions import Region


@dataclass(eq=False)
class ExtractedRegion:
    """A region ready to be compiled.

    Args:
        parent: The graph module it was cut from.
        region: The region.
        names: The names of its nodes, and of those that it reads, in a graph of its own.
        key: Content key, in which devices are numbered by first mention.
        shape_env: Torch's shape environment whose symbols it is written in; None where all sizes are numbers.
        devices: The devices that `key` numbers: regions with equal keys have the same code only on equal devices.
    """

    parent: fx.GraphModule
    region: Region
    names: Mapping[fx.Node, str]
    key: str
    shape_env: object | None
    devices: tuple[str, ...]

    @property
    def fake_inputs(self) -> list[Any]:
        """Metadata of its inputs: fake tensors and symbolic integers."""
        return [source.meta["val"] for source in self.region.inputs]

    @functools.cached_property
    def gm(self) -> fx.GraphModule:
        """A graph that computes `Region.outputs` from `Region.inputs`; it is built for one of several equal regions."""
        return _graph_of(self.parent, self.region, self.names)


class _Name(str):
    """A reference inside printed arguments, to a node or to a device."""

    def __repr__(self) -> str:
        return str(self)


@dataclass
class _Text:
    """Writes values without names that differ between ranks.

    Args:
        nodes: The nodes' names in the text.
        devices: Devices with an index, in the order in which the text mentions them.
    """

    nodes: dict[fx.Node, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)

    def arguments(self, node: fx.Node) -> str:
        args, kwargs = (fx.node.map_aggregate(part, self._reference) for part in (node.args, node.kwargs))
        return f"{args!r}{kwargs!r}"

    def _reference(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _Name(self.nodes[value])
        return _Name(self.device(value)) if isinstance(value, torch.device) else value

    def device(self, device: torch.device) -> str:
        if device.index is None or device.type == "cpu":
            return device.type
        if str(device) not in self.devices:
            self.devices.append(str(device))
        return f"{device.type}#{self.devices.index(str(device))}"

    def value(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            shape, strides = tuple(map(str, value.shape)), tuple(map(str, value.stride()))
            return f"{value.dtype}{shape}{strides}@{value.storage_offset()} {self.device(value.device)}"
        if isinstance(value, tuple | list):
            return "(" + ", ".join(self.value(item) for item in value) + ")"
        if isinstance(value, torch.Generator):
            return f"generator {self.device(value.device)}"  # its text would be its address
        return str(value)

    def attribute(self, value: nn.Module | torch.Tensor) -> str:
        """Describes the computation of a subgraph, or the value of a constant."""
        if isinstance(value, torch.Tensor):
            with compat.real_tensors():
                data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return f"{self.value(value)} {hashlib.sha256(data).hexdigest()}"
        parts = [self._code(value) if isinstance(value, fx.GraphModule) else repr(value)]
        constants = (*value.named_buffers(), *value.named_parameters())
        parts += [f"{name} = {self.attribute(tensor)}" for name, tensor in constants]
        children = [(name, child) for name, child in value.named_modules() if name and hasattr(child, "code")]
        parts += [f"{name} = {self._code(child)}" for name, child in children]
        return "\n".join(parts)

    def _code(self, module: Any) -> str:
        return _DEVICE.sub(lambda found: self.device(torch.device(found[1], int(found[2]))), module.code)


_DEVICE = re.compile(r"device\(type='(\w+)', index=(\d+)\)")


def extract_region(parent: fx.GraphModule, region: Region) -> ExtractedRegion:
    """Describes `region`, so that it can be compiled apart from `parent`.

    Args:
        parent: The graph module it was cut from.
        region: The region.

    Returns:
        The region; its graph is available as long as `parent` does not change.
    """
    text = _Text()
    lines: list[str] = []
    for index, source in enumerate(region.inputs):
        text.nodes[source] = f"a{index}"
        lines.append(f"a{index}: {text.value(source.meta['val'])}")
    attributes = itertools.count()
    for index, node in enumerate(region.nodes):
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in text.nodes:
                text.nodes[source] = f"c{next(attributes)}"
                lines.append(f"{text.nodes[source]} = {text.attribute(attribute(parent, source))}")
        text.nodes[node] = f"n{index}"
        lines.append(f"n{index} = {node.target}{text.arguments(node)}: {text.value(node.meta.get('val'))}")
        if compat.EXACT_STRIDES in node.meta:
            args, kwargs = node.meta[compat.EXACT_STRIDES]
            lines.append(f"  of {text.value((*args, *kwargs.values()))}")
    lines.append("return " + ", ".join(text.nodes[node] for node in region.outputs))
    key = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    sizes = _symbolic_sizes([*region.inputs, *region.nodes])
    shape_env = sizes[0].node.shape_env if sizes else None
    return ExtractedRegion(parent, region, text.nodes, key, shape_env, tuple(text.devices))


def _graph_of(parent: fx.GraphModule, region: Region, names: Mapping[fx.Node, str]) -> fx.GraphModule:
    """Copies `region` out of `parent`."""
    graph, root = fx.Graph(), nn.Module()
    copies: dict[fx.Node, fx.Node] = {}
    for source in region.inputs:
        copies[source] = graph.placeholder(names[source])
        copies[source].meta["val"] = source.meta["val"]
    for node in region.nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                value = attribute(parent, source)
                add = root.add_module if isinstance(value, nn.Module) else root.register_buffer
                add(names[source], value)
                copies[source] = graph.get_attr(names[source])
                copies[source].meta = dict(source.meta)
        args, kwargs = fx.map_arg(node.args, copies.__getitem__), fx.map_arg(node.kwargs, copies.__getitem__)
        copy = copies[node] = graph.create_node(node.op, node.target, args, kwargs, name=names[node])
        copy.meta = {key: node.meta[key] for key in ("val", "tensor_meta", compat.EXACT_STRIDES) if key in node.meta}
    output = graph.output(tuple(_with_traced_strides(copies[node]) for node in region.outputs))
    # Inductor may otherwise choose other strides for outputs than the next region was traced with.
    output.meta["user_visible_output_idxs"] = list(range(len(region.outputs)))
    return compat.graph_module(root, graph)


def _with_traced_strides(node: fx.Node) -> fx.Node:
    """Returns `node`, or a copy of its result if its strides would differ from those that its readers were traced with.

    On GPUs Inductor's joint passes pad products of odd sizes: a view of one has the strides of the padded product,
    while its metadata is still that of the plain one.
    """
    if not is_view(node) or is_element(node):
        return node
    try:
        strides = _viewed(node).stride()
    except (RuntimeError, ValueError):  # no view of the padded product: Inductor makes a copy somewhere
        strides = ()
    if statically_known_true(sym_eq(strides, node.meta["val"].stride())):
        return node
    copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta["val"] = node.meta["val"]
    return copy


def _viewed(node: fx.Node) -> torch.Tensor:
    """Returns the value of `node` computed from its source: the metadata of a view may be out of date."""
    if not is_view(node) or is_element(node):
        return node.meta["val"]
    assert callable(node.target)
    source, *rest = args_of(node)
    args: Any = fx.map_arg(tuple(rest), lambda n: n.meta["val"])
    kwargs: Any = fx.map_arg(node.kwargs, lambda n: n.meta["val"])
    return node.target(_viewed(source), *args, **kwargs)


def symbol_sources(graph: fx.Graph) -> dict[str, fx.Node]:
    """Makes every symbolic size of `graph` available as a node: an integer placeholder, else a size of a tensor.

    Sizes that the graph reads from other tensors are taken from there, too: they are known before anything is computed.

    Args:
        graph: The graph that regions are cut from; nodes may be added behind its placeholders.

    Returns:
        Symbol name to the node that computes it.
    """
    sources: dict[str, fx.Node] = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
            sources.setdefault(str(value.node.expr), node)
    for node in placeholders:
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and str(size.node.expr) not in sources:
                with graph.inserting_after(placeholders[-1]):
                    source = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                source.meta["val"] = size
                sources[str(size.node.expr)] = source
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.SymInt):
            source = sources.get(str(value.node.expr))
            if source is not None and source is not node:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
    return sources


def add_symbol_inputs(region: Region, sources: dict[str, fx.Node]) -> None:
    """Puts the symbolic sizes that `region` needs in front of its inputs: Inductor binds symbols to integer inputs.

    Args:
        region: The region; its inputs are extended.
        sources: From `symbol_sources`. A symbol without a source (in the state of a random generator) is left out.
    """
    sizes = _symbolic_sizes([*region.inputs, *region.nodes])
    needed = {str(symbol) for size in sizes for symbol in size.node.expr.free_symbols}
    extra = [sources[name] for name in sorted(needed) if name in sources and sources[name] not in region.inputs]
    region.inputs[:0] = extra


def _symbolic_sizes(nodes: list[fx.Node]) -> list[torch.SymInt | torch.SymFloat | torch.SymBool]:
    """All symbolic numbers among the values of `nodes`, and the symbolic ones of their sizes and strides.

    A number that is computed outside of a region is an input of it, and Inductor refers to it by its symbols.
    """
    found = []
    for node in nodes:
        value = node.meta.get("val")
        for leaf in value if isinstance(value, tuple | list) else (value,):
            sizes = (*leaf.shape, *leaf.stride(), leaf.storage_offset()) if isinstance(leaf, torch.Tensor) else (leaf,)
            found += [size for size in sizes if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool)]
    return found
