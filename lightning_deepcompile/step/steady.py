"""Work that a host issues in every step, as a CUDA graph for as long as what it reads stays the same.

Between two programs, clipping and an optimizer's step take a small model's host longer than its device. What they read
from the host, numbers and tensors, is the same in many steps. When it has stayed the same for a while, the work is
recorded, as programs are (`Replays`), and replayed until something else is read. That changes no bit.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_deepcompile.program.replay import Replays

__all__ = ["Reads", "Steady"]

_log = logging.getLogger(__name__)

_STEADY = 3
"""Work is recorded when it has read the same so often; the second time, twice as often, and so on."""

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(eq=False)
class Reads:
    """What work reads besides numbers.

    Args:
        tensors: That it reads and writes, which are kept alive. Gradients are none of them: whether somebody holds one
            is seen by its references.
        places: Where they and gradients are, and what else the device is told of them.
    """

    tensors: list[Tensor]
    places: list[Any]

    def is_like(self, other: Reads) -> bool:
        """Whether the work that reads one and the other does the same on the device."""
        return (
            self.places == other.places
            and len(self.tensors) == len(other.tensors)
            and all(map(operator.is_, self.tensors, other.tensors))
        )


class Steady(Generic[In, Out]):
    """Does one piece of work, or replays it.

    Args:
        name: Of the work, in messages.
        replays: Says whether programs are replayed; then gradients stay where they are. None: nothing is.
        work: Issues the work, all of it on the current stream.
    """

    def __init__(self, name: str, replays: Replays | None, work: Callable[[In], Out]) -> None:
        self._name, self._replays, self._work = name, replays, work
        self._operands: list[In] = []  # of the work under way; a graph holds none
        self._numbers: list[Any] | None = None  # of the work before
        self._reads: Reads | None = None  # the work before, if it has been looked at
        self._same = self._recorded = 0
        self._graph: torch.cuda.CUDAGraph | None = None  # of work like that before
        self._result: list[Out] = []  # that the graph writes
        self._refused = False
        if replays is not None:
            replays.follow(self)

    @property
    def begins(self) -> bool:
        """It goes along with programs."""
        return False

    @property
    def may_record(self) -> bool:
        """Whether programs are replayed, and the work may be."""
        replays = self._replays
        return replays is not None and replays.enabled and replays.recorded > 0 and not self._refused

    @property
    def replayed(self) -> bool:
        """Whether the last work was replayed: then the next replay writes to what it returned."""
        return self._graph is not None

    def forget(self) -> None:
        """Drops the graph."""
        self._numbers = self._reads = self._graph = None
        self._result, self._same = [], 0

    def refuse(self, reason: str) -> None:
        """Says why the work is never recorded."""
        self.forget()
        self._refused = True
        if self._replays is not None:
            self._replays.refuse(self._name, reason)

    def run(self, operands: In, numbers: list[Any] | None, look: Callable[[], Reads]) -> Out:
        """Does the work, or replays it.

        Args:
            operands: What it works on.
            numbers: That it reads; None if what it reads is this step's alone.
            look: Says what else it reads; called if the numbers are those of the work before.

        Returns:
            What it returns.
        """
        if numbers is None or not self.may_record or numbers != self._numbers:
            self.forget()
            self._numbers = numbers
            return self._work(operands)
        reads = look()
        if self._reads is not None and not reads.is_like(self._reads):
            self.forget()
            self._numbers, self._reads = numbers, reads
            return self._work(operands)
        self._reads = reads
        self._same += 1
        self._operands = [operands]
        try:
            if self._graph is None and self._same >= _STEADY * (1 + self._recorded):
                self._record(reads)
            if self._graph is None or self._replays is None:
                return self._work(operands)
            self._replays.launch_alone(self._graph, self._name)
            return self._result[0]
        finally:
            self._operands = []

    def _record(self, reads: Reads) -> None:
        assert self._replays is not None
        if any(tensor.device != self._replays.device for tensor in reads.tensors):
            self.refuse("it reads what is not on the device")
            return
        try:
            graph, result = self._replays.record_alone(lambda: self._work(*self._operands))
        except Exception as error:
            self.refuse(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            _log.warning("%s is not replayed as a CUDA graph, but runs as before.", self._name, exc_info=error)
            return
        self._graph, self._result = graph, [result]
        self._recorded += 1
