"""Assigns tensors to the ranks that step on them unsharded, and divides a step on them into chunks.

Pure arithmetic of shapes, so that all ranks get the same result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_EVEN = 1.25
"""A chunk is balanced if no rank has more than so many times the mean cost."""
_SMALL = 1 << 23  # elements of a chunk; smaller ones gain nothing by being separate


@dataclass(frozen=True)
class Candidate:
    """A tensor that one rank is to step on.

    Args:
        block: Of its parameter; tensors of a block step together.
        shape: The unsharded tensor's.
    """

    block: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def cost_of(shape: Sequence[int]) -> int:
    """Returns the cost of a step on a tensor, in units that can be compared.

    Classes that need unsharded tensors multiply a matrix by its transpose and the like: m²n operations for a matrix of
    m × n elements, m ≤ n. Tensors of more dimensions are matrices of their first dimension by the others, and vectors
    cost one operation an element.
    """
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    return min(rows, columns) ** 2 * max(rows, columns)


def assign_owners(candidates: Sequence[Candidate], ranks: int, loads: Sequence[int] = ()) -> list[int]:
    """Assigns each tensor to a rank, balanced by cost within each block and over all of them.

    Within a block the dearest tensors are assigned first, each to the rank with the least cost of this block, of equal
    ones to that with the least in all.

    Args:
        candidates: Tensors in the model's order.
        ranks: How many ranks there are.
        loads: Cost that each rank has already; none by default.

    Returns:
        The owner of each tensor.
    """
    totals = list(loads) or [0] * ranks
    owners = [0] * len(candidates)
    blocks: dict[str, list[int]] = {}
    for index, candidate in enumerate(candidates):
        blocks.setdefault(candidate.block, []).append(index)
    for members in blocks.values():
        inside = [0] * ranks
        for index in sorted(members, key=lambda i: (-cost_of(candidates[i].shape), i)):
            owner = min(range(ranks), key=lambda rank: (inside[rank], totals[rank], rank))
            cost = cost_of(candidates[index].shape)
            inside[owner] += cost
            totals[owner] += cost
            owners[index] = owner
    return owners


def chunks_of(candidates: Sequence[Candidate], owners: Sequence[int], ranks: int) -> list[list[int]]:
    """Divides tensors into chunks that are exchanged and stepped on one after another.

    A chunk is one block, or as many successive ones as balance the ranks' costs, as long as no rank owns more elements
    than the largest block has: that much is gathered at a time anyway.

    Args:
        candidates: Tensors in the model's order.
        owners: Of each of them.
        ranks: How many ranks there are.

    Returns:
        Indices of each chunk's tensors; none is empty.
    """
    blocks: dict[str, list[int]] = {}
    for index, candidate in enumerate(candidates):
        blocks.setdefault(candidate.block, []).append(index)
    most = max((sum(candidates[i].numel for i in members) for members in blocks.values()), default=0)
    chunks: list[list[int]] = []
    for members in blocks.values():
        if chunks and _grows(candidates, owners, ranks, chunks[-1], members, most):
            chunks[-1] += members
        else:
            chunks.append(list(members))
    return chunks


def _grows(
    candidates: Sequence[Candidate],
    owners: Sequence[int],
    ranks: int,
    chunk: Sequence[int],
    members: Sequence[int],
    most: int,
) -> bool:
    """Returns whether a chunk takes the next block."""
    costs, elements = [0] * ranks, [0] * ranks
    for index in chunk:
        costs[owners[index]] += cost_of(candidates[index].shape)
        elements[owners[index]] += candidates[index].numel
    if sum(elements) >= _SMALL and max(costs) * ranks <= _EVEN * sum(costs):
        return False
    for index in members:
        elements[owners[index]] += candidates[index].numel
    return max(elements) <= max(most, _SMALL)
