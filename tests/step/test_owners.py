"""Owners share the cost of a step evenly, block by block, whatever the shapes."""

from __future__ import annotations

import random

import pytest

from lightning_deepcompile.step.owners import Candidate, assign_owners, chunks_of, cost_of

LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]


def _llama(layers: int) -> list[Candidate]:
    return [Candidate(f"layers.{layer}", shape) for layer in range(layers) for shape in LLAMA]


def _loads(candidates: list[Candidate], owners: list[int], ranks: int) -> list[int]:
    loads = [0] * ranks
    for candidate, owner in zip(candidates, owners, strict=True):
        loads[owner] += cost_of(candidate.shape)
    return loads


def test_costs_are_those_of_a_product_with_the_transpose() -> None:
    assert cost_of((3, 5)) == cost_of((5, 3)) == 45
    assert cost_of((4, 2, 3)) == 4 * 4 * 6
    assert cost_of((7,)) == 7


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16])
def test_a_llama_is_balanced_over_the_model_and_in_each_chunk(ranks: int) -> None:
    candidates = _llama(32)
    owners = assign_owners(candidates, ranks)
    loads = _loads(candidates, owners, ranks)
    assert max(loads) <= 1.1 * sum(loads) / ranks
    chunks = chunks_of(candidates, owners, ranks)
    assert [index for chunk in chunks for index in chunk] == list(range(len(candidates)))
    assert len(chunks) >= 4  # so that most of the exchange runs concurrently with products
    largest = sum(candidate.numel for candidate in candidates[: len(LLAMA)])
    for chunk in chunks:
        elements = [0] * ranks
        for index in chunk:
            elements[owners[index]] += candidates[index].numel
        assert max(elements) <= largest  # what a gather of one block takes
    if ranks <= 4:
        assert len(chunks) == 32


def test_what_comes_later_goes_where_less_is() -> None:
    assert assign_owners([Candidate("a", (8, 8))], 3, [5, 4, 6]) == [1]


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes_are_assigned_and_divided(seed: int) -> None:
    """No rank has more than the mean and the dearest tensor of each block, as when the dearest are assigned first."""
    generator = random.Random(seed)
    candidates = [
        Candidate(f"b{generator.randrange(4)}", tuple(generator.randint(1, 40) for _ in range(generator.randint(1, 3))))
        for _ in range(generator.randint(1, 30))
    ]
    ranks = generator.randint(1, 9)
    owners = assign_owners(candidates, ranks)
    assert owners == assign_owners(candidates, ranks)
    for block in {candidate.block for candidate in candidates}:
        inside = [index for index, candidate in enumerate(candidates) if candidate.block == block]
        loads = _loads([candidates[i] for i in inside], [owners[i] for i in inside], ranks)
        assert max(loads) <= sum(loads) / ranks + max(cost_of(candidates[i].shape) for i in inside)
    chunks = chunks_of(candidates, owners, ranks)
    assert sorted(index for chunk in chunks for index in chunk) == list(range(len(candidates)))
    assert all(chunks)
    for block in {candidate.block for candidate in candidates}:
        assert sum(any(candidates[index].block == block for index in chunk) for chunk in chunks) == 1
