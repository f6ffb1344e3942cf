"""Predicts how much memory a region takes while it runs, from its operators and sizes, before anything has run.

A compiler does not materialise every value of a graph: it computes element-wise operators where they are read. A value
takes memory if it leaves the region, if a kernel of a library reads or writes it, if a reduction makes it, or if it is
computed of much and several operators read it. It lives until its last reader, through element-wise operators that are
fused into that reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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

_MOST_READS, _MOST_OPERATORS = 4, 30
"""Inductor keeps a value with several readers if it is computed of more values or by more operators than these."""

_INTO = frozenset(
    "_unsafe_index_put _unsafe_masked_index_put_accumulate index_put scatter scatter_add scatter_reduce".split()
)
"""Operators that write into a copy of their first argument, or into itself if nothing else reads it."""


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
            born[made] = place
            if (reused := values.reused(made, dying[place])) is not None:
                dying[place].remove(reused)
                left[reused] = place
                continue
            alive += nbytes(made)
        if (most := alive + _workspace(node)) > peak:
            peak, fullest = most, place
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

    Element-wise operators that read the same values become one kernel, as soon as all that they read is there: its
    results are made together, and none of them can take the place of what several of them read.

    Args:
        nodes: Operators, in order.
        outputs: Those whose values leave.
        compiled: As for `region_memory`.

    Attributes:
        ends: Place of a value's last reader; the number of nodes for values that leave.
        made: Values that take memory.
        made_at: Those that the kernel of each node makes.
        reads: The values in memory that the value of an element-wise operator is computed of.
        kernels: The operators whose values one kernel makes, by each of them.
    """

    nodes: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    compiled: bool
    ends: dict[fx.Node, int] = field(default_factory=dict)
    made: list[fx.Node] = field(default_factory=list)
    made_at: dict[fx.Node, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    reads: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    kernels: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        place = {node: index for index, node in enumerate(self.nodes)}
        leaving = {storage_node(node) for node in self.outputs}
        fused = self._fused(leaving, place) if self.compiled else set()
        self.made = [node for node in self.nodes if node not in fused and not is_view(node) and nbytes(node)]
        if self.compiled:
            self._join(place)
        for node in reversed(self.nodes):
            end = -1 if node in fused or is_view(node) or is_element(node) else place[node]
            for user in node.users:
                if user in place:
                    through = user in fused or is_view(user) or is_element(user)
                    end = max(end, self.ends[user] if through else place[user])
            self.ends[node] = len(self.nodes) if node in leaving else end
        for node in self.made:
            maker = args_of(node)[0] if is_element(node) else node
            self.made_at[self.nodes[place[maker]]].append(node)

    def reused(self, made: fx.Node, dying: Sequence[fx.Node]) -> fx.Node | None:
        """Returns the value of `dying` in whose memory an operator's kernel can write its result; None if in none."""
        if not self.compiled:
            return None
        others = [one for one in self.kernels.get(made, ()) if one is not made]
        same = (one for one in dying if one is not made and nbytes(one) == nbytes(made))
        if _is_elementwise(made):
            return next((one for one in same if all(one not in self.reads[other] for other in others)), None)
        into = storage_node(args_of(made)[0]) if _name(made) in _INTO else None
        return next((one for one in same if one is into), None)

    def _fused(self, leaving: set[fx.Node], place: Mapping[fx.Node, int]) -> set[fx.Node]:
        """Returns the operators that are computed where they are read, and finds out what the others read."""
        kept: set[fx.Node] = set()  # read by a kernel of a library
        readers: dict[fx.Node, int] = {}
        for node in reversed(self.nodes):
            readers[node] = 0
            for user in node.users:
                if user not in place:
                    continue
                through = is_view(user) or is_element(user)
                readers[node] += readers[user] if through else 1
                if user in kept if through else not _is_generated(user):
                    kept.add(node)
        fused: set[fx.Node] = set()
        operators: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            inputs = {storage_node(one) for one in node.all_input_nodes}
            self.reads[node] = reads = set().union(*(self.reads[one] if one in fused else {one} for one in inputs))
            operators[node] = {node}.union(*(operators[one] for one in inputs & fused))
            large = len(reads) > _MOST_READS or len(operators[node]) > _MOST_OPERATORS
            if _is_elementwise(node) and node not in leaving | kept and not (readers[node] > 1 and large):
                fused.add(node)
        return fused

    def _join(self, place: dict[fx.Node, int]) -> None:
        """Moves element-wise operators into the kernels of earlier ones that read the same values.

        Args:
            place: Of each operator; changes.
        """
        readers: dict[fx.Node, list[list[fx.Node]]] = defaultdict(list)
        for node in filter(_is_elementwise, self.made):
            shared = [one for one in self.reads[node] if _elements(one) == _elements(node)]
            there = max((place.get(one, -1) for one in self.reads[node]), default=-1)
            fitting = [kernel for one in shared for kernel in readers[one] if place[kernel[0]] >= there]
            kernel = min(fitting, key=lambda one: place[one[0]], default=[])
            if not kernel:
                for one in shared:
                    readers[one].append(kernel)
            kernel.append(node)
            place[node] = place[kernel[0]]
            self.kernels[node] = kernel


def _name(node: fx.Node) -> str:
    """The operator's name, without its library and overload."""
    if not isinstance(node.target, compat.OpOverload):
        return ""
    return compat.schema_of(node.target).name.partition("::")[2]


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return nbytes(node) // value.element_size() if isinstance(value, torch.Tensor) else 0


def _workspace(node: fx.Node) -> int:
    """Returns the bytes that a library's kernel takes: attention adds up the gradient of its queries in fp32."""
    name = _name(node)
    if not (name.startswith("_scaled_dot_product_") and name.endswith("backward")):
        return 0
    query = args_of(node)[1]
    return 4 * _elements(query) if query.meta["val"].element_size() < 4 else 0


def _is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _name(node) in _ELEMENTWISE


def _is_generated(node: fx.Node) -> bool:
    """Returns whether the compiler writes the kernel: it is element-wise, or a reduction."""
    return _is_elementwise(node) or _name(node) in _REDUCTIONS
