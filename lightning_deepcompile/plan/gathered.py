"""Models gathered parameters: the memory that they take, and the gathers that compute has to wait for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_deepcompile.plan.arena import ArenaModel, Slot, WindowModel, group_bytes
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.program.instructions import TABLE
from lightning_deepcompile.program.schedule import Instruction

MOVES = frozenset(
    op for op, row in TABLE.items() if row.effect[1] == "parameters" and row.effect[0] != "launch and wait"
)
"""The operations that this model follows; the memory of a gather that blocks belongs to its caller."""


@dataclass(eq=False, slots=True)
class Group:
    """Parameters that were gathered together.

    Args:
        sizes: Bytes of each.
        slot: Their memory.
        in_window: Whether that is a window.
        resident: How many of them are not released yet.
        fetched: Copies of their shards that are in host memory.
        task: The task that gathers them.
        waited: Whether compute was told to wait for it.
    """

    sizes: tuple[int, ...]
    slot: Slot
    in_window: bool
    resident: int
    fetched: Slot | None = None
    task: int = 0
    waited: bool = False


class GatherModel:
    """Follows ``csrc/executors/gather.cpp``: a group is gathered into one slot, which its last release frees.

    Args:
        profile: Names what is gathered to windows, and the shards that are in host memory.
    """

    def __init__(self, profile: Profile) -> None:
        self._arena = ArenaModel()
        self._windows = WindowModel(profile.window_from)
        self._hosted = {int(ds_id): size for ds_id, size in profile.hosted.items()}
        self._host_computes = profile.host_computes
        self._groups: dict[int, Group] = {}  # by parameter
        self._fetching: Group | None = None  # the last group that had shards in host memory; their copies are kept

    @property
    def bytes(self) -> int:
        """Bytes of the arena's slots."""
        return self._arena.bytes

    @property
    def window_bytes(self) -> int:
        """Bytes of all windows that were made."""
        return self._windows.bytes

    def follow(self, instruction: Instruction, boundary: bool) -> None:
        """Follows one of `MOVES`, without tasks.

        Args:
            instruction: Any instruction.
            boundary: Whether this is the last micro-batch before the optimizer steps.
        """
        match instruction.traits.effect[0]:
            case "launch":
                self.gather(instruction)
            case "wait":
                if self._hosted:  # else nothing is freed
                    self.wait(instruction.ids)
            case _ if boundary or not instruction.traits.at_boundary:
                self.release(instruction.ids, None)

    def gather(self, instruction: Instruction) -> Group | None:
        """Takes memory for those parameters that are not there; returns None if all of them are."""
        if not self._groups.keys().isdisjoint(instruction.ids):
            instruction = instruction.without(self._groups)
        if not instruction.ids:
            return None
        size = group_bytes(instruction.sizes)
        window = self._windows.take(size)
        slot = window or self._arena.acquire(size)
        group = Group(instruction.sizes, slot, window is not None, len(instruction.ids))
        if shards := [self._hosted[i] for i in self._hosted if i in instruction.ids]:
            group.fetched = self._arena.acquire(group_bytes(shards))
            self._release_fetched()  # two slots take turns
            self._fetching = None if self._host_computes else group
        self._groups.update(dict.fromkeys(instruction.ids, group))
        return group

    def wait(self, ids: Iterable[int]) -> list[int]:
        """Returns the tasks that gather some parameters, those that compute was told to wait for before left out."""
        groups = {self._groups[i]: None for i in ids if i in self._groups}
        return [task for group in groups for task in self._complete(group)]

    def release(self, ids: Iterable[int], reader: int | None) -> list[int]:
        """Releases parameters.

        Args:
            ids: The parameters.
            reader: The last task that may read them; None if there is none.

        Returns:
            The tasks that compute has to wait for: those that gather something that nobody waited for.
        """
        tasks = []
        for i in ids:
            group = self._groups.pop(i, None)
            if group is None:
                continue
            group.resident -= 1
            if not group.resident:
                tasks += self._complete(group)
                last = group.task if reader is None else reader
                if not self._windows.release(group.slot, last):
                    self._arena.release(group.slot, last)
        if not self._groups:
            self._release_fetched()
            self._arena.clear()
        return tasks

    def _complete(self, group: Group) -> list[int]:
        if group.waited:
            return []
        group.waited = True
        if group.fetched is not None and self._host_computes:
            self._arena.release(group.fetched, group.task)
        return [group.task]

    def _release_fetched(self) -> None:
        if self._fetching is not None and self._fetching.fetched is not None:
            self._arena.release(self._fetching.fetched, self._fetching.task)
            self._fetching = None
