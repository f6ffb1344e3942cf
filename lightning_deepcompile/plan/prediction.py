"""What a simulated step is expected to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_deepcompile.plan.events import StreamName

__all__ = ["MemoryPoint", "Prediction", "Span"]


class Span(NamedTuple):
    """Something that a stream did, from `start` to `end` in seconds; before the step's begin they are negative."""

    stream: StreamName
    label: str
    start: float
    end: float


class MemoryPoint(NamedTuple):
    """The most memory while an instruction was issued.

    Args:
        micro_batch: Number of the micro-batch.
        schedule: Index of the schedule within it.
        instruction: Position of the instruction.
        seconds: When the device gets there.
        arena: Bytes of slots for gathered parameters.
        bytes: All allocated bytes.
        away: Bytes of saved tensors in host memory.
        gradients: Bytes of whole gradients that the runtime holds, or has on their way; less those of shards that
            come later in the step.
        states: Bytes of optimizer states that are on their way between the device and host memory.
    """

    micro_batch: int
    schedule: int
    instruction: int
    seconds: float
    arena: int
    bytes: int
    away: int
    gradients: int
    states: int


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to do.

    Args:
        seconds: Its duration, `Profile.unexplained_seconds` included, the time between steps not.
        compute_seconds: How long compute, the optimizer included, is busy.
        exposed_seconds: How long compute stands still for communication.
        gather_seconds: How long gathers take.
        reduce_seconds: How long reductions take.
        peak_bytes: The most memory.
        memory: Memory, in the host's order.
        spans: What ran when.
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    gather_seconds: float
    reduce_seconds: float
    peak_bytes: int
    memory: tuple[MemoryPoint, ...]
    spans: tuple[Span, ...]

    def over(self, budget: int | None) -> int:
        """Bytes by which the peak exceeds `budget`; at most 0 if it fits."""
        return self.peak_bytes - budget if budget is not None else -1
