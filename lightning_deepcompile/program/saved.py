"""Saved tensors: what a forward program computes and its backward program reads, and which of them may leave meanwhile.

They are numbered by their place among the forward graph's outputs. ``meta["saved"]`` of a node is that number: on the
value in a forward program, and on the placeholder in the backward program that belongs to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from lightning_deepcompile.program.copies import RELOAD
from lightning_deepcompile.program.graph import is_compute, is_view, nbytes, output_node

__all__ = ["Saved", "mark_saved", "read_saved"]


@dataclass(frozen=True)
class Saved:
    """A saved tensor, as one of the two programs sees it.

    Args:
        number: Its number, the same in both.
        size: Bytes.
        first: The region that makes it (forward), or the first that reads it (backward).
        last: The last region that reads it, or else makes it.
    """

    number: int
    size: int
    first: str
    last: str


def mark_saved(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Numbers the saved tensors that may wait in host memory, in both graphs.

    Left out is what would not free its memory by leaving (inputs, views of them, what the caller gets or what shares
    memory with another output), what is no dense tensor, scalars (those of attention's random state are on the host
    already), and what backward hands on without computing with it.

    Args:
        forward: The partitioned forward graph.
        backward: Its backward graph.
        num_outputs: How many of the forward graph's outputs are not saved tensors.
    """
    outputs = output_node(forward.graph).args[0]
    bases = Counter(_base(value) for value in outputs if isinstance(value, fx.Node))
    readers = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    for number, value in enumerate(outputs[num_outputs:], num_outputs):
        if not isinstance(value, fx.Node) or value.name not in readers or not is_compute(value):
            continue
        base, reader, tensor = _base(value), readers[value.name], value.meta.get("val")
        if base.op == "placeholder" or bases[base] > 1 or not _is_dense(tensor) or tensor.dim() == 0:
            continue
        if reader.users and all(is_compute(user) for user in reader.users):
            value.meta["saved"] = reader.meta["saved"] = number


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is (a part of)."""
    while is_view(node):
        node = node.args[0]
    return node


def _is_dense(value: object) -> bool:
    """Whether a (fake) tensor has every element of its memory once: then it keeps its strides wherever it is copied.

    Symbolic sizes count with their hints, as comparing them would specialize the program.
    """
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type == "meta":
        return False
    sizes, strides = ([_hint(n) for n in numbers] for numbers in (value.shape, value.stride()))
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return expected > 0


def _hint(number: int | torch.SymInt) -> int:
    if isinstance(number, int):
        return number
    return number.node.hint if number.node.hint is not None else 0


def read_saved(graph: fx.Graph) -> tuple[Saved, ...]:
    """The numbered tensors of a program, by number.

    Args:
        graph: The program's graph.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        if "saved" not in node.meta:
            continue
        made = [node.args[0]] if node.op != "placeholder" else []
        ends = [*made, *sorted(_regions_that_read(node), key=position.__getitem__)]
        found.append(Saved(node.meta["saved"], nbytes(node), str(ends[0].target), str(ends[-1].target)))
    return tuple(sorted(found, key=lambda saved: saved.number))


def _regions_that_read(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.op == "call_module":
            yield user
        elif str(user.target) == RELOAD:
            for element in user.users:
                if user.args[1][element.args[1]] is node:
                    yield from _regions_that_read(element)
