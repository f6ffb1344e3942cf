"""Records work that a host issues in every step as a CUDA graph, for as long as its inputs stay the same.

Between two programs, clipping and an optimizer's step take a small model's host longer than its device. Their inputs
from the host, numbers and tensors, are the same in many steps. When they have been the same for a while, the work is
recorded, as programs are (`Replays`), and replayed until an input changes. No bit of the results changes.
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

_log = logging.getLogger(__name__)

_STEADY = 3
"""Work is recorded when it has read the same so often; the second time, twice as often, and so on."""

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(eq=False)
class Reads:
    """The inputs of work besides numbers.

    Args:
        tensors: Those that it reads and writes, which are kept alive. Gradients are not among them: references to them
            show whether somebody holds one.
        places: Addresses of these tensors and of gradients, and whatever else the device is told of them.
    """

    tensors: list[Tensor]
    places: list[Any]

    def is_like(self, other: Reads) -> bool:
        """Returns whether the work does the same on the device with both inputs."""
        return (
            self.places == other.places
            and len(self.tensors) == len(other.tensors)
            and all(map(operator.is_, self.tensors, other.tensors))
        )


class Steady(Generic[In, Out]):
    """Does one piece of work, or replays it.

    Args:
        name: The name of the work, in messages.
        replays: Tells whether programs are replayed; then gradients keep their memory. None: no replay.
        work: Issues the work, all of it on the current stream.
    """

    def __init__(self, name: str, replays: Replays | None, work: Callable[[In], Out]) -> None:
        self._name, self._replays, self._work = name, replays, work
        self._operands: list[In] = []  # of the work under way; a graph holds none
        self._numbers: list[Any] | None = None  # of the previous work
        self._reads: Reads | None = None  # of the previous work, if it was examined
        self._same = self._recorded = 0
        self._graph: torch.cuda.CUDAGraph | None = None  # of work like the previous one
        self._result: list[Out] = []  # written by the graph
        self._refused = False
        if replays is not None:
            replays.follow(self)

    @property
    def begins(self) -> bool:
        """Always False: recording begins only with programs."""
        return False

    @property
    def may_record(self) -> bool:
        """True if programs are replayed, and the work may be."""
        replays = self._replays
        return replays is not None and replays.enabled and replays.recorded > 0 and not self._refused

    @property
    def replayed(self) -> bool:
        """True if the last work was replayed: then the next replay overwrites its result."""
        return self._graph is not None

    def forget(self) -> None:
        """Drops the graph."""
        self._numbers = self._reads = self._graph = None
        self._result, self._same = [], 0

    def refuse(self, reason: str) -> None:
        """Records that the work is never replayed, and why."""
        self.forget()
        self._refused = True
        if self._replays is not None:
            self._replays.refuse(self._name, reason)

    def run(self, operands: In, numbers: list[Any] | None, look: Callable[[], Reads]) -> Out:
        """Does the work, or replays it.

        Args:
            operands: The operands.
            numbers: The numbers that it reads; None if its inputs belong to this step alone.
            look: Returns its other inputs; called if the numbers are those of the previous work.
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
            _log.warning("%s runs without a CUDA graph.", self._name, exc_info=error)
            return
        self._graph, self._result = graph, [result]
        self._recorded += 1
