"""Chooses which shards live in host memory: as few bytes as must, spread over the step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ShardNeed", "choose_shards"]

_SLOTS = 2  # of the arena, for shards on their way to a gather: one arrives while the one before is gathered


@dataclass(frozen=True)
class ShardNeed:
    """What the choice depends on; bytes of one rank, the same on all ranks.

    Args:
        shards: Of every chunk of shards, in the order of the model.
        others: The most that everything else takes at a time: gradients, whole blocks, states that stay.
        budget: That may be used on the device.
    """

    shards: tuple[int, ...]
    others: int
    budget: int

    def peak(self, hosted: frozenset[int]) -> int:
        """Bytes of the device with the chunks `hosted` in host memory."""
        staying = sum(size for index, size in enumerate(self.shards) if index not in hosted)
        return self.others + staying + _SLOTS * max((self.shards[index] for index in hosted), default=0)


def choose_shards(need: ShardNeed) -> frozenset[int]:
    """The chunks that leave; none if everything fits, and all if nothing does.

    The largest leave until one of the others would do: then the smallest such one. Of equal ones, as layers are, those
    that lie far apart: a chunk travels while the blocks before it compute, which need the link themselves if they left.

    Args:
        need: The numbers.

    Returns:
        Indices of chunks.
    """
    hosted: frozenset[int] = frozenset()
    rest = sorted(range(len(need.shards)), key=_spread)
    while rest and (excess := need.peak(hosted) - need.budget) > 0:
        enough = [index for index in rest if need.shards[index] >= excess]
        size_of = need.shards.__getitem__
        chosen = min(enough, key=size_of) if enough else max(rest, key=size_of)
        rest.remove(chosen)
        hosted |= {chosen}
    return hosted


def _spread(index: int) -> int:
    """Orders numbers so that the first few of them are far apart, whatever their range: by their bits, reversed."""
    return int(f"{index:032b}"[::-1], 2)
