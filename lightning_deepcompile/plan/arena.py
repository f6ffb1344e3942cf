"""Models the memory that groups of parameters are gathered to: slots of the arena, and windows, kept and reused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_ALIGNMENT = 512
_SLACK = 1 << 20
_PAGE = 2 << 20


def _aligned(size: int, alignment: int = _ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


def group_bytes(sizes: Iterable[int]) -> int:
    """Bytes of a slot's contents for parameters of `sizes` bytes."""
    return sum([-(-size // _ALIGNMENT) for size in sizes]) * _ALIGNMENT  # searches spend much of their time here


@dataclass(eq=False)
class Slot:
    """Memory for one group.

    Args:
        capacity: Its bytes.
        last_user: The last reader, which a new user has to wait for, in the simulator's terms.
    """

    capacity: int
    last_user: int | None = None


class ArenaModel:
    """Follows the rules of ``csrc/memory/arena.cpp``: best fit without much waste, spare room in new slots."""

    def __init__(self) -> None:
        self._free: list[Slot] = []
        self.bytes = 0

    def acquire(self, size: int) -> Slot:
        """Takes a slot of at least `size` bytes."""
        need = _aligned(max(size, 1))
        limit = need + need // 4 + _SLACK
        slot = _best(self._free, need, limit)
        if slot is not None:
            self._free.remove(slot)
            return slot
        slot = Slot(_aligned(need + need // 64))
        self.bytes += slot.capacity
        return slot

    def release(self, slot: Slot, last_user: int | None = None) -> None:
        """Returns `slot` to the arena; it may be reused after `last_user`."""
        slot.last_user = last_user
        self._free.append(slot)

    def clear(self) -> None:
        """Frees the memory of free slots."""
        self.bytes -= sum(slot.capacity for slot in self._free)
        self._free.clear()


class WindowModel:
    """Follows the rules of ``csrc/memory/windows.cpp``: large groups are gathered to memory that stays between steps.

    Args:
        least: Bytes of the smallest group that is gathered to a window; 0: none.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._all: list[Slot] = []  # in the order in which they were made
        self._taken: set[Slot] = set()

    @property
    def bytes(self) -> int:
        """Bytes of all windows that were made."""
        return sum(window.capacity for window in self._all)

    def take(self, size: int) -> Slot | None:
        """Takes a window of at least `size` bytes; None for a group that is too small for one."""
        if not self._least or size < self._least:
            return None
        need = _aligned(size, _PAGE)
        window = _best([w for w in self._all if w not in self._taken], need, need + need // 4 + _SLACK)
        if window is None:
            window = Slot(need)
            self._all.append(window)
        self._taken.add(window)
        return window

    def release(self, window: Slot, last_user: int | None = None) -> bool:
        """Gives `window` back, as `ArenaModel.release` does a slot; returns whether it is a window."""
        if window not in self._taken:
            return False
        window.last_user = last_user
        self._taken.remove(window)
        return True


def _best(free: Iterable[Slot], need: int, limit: int) -> Slot | None:
    """Returns the smallest one that fits; the first of several."""
    fitting = [slot for slot in free if need <= slot.capacity <= limit]
    return min(fitting, key=lambda s: s.capacity, default=None)
