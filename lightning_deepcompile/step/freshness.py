"""Tracks whether gathered parameters are still up to date."""

from __future__ import annotations

from typing import Any

from lightning_deepcompile import compat
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.shards import ShardedModel


class Freshness:
    """Drops gathered parameters before a step that might find them out of date.

    Code that changed a parameter since the last step did so on the compute stream: gathers must come after it. The
    check is made when a step begins, not after the optimizer's step, so that a hook's changes count.

    Args:
        model: The sharded model.
        runtime: ``_C.Runtime`` that gathers.
        stage: ZeRO stage; below 3 parameters stay gathered between the steps of one accumulation, or of an evaluation,
            as long as nobody writes to one.
    """

    def __init__(self, model: ShardedModel, runtime: Any, stage: int) -> None:
        self._writes = _WriteWatch(model)
        self._runtime, self._derived = runtime, model.derived
        self._keeps = stage < 3
        self._counts: list[int] | None = None  # while gathered parameters may be used again
        self._ran = ""  # the last step

    def may_stay(self, name: str) -> bool:
        """Returns whether the step `name` may use gathered parameters, unless somebody wrote; the same on all ranks."""
        # Averaged weights are swapped in and out without counted writes, but only between training and evaluation.
        return self._counts is not None and name == self._ran

    def written(self) -> bool:
        """Returns whether writes to this rank's parameters were seen since `settle`, or since the last step began."""
        return self._counts != self._writes.counts()

    def begin(self, name: str, stays: bool) -> None:
        """Call before the step `name`.

        Args:
            name: The step's.
            stays: Whether gathered parameters are used.
        """
        if not (stays and self._keeps):
            self._derived.invalidate()  # what a step gathers itself sees all writes, also those that nothing counts
        if stays:
            self._runtime.parameters.order_gathers()  # the next ones, after writes that nothing counts
        else:
            self._runtime.parameters.invalidate()
            if self._keeps:
                self._derived.refresh_kept()
            self._runtime.parameters.refetch()
        self._counts = self._writes.counts() if self._keeps else None
        self._ran = name

    def settle(self) -> None:
        """Marks gathered parameters as up to date until somebody writes."""
        self._counts = self._writes.counts()

    def doubt(self) -> None:
        """Makes the next step gather again."""
        self._counts = None


class _WriteWatch:
    """Counts in-place writes to the parameters of a model.

    PyTorch counts them per tensor, and a parameter is several: what users hold, the local tensor inside it, and what
    graphs and optimizers read. Writes through ``parameter.data``, and by ``torch._foreach`` functions that take
    DTensors, are counted nowhere.
    """

    def __init__(self, model: ShardedModel) -> None:
        # Views of a flat buffer share one count: one tensor for each buffer is enough.
        self._tensors = [model.by_name[chunk.shards[0].spec.name].leaf for chunk in model.chunks]
        for parameter in model.parameters:
            self._tensors += [parameter.dtensor, compat.local_of(parameter.dtensor)]

    def counts(self) -> list[int]:
        """The counts so far; equal lists mean that nothing was written in between."""
        return [compat.version_of(tensor) for tensor in self._tensors]


def writes_to(parameter: ShardedParameter) -> list[int]:
    """The counts of one parameter, including writes to others in its flat buffer."""
    return [
        compat.version_of(tensor) for tensor in (parameter.leaf, parameter.dtensor, compat.local_of(parameter.dtensor))
    ]
