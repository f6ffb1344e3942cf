"""Decides how many bytes of optimizer states leave the device: as many as exceed the memory budget, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_deepcompile.plan.budget import MemoryBudgetError
from lightning_deepcompile.plan.state_copies import LEAST_SLOTS
from lightning_deepcompile.program.printer import format_bytes

__all__ = [
    "OffloadDecision",
    "OffloadKind",
    "OffloadMode",
    "OffloadNeed",
    "Offloading",
    "StatePlaces",
    "check_host",
    "decide_offload",
    "leaving_order",
    "pinned_bytes",
    "with_least_buffers",
]

OffloadMode = Literal["none", "auto", "all"]
OffloadKind = Literal["states", "activations", "parameters"]


@dataclass(frozen=True)
class Offloading:
    """How each kind of tensors is offloaded to host memory.

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
        """Whether anything may be offloaded."""
        return self != Offloading()


def pinned_bytes(size: int) -> int:
    """Bytes of the host buffer that the runtime takes for a saved tensor of `size` bytes: a power of two."""
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True)
class OffloadNeed:
    """What the decision depends on; bytes of one rank.

    Args:
        peak: The most memory of forward and backward passes, without optimizer states.
        stepping: Memory while the optimizer steps, without its states: parameters, gradients.
        states: Of all optimizers, those that can leave.
        buffers: On the device for states that come and go; needed if any leaves.
        budget: That may be used on the device.
        host: That may be used in host memory.
    """

    peak: int
    stepping: int
    states: int
    buffers: int
    budget: int
    host: int

    @property
    def least(self) -> int:
        """Memory of the device with all states in host memory."""
        return max(self.peak, self.stepping + self.buffers)

    @property
    def excess(self) -> int:
        """What must leave, if anything must; more than `states` if that is not enough."""
        return self.least + self.states - self.budget


@dataclass(frozen=True)
class OffloadDecision:
    """What leaves.

    Args:
        bytes: That must leave; at most `states`.
        states: Bytes of states that could leave.
        reason: Why, in words.
    """

    bytes: int
    states: int
    reason: str


@dataclass(frozen=True)
class StatePlaces:
    """Where a plan has optimizer states; the same on all ranks.

    Args:
        away: Bytes of each rank's states in host memory.
        slots: Chunks of states that may be on the device while an optimizer steps.
    """

    away: int
    slots: int


def decide_offload(mode: OffloadMode, need: OffloadNeed, chosen: object, host_chosen: object) -> OffloadDecision:
    """Decides for all optimizers together.

    Args:
        mode: ``"all"`` takes everything, ``"auto"`` what exceeds the budget.
        need: The numbers, the same on all ranks.
        chosen: ``CompileConfig.memory_budget``; None, if the budget is the default: then not fitting is no error.
        host_chosen: ``CompileConfig.host_memory_budget``.

    Raises:
        MemoryBudgetError: If it cannot fit; states the least that would do.
    """
    if mode == "all":
        decision = OffloadDecision(need.states, need.states, "all may leave")
    else:
        kept = max(need.peak, need.stepping) + need.states
        numbers = f"{format_bytes(kept)} with all states on the device", format_bytes(need.budget)
        if kept <= need.budget or need.states == 0:
            return OffloadDecision(0, need.states, "{} fit into {}".format(*numbers))
        if need.least > need.budget and chosen is not None:
            raise MemoryBudgetError(
                f"CompileConfig(memory_budget={chosen!r}) allows {need.budget} bytes, but with all optimizer states in "
                f"host memory a step still needs {need.least} ({need.least / 2**30:.2f} GiB). Raise the budget to at "
                "least that, use a smaller batch, activation checkpointing, or a smaller `offload_chunk`."
            )
        decision = OffloadDecision(min(max(need.excess, 1), need.states), need.states, "{} exceed {}".format(*numbers))
    check_host(decision.bytes, need.host, host_chosen)
    return decision


def leaving_order(size: int, chunk: int) -> int:
    """A key by which states leave: those of many parameters in one chunk first, then ever larger ones by themselves.

    A buffer is as large as what comes and goes through it, so the largest stay if anything may.

    Args:
        size: Bytes of the states of one parameter.
        chunk: Most bytes of a chunk of more than one.
    """
    return size if size > chunk else 0


def with_least_buffers(need: OffloadNeed, sizes: Sequence[int], chunk: int) -> OffloadNeed:
    """The same need with buffers for no more than what has to leave.

    Args:
        need: Its buffers are those that the largest states go through.
        sizes: Of the states of every parameter, in any order.
        chunk: Most bytes of a chunk of more than one.
    """
    for limit in sorted({chunk, *(size for size in sizes if size > chunk)}):
        lean = replace(need, buffers=min(need.buffers, LEAST_SLOTS * limit))
        if lean.excess <= sum(size for size in sizes if size <= limit):
            return lean
    return need


def check_host(leaving: int, limit: int, chosen: object, what: str = "optimizer states") -> None:
    """Raises if what leaves does not fit into host memory.

    Args:
        leaving: Bytes of each rank.
        limit: Bytes that each rank may use.
        chosen: ``CompileConfig.host_memory_budget``.
        what: Leaves.

    Raises:
        MemoryBudgetError: States the least host memory that would do.
    """
    if leaving > limit:
        raise MemoryBudgetError(
            f"CompileConfig(host_memory_budget={chosen!r}) gives each rank {limit} bytes of host memory, but {what} "
            f"of {leaving} bytes ({leaving / 2**30:.2f} GiB) of every rank must leave its device. Give the node at "
            "least that much for each of its ranks, use more ranks, or an optimizer with smaller states."
        )
