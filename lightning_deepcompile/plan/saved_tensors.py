"""The saved tensors of a step, and the fewest of them that must be offloaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_deepcompile.plan.copy_placement import COPY_AHEAD, CopyPlacement, Key, offload_saved
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.offload import pinned_bytes
from lightning_deepcompile.plan.simulate import peak_bytes
from lightning_deepcompile.program.schedule import Schedule

PARTS = 16
"""Parts of the saved tensors whose sizes ranks compare, although they may have other tensors."""


def offloadable(schedules: Sequence[Schedule], host_bytes: int | None = None, smallest: int = 1) -> list[Key]:
    """Returns the saved tensors that may be offloaded, as far as host memory has room, in the order of their making.

    The first ones have the most time until backward reads them.

    Args:
        schedules: The programs of a micro-batch.
        host_bytes: Room in host memory; None if there is no limit.
        smallest: Fewest bytes of a tensor.
    """
    found: list[Key] = []
    total = 0
    for forward in schedules:
        pairs = [s for s in schedules if (s.frame, s.kind) == (forward.frame, "backward")]
        if forward.kind != "forward" or not pairs:
            continue
        placement = CopyPlacement.of(forward)
        saved = [placement.saved[one.number] for one in pairs[0].saved]
        for one in sorted(saved, key=lambda one: (placement.first(one.number), -one.size, one.number)):
            if one.size < max(smallest, 1):
                continue
            total += pinned_bytes(one.size)
            if host_bytes is not None and total > host_bytes:
                return found
            found.append((forward.frame, one.number))
    return found


def fewest(keys: Sequence[Key], peak: Callable[[Sequence[Key]], int], limit: int) -> Sequence[Key]:
    """Returns the fewest of the first tensors with which a step keeps a limit, or else has the peak of all of them.

    Args:
        keys: The tensors that may be offloaded.
        peak: Returns the peak with some of them offloaded.
        limit: Bytes that may be allocated.
    """
    limit = max(limit, peak(keys))
    if peak(()) <= limit:
        return ()
    low, high = 0, len(keys)  # `low` are too few, `high` suffice
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if peak(keys[:middle]) <= limit else (middle, high)
    return keys[:high]


@dataclass(frozen=True)
class SavedTensors:
    """The saved tensors of a step without times: copies run beside a fixed number of regions.

    Args:
        schedules: The programs of a micro-batch, without copies.
        profile: Their memory.
        host_bytes: Room in host memory for saved tensors.

    Attributes:
        keys: Those that may be offloaded, in the order in which they are.
    """

    schedules: Sequence[Schedule]
    profile: Profile
    host_bytes: int
    keys: Sequence[Key] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", offloadable(self.schedules, self.host_bytes))

    @property
    def host_is_short(self) -> bool:
        """True if host memory has no room for all saved tensors."""
        return len(self.keys) < len(offloadable(self.schedules))

    def offloaded(self, keys: Sequence[Key], ahead: int = COPY_AHEAD) -> list[Schedule]:
        """Returns the schedules with copies of some tensors.

        Args:
            keys: The tensors.
            ahead: Regions between a copy and what needs it; with 0, compute waits for each copy.
        """
        return offload_saved(self.schedules, self._by_frame(keys), ahead)

    def peak(self, keys: Sequence[Key] = (), ahead: int = COPY_AHEAD) -> int:
        """Returns the peak bytes with copies of some tensors; arguments as of `offloaded`."""
        return peak_bytes(self.offloaded(keys, ahead), self.profile)

    def peaks(self) -> list[int]:
        """Returns the peak with none offloaded, and with one part more each time; parts are of equal bytes."""
        size = {(schedule.frame, one.number): one.size for schedule in self.schedules for one in schedule.saved}
        ends = list(itertools.accumulate(size[key] for key in self.keys))
        counts = [sum(PARTS * end <= part * ends[-1] for end in ends) if ends else 0 for part in range(PARTS)]
        known = {count: self.peak(self.keys[:count]) for count in {*counts, len(self.keys)}}
        return [known[count] for count in (*counts, len(self.keys))]

    def fewest(self, limit: int, ahead: int) -> dict[int, frozenset[int]]:
        """Returns the numbers of the fewest tensors with which the step keeps a limit, or else has its least peak.

        Args:
            limit: Bytes that may be allocated.
            ahead: As of `offloaded`.
        """
        return self._by_frame(fewest(self.keys, lambda keys: self.peak(keys, ahead), limit))

    def _by_frame(self, keys: Sequence[Key]) -> dict[int, frozenset[int]]:
        frames = {schedule.frame for schedule in self.schedules}
        return {frame: frozenset(number for other, number in keys if other == frame) for frame in frames}
