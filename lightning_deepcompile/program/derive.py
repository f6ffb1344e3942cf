"""Derives from shards what is gathered in place of a parameter: the narrow values that graphs make of it.

If a graph reads a parameter only through what the parameter alone determines (`determined`), such as its quantised
form, each rank computes its rows of that from its rows of the parameter. The narrow rows are gathered in place of the
parameter's. For the runtime they are one more parameter, whose shard is written anew when the parameter has changed.

Maxima over all rows (the scale of a whole tensor) need one exchange, which all parameters of a program share. So two
functions derive a block's values: the first computes maxima over this rank's rows, the second the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from lightning_deepcompile import compat
from lightning_deepcompile.program.determined import Determined, find_determined, is_minimum, is_reshape
from lightning_deepcompile.program.extract import ExtractedRegion, extract_region
from lightning_deepcompile.program.graph import args_of, output_node
from lightning_deepcompile.program.normalize import merge_gathers
from lightning_deepcompile.program.program import DerivedBlock, DerivedValue, ParamInfo
from lightning_deepcompile.program.regions import Region

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default

_NUMBERS = 1 << 31
"""Numbers of derived values are below it, and above those of parameters."""


def derive(
    gm: fx.GraphModule,
    params: Mapping[int, ParamInfo],
    shards: int,
    compile_region: Callable[[ExtractedRegion], compat.BoxedCallable],
) -> tuple[DerivedBlock, ...]:
    """Rewrites `gm` to gather narrow values in place of the parameters that determine them.

    Looks for: matrices that are read only through element-wise operators, permutations and maxima whose other inputs
    are constants, where fewer bytes than the gathered matrix carry what leaves them.

    Changes: the gather of a parameter becomes gathers of derived values, which have ids of their own. Values without
    rows (scales) become inputs of the graph, behind all others.

    Promises: the same values to the last bit; fewer bytes gathered.

    Args:
        gm: A forward, backward or inference graph from AOTAutograd; rewritten in place.
        params: Parameters by id; without derived values.
        shards: The number of ranks that share a parameter.
        compile_region: Compiles the functions that derive values.

    Returns:
        What derives the values of each block, in the order of parameters; nothing if the graph stays as it is.
    """
    merge_gathers(gm.graph)
    blocks: dict[str, list[tuple[Determined, list[DerivedValue]]]] = {}
    for one in sorted(find_determined(gm.graph), key=lambda one: one.id):  # ranks may use layers in another order
        values = [_described(one, place, params) for place in range(len(one.values))]
        blocks.setdefault(params[one.id].block, []).append((one, values))
    result = []
    for block, members in blocks.items():
        functions = _Functions(gm, members, shards)
        result.append(functions.compiled(block, compile_region))
    for one, values in (member for members in blocks.values() for member in members):
        for node, value in zip(one.values, values, strict=True):
            _replace(gm.graph, one, node, value)
    if result:
        gm.graph.eliminate_dead_code()
    return tuple(result)


def _described(one: Determined, place: int, params: Mapping[int, ParamInfo]) -> DerivedValue:
    node = one.values[place]
    value, rows = node.meta["val"], one.parts[node].rows
    # From the computation, as ranks, and runs, may compile graphs in another order.
    digest = hashlib.sha256(f"{params[one.id].name} {one.keys[node]}".encode()).hexdigest()
    number = len(params) + int(digest[:16], 16) % (_NUMBERS - len(params))
    shape = tuple(value.shape) if rows is None else tuple(value.movedim(rows, 0).shape)
    return DerivedValue(number, one.id, shape, value.dtype, is_gathered=rows is not None)


def _replace(graph: fx.Graph, one: Determined, node: fx.Node, value: DerivedValue) -> None:
    """Lets all that reads `node` read the gathered, or handed in, value."""
    if not value.is_gathered:
        last = [other for other in graph.nodes if other.op == "placeholder"][-1]
        with graph.inserting_after(last):
            new = graph.placeholder(f"derived_{value.number}")
        new.meta["val"] = torch.empty_like(node.meta["val"])
        node.replace_all_uses_with(new)
        output = output_node(graph)
        if output in new.users:  # it is overwritten when the parameter has changed
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (new,))
            copy.meta["val"] = torch.empty_like(node.meta["val"])
            output.replace_input_with(new, copy)
        return
    traced, rows = node.meta["val"], one.parts[node].rows
    assert rows is not None
    shard = args_of(one.gather)[0]
    with graph.inserting_before(node):
        gather = one.gather.target
        assert callable(gather)
        new = graph.call_function(gather, (shard, value.id, value.shape, value.dtype))
        whole = new.meta["val"] = traced.new_empty(value.shape)
        if rows:
            order = [*range(1, rows + 1), 0, *range(rows + 1, len(value.shape))]
            new = graph.call_function(aten.permute.default, (new, order))
            new.meta["val"] = whole.permute(order)
        if new.meta["val"].stride() != traced.stride():
            new = graph.call_function(aten.clone.default, (new,), {"memory_format": torch.contiguous_format})
            new.meta["val"] = torch.empty_like(traced)
    node.replace_all_uses_with(new)


class _Functions:
    """Writes the two functions that derive the values of one block.

    Args:
        parent: The graph module that reads the values.
        members: The values, by parameter.
        shards: The number of ranks that share a parameter.
    """

    def __init__(
        self, parent: fx.GraphModule, members: Sequence[tuple[Determined, list[DerivedValue]]], shards: int
    ) -> None:
        self._parent, self._members = parent, members
        self._masked = [
            place
            for place, (one, _) in enumerate(members)
            if one.exchanged and _shard(one).meta["val"].shape[0] * shards != one.gather.meta["val"].shape[0]
        ]

    def compiled(self, block: str, compile_region: Callable[[ExtractedRegion], compat.BoxedCallable]) -> DerivedBlock:
        """Returns both functions."""
        maxima = _Writer(self._parent, self._members)
        masks = {place: maxima.input(f"mask_{place}", (maxima.rows(place),), torch.bool) for place in self._masked}
        count = maxima.write_maxima(masks)
        rest = _Writer(self._parent, self._members)
        if count:
            rest.read_maxima(rest.input("maxima", (count,), torch.float32))
        rest.write_values()
        return DerivedBlock(
            block,
            tuple(one.id for one, _ in self._members),
            tuple(value for _, values in self._members for value in values),
            count,
            tuple(self._masked),
            compile_region(maxima.region()) if count else None,
            compile_region(rest.region()),
        )


def _shard(one: Determined) -> fx.Node:
    node = args_of(one.gather)[0]
    assert isinstance(node, fx.Node)
    return node


class _Writer:
    """Writes one function of shards: nodes of a graph, on a rank's rows."""

    def __init__(self, parent: fx.GraphModule, members: Sequence[tuple[Determined, list[DerivedValue]]]) -> None:
        self._parent, self._members = parent, members
        self._root, self._graph = nn.Module(), fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._outputs: list[fx.Node] = []
        self._like = _shard(members[0][0]).meta["val"]
        self._shards = [
            self.input(f"shard_{place}", _shard(one).meta["val"].shape, _shard(one).meta["val"].dtype)
            for place, (one, _) in enumerate(members)
        ]

    def rows(self, place: int) -> int:
        """Rows of a parameter's shard."""
        return int(self._shards[place].meta["val"].shape[0])

    def input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """Adds an input."""
        node = self._graph.placeholder(name)
        node.meta["val"] = self._like.new_empty(shape, dtype=dtype)
        return node

    def write_maxima(self, masks: Mapping[int, fx.Node]) -> int:
        """Writes the maxima over this rank's rows, one after the other; returns their number."""
        flat = []
        for place, (one, _) in enumerate(self._members):
            for node in self._with_sources(one, one.exchanged):
                if not one.is_exchanged(node):
                    self._copy(node, one, place)
            flat += [self._maximum(node, one, place, masks.get(place)) for node in one.exchanged]
        if flat:
            self._outputs = flat if len(flat) == 1 else [self._call(aten.cat.default, flat)]
        return sum(node.meta["val"].numel() for node in flat)

    def _with_sources(self, one: Determined, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes that `nodes` are computed of, those included, without what is written already; in order."""
        found: set[fx.Node] = set()
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node in one.parts and node is not one.gather and node not in found and node not in self._copies:
                found.add(node)
                pending += node.all_input_nodes
        return [node for node in one.nodes if node in found]

    def _maximum(self, node: fx.Node, one: Determined, place: int, mask: fx.Node | None) -> fx.Node:
        """Writes a maximum over this rank's rows, without the padding; of a minimum, the maximum of the negative."""
        source = args_of(node)[0]
        value = self._read(source, one, place)
        if mask is not None:
            rows, like = one.parts[source].rows, value.meta["val"]
            assert rows is not None
            shape = [-1 if dim == rows else 1 for dim in range(like.dim())]
            lowest = math.inf if is_minimum(node) else -math.inf
            other = self._call(aten.full.default, [], lowest, dtype=like.dtype, device=like.device)
            value = self._call(aten.where.self, self._call(aten.view.default, mask, shape), value, other)
        made = self._call(node.target, value, *node.args[1:])
        made = self._call(_CAST, made, torch.float32)
        if is_minimum(node):
            made = self._call(aten.neg.default, made)
        return self._call(aten.view.default, made, [-1])

    def read_maxima(self, maxima: fx.Node) -> None:
        """Reads the maxima over the rows of all ranks, in the order in which they were written."""
        begin = 0
        for one, _ in self._members:
            for node in one.exchanged:
                like = node.meta["val"]
                made = self._call(aten.slice.Tensor, maxima, 0, begin, begin + like.numel())
                made = self._call(aten.view.default, made, list(like.shape))
                if is_minimum(node):
                    made = self._call(aten.neg.default, made)
                self._copies[node] = self._call(_CAST, made, like.dtype)
                begin += like.numel()

    def write_values(self) -> None:
        """Writes the derived values to further inputs."""
        targets = []
        for place, (one, _) in enumerate(self._members):
            for node in self._with_sources(one, one.values):
                self._copy(node, one, place)
            for node in one.values:
                value, rows = self._copies[node], one.parts[node].rows
                if rows:
                    order = [rows, *range(rows), *range(rows + 1, value.meta["val"].dim())]
                    value = self._call(aten.permute.default, value, order)
                targets.append(value)
        for place, value in enumerate(targets):
            like = value.meta["val"]
            self._call(aten.copy_.default, self.input(f"made_{place}", like.shape, like.dtype), value)

    def _copy(self, node: fx.Node, one: Determined, place: int) -> None:
        if one.is_exchanged(node):
            raise RuntimeError(f"{node.name} is computed before ranks have exchanged it. This is a bug.")
        args: Any = fx.map_arg(node.args, lambda source: self._read(source, one, place))
        kwargs: Any = fx.map_arg(node.kwargs, lambda source: self._read(source, one, place))
        rows = one.parts[node].rows
        if is_reshape(node) and rows is not None:
            shape = list(node.meta["val"].shape)
            shape[rows] = self.rows(place)
            args = (args[0], shape)
        self._copies[node] = self._call(node.target, *args, **kwargs)

    def _read(self, node: fx.Node, one: Determined, place: int) -> fx.Node:
        if node in self._copies:
            return self._copies[node]
        if node is one.gather:
            shard, dtype = self._shards[place], args_of(node)[3]
            copy = shard if shard.meta["val"].dtype == dtype else self._call(_CAST, shard, dtype)
        else:  # a constant
            copy = self._call(node.target, *node.args, **node.kwargs)
        self._copies[node] = copy
        return copy

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        values: Any = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        if target is aten.copy_.default:
            node.meta["val"] = values[0][0]
        else:
            with self._like.fake_mode:
                node.meta["val"] = target(*values[0], **values[1])
        return node

    def region(self) -> ExtractedRegion:
        """Returns the function's graph."""
        self._graph.output(tuple(self._outputs))
        gm = compat.graph_module(self._root, self._graph)
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        return extract_region(gm, Region(nodes, inputs=inputs, outputs=self._outputs))
