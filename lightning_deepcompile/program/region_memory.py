"""Predicts how much memory a region takes while it runs, from its operators and sizes, before anything has run.

A compiler does not materialise every value of a graph: it computes element-wise operators where they are read. A value
takes memory if it leaves the region, if a kernel of a library reads or writes it, if a reduction makes it, or if many
operators read it. It lives until its last reader, through element-wise operators that are fused into that reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from lightning_deepcompile import compat
from lightning_deepcompile.program.graph import args_of, is_element, is_view, nbytes, storage_node
from lightning_deepcompile.program.sizes import Sizes

_ELEMENTWISE = frozenset(
    "_log_softmax _softmax _to_copy arange clone constant_pad_nd convert_element_type embedding full full_like "
    "gather index index_select iota scalar_tensor".split()
)
"""Operators without the tag ``pointwise`` that Inductor computes where their results are read."""

_REDUCTIONS = frozenset(
    ["all", "amax", "amin", "any", "argmax", "argmin", "max", "mean", "min", "prod", "sum", "var", "var_mean"]
)

_MANY_READERS = 4
"""Readers from which on Inductor keeps a value (its ``realize_reads_threshold``)."""


class ByteSize(NamedTuple):
    """Bytes of values, of which symbolic sizes may be a part.

    Args:
        bytes: With the hints of symbolic sizes.
        formula: As a SymPy expression of symbolic sizes; None if they are numbers.
    """

    bytes: int = 0
    formula: Any = None

    @classmethod
    def of(cls, size: int, nodes: Iterable[fx.Node]) -> ByteSize:
        """Returns the bytes of the values of `nodes`, which are `size` with the hints."""
        values = [node.meta["val"] for node in nodes]
        if not any(isinstance(value.numel(), torch.SymInt) for value in values):
            return cls(size)
        counts = [(value.numel(), value.element_size()) for value in values]
        return cls(size, sum((n.node.expr if isinstance(n, torch.SymInt) else int(n)) * each for n, each in counts))

    def at(self, sizes: Sizes | None) -> int:
        """Returns the bytes with other values of symbolic sizes; None: their hints."""
        found = None if sizes is None or self.formula is None else sizes.of(self.formula)
        return self.bytes if found is None else found


class RegionMemory(NamedTuple):
    """Memory of values that a region makes; its inputs do not count.

    Args:
        peak: The most bytes at one time, without workspace of libraries: of the values that are there with the hints.
        values: Bytes of values of which one is the largest, with any sizes.
    """

    peak: ByteSize = ByteSize()
    values: tuple[ByteSize, ...] = ()

    def largest(self, sizes: Sizes | None) -> int:
        """Returns the bytes of the largest value; None: with the hints of symbolic sizes."""
        return max((size.at(sizes) for size in self.values), default=0)


def region_memory(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], *, compiled: bool) -> RegionMemory:
    """Returns the memory that a region takes by itself; symbolic sizes count with their hints.

    Args:
        nodes: The region's operators, in order, with ``meta["val"]``.
        outputs: Those whose values leave the region.
        compiled: Whether a compiler computes element-wise operators where they are read; else each runs by itself.
    """
    values = _Values(nodes, outputs, compiled)
    dying: dict[int, list[fx.Node]] = defaultdict(list)
    for node in values.made:
        dying[values.ends[node]].append(node)
    alive = peak = fullest = 0
    born, left = dict[fx.Node, int](), dict[fx.Node, int]()
    for place, node in enumerate(nodes):
        for made in values.made_at[node]:
            born[made], size = place, nbytes(made)
            if compiled and _is_elementwise(made):
                # Its kernel may write to an input that it reads for the last time.
                reused = next((one for one in dying[place] if nbytes(one) == size and one is not made), None)
                if reused is not None:
                    dying[place].remove(reused)
                    left[reused] = place
                    continue
            alive += size
        if alive > peak:
            peak, fullest = alive, place
        alive -= sum(nbytes(one) for one in dying[place])
        left.update(dict.fromkeys(dying[place], place + 1))
    there = [one for one, place in born.items() if place <= fullest < left.get(one, len(nodes))]
    each = {ByteSize.of(nbytes(node), [node]): None for node in values.made}
    fixed = max((size.bytes for size in each if size.formula is None), default=0)
    symbolic = (size for size in each if size.formula is not None)
    return RegionMemory(ByteSize.of(peak, there), (ByteSize(fixed), *symbolic))


def values_in_memory(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], *, compiled: bool) -> list[fx.Node]:
    """Returns the operators whose values take memory; arguments are those of `region_memory`."""
    return _Values(nodes, outputs, compiled).made


@dataclass(eq=False)
class _Values:
    """Determines which values of a region take memory, and until when.

    Args:
        nodes: Operators, in order.
        outputs: Those whose values leave.
        compiled: As for `region_memory`.

    Attributes:
        ends: Place of a value's last reader; the number of nodes for values that leave.
        made: Values that take memory.
        made_at: Those that each node makes.
    """

    nodes: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    compiled: bool
    ends: dict[fx.Node, int] = field(default_factory=dict)
    made: list[fx.Node] = field(default_factory=list)
    made_at: dict[fx.Node, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        position = {node: place for place, node in enumerate(self.nodes)}
        leaving = {storage_node(node) for node in self.outputs}
        fused: set[fx.Node] = set()
        kernels: dict[fx.Node, bool] = {}  # whether a kernel of a library reads it
        readers: dict[fx.Node, int] = {}
        for node in reversed(self.nodes):
            end, kernel, count = position[node], False, 0
            for user in node.users:
                if user not in position:
                    continue
                if is_view(user) or is_element(user):
                    end, kernel, count = max(end, self.ends[user]), kernel or kernels[user], count + readers[user]
                    continue
                end = max(end, self.ends[user] if user in fused else position[user])
                kernel, count = kernel or not _is_generated(user), count + 1
            self.ends[node] = len(self.nodes) if node in leaving else end
            kernels[node], readers[node] = kernel, count
            if self.compiled and _is_elementwise(node) and node not in leaving and not kernel and count < _MANY_READERS:
                fused.add(node)
            elif not is_view(node) and nbytes(node):
                self.made.append(node)
                self.made_at[args_of(node)[0] if is_element(node) else node].append(node)


def _name(node: fx.Node) -> str:
    """The operator's name, without its library and overload."""
    if not isinstance(node.target, compat.OpOverload):
        return ""
    return compat.schema_of(node.target).name.partition("::")[2]


def _is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _name(node) in _ELEMENTWISE


def _is_generated(node: fx.Node) -> bool:
    """Returns whether the compiler writes the kernel: it is element-wise, or a reduction."""
    return _is_elementwise(node) or _name(node) in _REDUCTIONS
