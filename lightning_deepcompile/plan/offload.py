"""Settings and sizes of tensors in host memory; `plan.fit` decides which are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_deepcompile.plan.budget import MemoryBudgetError
from lightning_deepcompile.program.printer import exact_bytes

OffloadMode = Literal["none", "auto", "all"]
OffloadKind = Literal["states", "activations", "parameters"]


@dataclass(frozen=True)
class Offloading:
    """The mode in which each kind of tensors is offloaded to host memory.

    Args:
        states: Optimizer states.
        activations: Saved tensors.
        parameters: Shards of parameters.
    """

    states: OffloadMode = "none"
    activations: OffloadMode = "none"
    parameters: OffloadMode = "none"

    @classmethod
    def of(cls, chosen: OffloadMode | Sequence[OffloadKind]) -> Offloading:
        """Reads `CompileConfig.offload`."""
        if isinstance(chosen, str):
            return cls(chosen, chosen, chosen)
        every: OffloadMode = "all"
        return cls(**dict.fromkeys(chosen, every))

    @property
    def any(self) -> bool:
        """True if anything may be offloaded."""
        return self != Offloading()


_CHUNK_BYTES = 256 << 20


def pinned_bytes(size: int) -> int:
    """Bytes of the pinned host buffer for a saved tensor of `size` bytes: a power of two."""
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True)
class StatePlaces:
    """The location of a plan's optimizer states; the same on all ranks.

    Args:
        away: Bytes of each rank's states in host memory.
        slots: Chunks of states that may be on the device while an optimizer steps.
    """

    away: int
    slots: int


def chunk_bytes(states: int) -> int:
    """Returns the most bytes of states, and of shards in host memory, that step together.

    A copy of 256 MiB takes 5 ms at 53 GB/s, beside which a chunk's own launches are small. Three chunks are on the
    device while the optimizer steps: where all states are less than 4 GiB, each is a sixteenth of them.
    """
    return max(min(_CHUNK_BYTES, states // 16), 1)


def leaving_order(size: int, chunk: int) -> int:
    """A sort key for offloading states: first those that share a chunk with others, then ever larger ones.

    A buffer is as large as the largest states that pass through it, so the largest stay on the device if any can.

    Args:
        size: Bytes of the states of one parameter.
        chunk: Most bytes of a chunk of more than one.
    """
    return size if size > chunk else 0


def check_host(leaving: int, limit: int, chosen: object, what: str = "optimizer states") -> None:
    """Raises if the tensors to offload do not fit into host memory.

    Args:
        leaving: Bytes of each rank.
        limit: Bytes that each rank may use.
        chosen: ``CompileConfig.host_memory_budget``.
        what: The kind of tensors, for the message.

    Raises:
        MemoryBudgetError: States the least host memory that would do.
    """
    if leaving > limit:
        raise MemoryBudgetError(
            f"CompileConfig(host_memory_budget={chosen!r}) gives each rank {exact_bytes(limit)} of host memory, but "
            f"{what} of {exact_bytes(leaving)} of every rank must leave its device. Give the node at "
            "least that much for each of its ranks, use more ranks, or an optimizer with smaller states."
        )
