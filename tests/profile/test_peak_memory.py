"""Room for a step in a device's memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_deepcompile.estimate.estimate import _MemoryOfDevice
from lightning_deepcompile.profile.memory import scattered

GIB = 2**30


def test_large_values_need_memory_in_one_piece() -> None:
    memory = _MemoryOfDevice(80 * GIB, GIB)
    assert memory.limit(None) == 71 * GIB  # 90 %, without what others use
    memory.largest = 5 * GIB  # finds its place in what is left beside the budget
    assert memory.limit(None) == 71 * GIB
    memory.largest = 16 * GIB
    assert memory.limit(None) == (71 - (24 - 8)) * GIB
    assert memory.limit("40GiB") == 40 * GIB and memory.limit("70GiB") == (70 - (24 - 9)) * GIB


@given(st.integers(0, 10**12), st.integers(-(10**12), 10**12))
def test_what_lies_beside_a_budget_counts(largest: int, apart: int) -> None:
    found = scattered(largest, apart)
    assert 0 <= found <= 1.5 * largest and (found == 0) == (max(apart, 0) >= largest + largest // 2)
