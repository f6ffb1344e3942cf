"""Inlines traced blocks: replaces every call of a block in a partitioned graph by its template's nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_deepcompile import compat
from lightning_deepcompile.capture.templates import Instance, called_body
from lightning_deepcompile.program.graph import (
    args_of,
    attribute,
    is_compute,
    is_gather,
    is_reduce,
    is_scalar,
    output_node,
)


def inline_blocks(gm: fx.GraphModule, instances: Sequence[Instance]) -> None:
    """Replaces the calls of blocks in `gm`, in place.

    The results of a call keep their names, by which AOTAutograd's two graphs find each other's tensors.

    Args:
        gm: A forward, backward or inference graph that was traced with `run_block`.
        instances: The blocks.
    """
    sizes: dict[str, fx.Node] = {}
    with compat.real_tensors():  # the fake mode may be on, under which "meta" is a device like others
        for node in list(gm.graph.nodes):
            called = called_body(node, instances)
            if called is not None:
                _write_out(gm, node, *called, sizes)
            elif isinstance(size := node.meta.get("val"), torch.SymInt):
                sizes.setdefault(str(size), node)
    if instances:
        gm.recompile()


def computed_with(backward: fx.GraphModule, instances: Sequence[Instance]) -> set[str]:
    """The placeholders that will only be computed with, and neither returned nor reduced, once blocks are inlined."""
    names = set()
    inputs = [node for node in backward.graph.nodes if node.op == "placeholder"]
    sizes = {str(node.meta["val"]) for node in inputs if isinstance(node.meta.get("val"), torch.SymInt)}
    for node in backward.graph.nodes:
        if node.op == "placeholder":
            readers = list(_readers(node, instances, sizes))
            if readers and all(is_compute(reader) for reader in readers):
                names.add(node.name)
    return names


def _readers(node: fx.Node, instances: Sequence[Instance], sizes: Collection[str]) -> Iterator[fx.Node]:
    """Yields the nodes that read `node` once blocks are inlined, which compute from `sizes` what they can."""
    for user in node.users:
        called = called_body(user, instances)
        if called is None:
            yield user
            continue
        body, _ = called
        results = _results(body)
        for inner in (inner for inner, source in _inputs(user, body) if source is node):
            for reader in inner.users:
                size = reader.meta.get("val")
                if reader.op != "output" and not (isinstance(size, torch.SymInt) and _is_of(size, sizes)):
                    yield reader
            for element in user.users:
                if results[args_of(element)[1]] is inner:
                    yield from _readers(element, instances, sizes)


def _results(body: fx.GraphModule) -> list[fx.Node]:
    """The nodes that a call of `body` returns."""
    return [node for node in args_of(output_node(body.graph))[0] if node is not None]


def _inputs(call: fx.Node, body: fx.GraphModule) -> Iterator[tuple[fx.Node, Any]]:
    """Yields the placeholders of `body`, and what a call of it passes for each: nodes, or numbers for sizes."""
    tensors, _, sizes = map(_iterated, args_of(call))
    for node in body.graph.nodes:
        if node.op == "placeholder":
            yield node, next(sizes if is_scalar(node) else tensors)


def _iterated(value: Any) -> Iterator[Any]:
    return iter(value) if isinstance(value, list | tuple) else iter(())


def _write_out(
    gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule, ids: dict[int, int], sizes: dict[str, fx.Node]
) -> None:
    """Replaces a call; `sizes` are the symbolic sizes that are computed before it, by their formulas."""
    copies: dict[fx.Node, Any] = dict(_inputs(call, body))
    values = _FreshValues()
    for inner, source in copies.items():
        if isinstance(source, fx.Node):
            values.know(inner.meta["val"], source.meta["val"])
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            size = node.meta.get("val")
            if node.op == "get_attr":
                copies[node] = _copy_attribute(gm, body, node)
            elif isinstance(size, torch.SymInt) and (known := _size_node(gm.graph, size, sizes)) is not None:
                copies.setdefault(node, known)
            elif node.op not in ("placeholder", "output"):
                copy = copies[node] = gm.graph.node_copy(node, copies.__getitem__)
                copy.meta = {**node.meta, "val": values.of(node.meta.get("val"))}
                if is_gather(copy) or is_reduce(copy):
                    copy.update_arg(1, ids[args_of(copy)[1]])
                if isinstance(size, torch.SymInt):
                    sizes[str(size)] = copy
    results = _results(body)
    for element in list(call.users):
        result = copies[results[args_of(element)[1]]]
        element.replace_all_uses_with(result)
        gm.graph.erase_node(element)
        if result.op == "call_function":
            result.name = element.name
    gm.graph.erase_node(call)


def _size_node(graph: fx.Graph, size: torch.SymInt, sizes: dict[str, fx.Node]) -> fx.Node | None:
    """Returns a node that computes a size from others, made where it is missing; None if its symbols are not known."""
    if str(size) not in sizes and _is_of(size, sizes):
        sizes[str(size)] = compat.write_size(graph, size, sizes)
    return sizes.get(str(size))


def _is_of(size: torch.SymInt, sizes: Collection[str]) -> bool:
    return all(str(symbol) in sizes for symbol in compat.symbols_of(size))


def _copy_attribute(gm: fx.GraphModule, body: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Copies a reference to a constant, under a name that all blocks of one kind share."""
    value = attribute(body, node)
    name = f"block_{str(node.target).replace('.', '_')}"
    while getattr(gm, name, value) is not value:
        name += "_"
    setattr(gm, name, value)
    copy = gm.graph.get_attr(name)
    copy.meta = dict(node.meta)
    return copy


class _FreshValues:
    """Fake tensors like a template's; two of them share memory if the template's do.

    Different blocks must not share memory: if two are neighbours in one region, Inductor would take a copy between them
    for one of a tensor to itself, and drop it.
    """

    def __init__(self) -> None:
        # The template's memory, mapped to a tensor in it and one in this block's memory.
        self._bases: dict[StorageWeakRef, tuple[Tensor, Tensor]] = {}

    def know(self, value: Any, copy: Any) -> None:
        """Registers `copy`, the tensor that the block reads where its template reads `value`."""
        if isinstance(value, Tensor) and isinstance(copy, Tensor):
            self._bases.setdefault(StorageWeakRef(value.untyped_storage()), (value, copy))

    def of(self, value: Any) -> Any:
        """Returns the block's value for `value`: a copy of a tensor, or of a tuple of tensors."""
        if isinstance(value, tuple | list):
            return type(value)(self.of(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        known = self._bases.get(StorageWeakRef(value.untyped_storage()))
        if known is not None and known[0].dtype == value.dtype:
            base, copy = known
            offset = copy.storage_offset() + value.storage_offset() - base.storage_offset()
            if offset >= 0 and _fits(value, offset, copy):
                view = torch.empty(0, dtype=copy.dtype, device="meta")
                view.set_(copy.untyped_storage(), offset, value.shape, value.stride())  # a fake copy's view is slow
                return compat.fake_tensor(view, value)
        elements = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self.know(value, elements)
        return compat.fake_tensor(elements, value)


def _fits(value: Tensor, offset: int | torch.SymInt, base: Tensor) -> bool:
    """Returns whether a view of `base` at `offset`, of the shape of `value`, ends inside of its memory."""
    last = offset + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return last < base.untyped_storage().nbytes() // base.element_size()
