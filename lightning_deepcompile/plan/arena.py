"""A model of the runtime's arena: slots for groups of gathered parameters, kept and reused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ArenaModel", "Slot", "group_bytes"]

_ALIGNMENT = 512
_SLACK = 1 << 20


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def group_bytes(sizes: Iterable[int]) -> int:
    """Bytes of a slot's contents for parameters of `sizes` bytes."""
    return sum(_aligned(size) for size in sizes)


@dataclass(eq=False)
class Slot:
    """Memory for one group.

    Args:
        capacity: Its bytes.
        last_user: What a new user has to wait for, in the simulator's terms.
    """

    capacity: int
    last_user: int | None = None


class ArenaModel:
    """Follows the rules of ``csrc/memory/arena.cpp``: best fit without much waste, spare room in new slots."""

    def __init__(self) -> None:
        self._free: list[Slot] = []
        self.bytes = 0

    def acquire(self, size: int) -> Slot:
        """A slot of at least `size` bytes."""
        need = _aligned(max(size, 1))
        limit = need + need // 4 + _SLACK
        fitting = [slot for slot in self._free if need <= slot.capacity <= limit]
        if fitting:
            slot = min(fitting, key=lambda s: s.capacity)
            self._free.remove(slot)
            return slot
        slot = Slot(_aligned(need + need // 64))
        self.bytes += slot.capacity
        return slot

    def release(self, slot: Slot, last_user: int | None = None) -> None:
        """Gives `slot` back; it may be reused after `last_user`."""
        slot.last_user = last_user
        self._free.append(slot)

    def clear(self) -> None:
        """Frees the memory of free slots."""
        self.bytes -= sum(slot.capacity for slot in self._free)
        self._free.clear()
