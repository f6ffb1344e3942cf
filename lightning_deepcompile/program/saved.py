"""Saved tensors: those that a forward program makes and its backward program reads, and which of them may be offloaded.

They are numbered by their place among the forward graph's outputs. ``meta["saved"]`` of a node is that number: on the
value in a forward program, and on the placeholder in the backward program that belongs to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import fx

from lightning_deepcompile.program.graph import args_of, is_compute, output_node, storage_node


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


def number_saved(forward: fx.GraphModule, num_outputs: int, computed: Collection[str]) -> dict[str, int]:
    """Numbers the saved tensors that may wait in host memory.

    Not numbered are tensors whose memory would not be freed (inputs, views of them, results for the caller, those that
    share memory with another output), tensors that are not dense, scalars (those of attention's random state are on the
    host already), and tensors that backward hands on without computing with them.

    Args:
        forward: The partitioned forward graph.
        num_outputs: How many of its outputs are not saved tensors.
        computed: Names of those that backward computes with, and does nothing else with.

    Returns:
        The numbers by name; `mark_saved` marks the backward graph with them.
    """
    (outputs,) = args_of(output_node(forward.graph))
    bases = Counter(storage_node(value) for value in outputs if isinstance(value, fx.Node))
    numbers = {}
    for number, value in enumerate(outputs[num_outputs:], num_outputs):
        if not isinstance(value, fx.Node) or value.name not in computed or not is_compute(value):
            continue
        base, tensor = storage_node(value), value.meta.get("val")
        if base.op == "placeholder" or bases[base] > 1 or not _is_dense(tensor) or tensor.dim() == 0:
            continue
        value.meta["saved"] = numbers[value.name] = number
    return numbers


def mark_saved(backward: fx.GraphModule, numbers: Mapping[str, int]) -> None:
    """Marks the backward graph with the numbers that `number_saved` gave."""
    for node in backward.graph.nodes:
        if node.op == "placeholder" and node.name in numbers:
            node.meta["saved"] = numbers[node.name]


def _is_dense(value: object) -> TypeGuard[torch.Tensor]:
    """Returns whether a (fake) tensor has every element of its memory once: a copy then keeps its strides.

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
