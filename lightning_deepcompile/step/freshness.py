"""Tracks whether gathered parameters are still up to date."""

from __future__ import annotations

from typing import Any

from lightning_deepcompile import compat
from lightning_deepcompile.sharding.shards import ShardedModel


class Freshness:
    """Drops gathered parameters before a step that might find them out of date.

    Code that changed a parameter since the last step did so on the compute stream: gathers must come after it. The
    check is made when a step begins, not after the optimizer's step, so that a hook's changes count.

    Args:
        model: The sharded model.
        runtime: ``_C.Runtime`` that gathers.
        stage: ZeRO stage. Below 3 parameters stay gathered between the steps of one accumulation, or of an evaluation,
            as long as nobody writes to one; at stage 3 a plan may keep some between the steps of one accumulation.
    """

    def __init__(self, model: ShardedModel, runtime: Any, stage: int) -> None:
        self._writes = _WriteWatch(model)
        self._runtime, self._derived = runtime, model.derived
        self._stage = stage
        self._counts: list[int] | None = None  # while gathered parameters may be used again
        self._ran = ""  # the last step

    def begin(self, name: str, stays: bool | None = None) -> None:
        """Call before the step `name`.

        Args:
            name: The step's.
            stays: Whether it uses gathered parameters; None: as this rank finds alone, which it may where ranks
                evaluate, perhaps different numbers of batches.
        """
        if stays is None:
            stays = self.may_stay(name) and not self.written()
        if not stays or self._stage == 3:
            self._derived.invalidate()  # what a step gathers itself sees all writes, also those that nothing counts
        if stays:
            self._runtime.parameters.order_gathers()  # the next ones, after writes that nothing counts
        else:
            self._runtime.parameters.invalidate()
            if self._stage < 3:
                self._derived.refresh_kept()
            self._runtime.parameters.refetch()
        self._counts = self._writes.counts() if self._stage < 3 else None
        self._ran = name

    def may_stay(self, name: str) -> bool:
        """Returns whether the step `name` may use gathered parameters, unless somebody wrote; the same on all ranks."""
        # Averaged weights are swapped in and out without counted writes, but only between training and evaluation.
        return self._counts is not None and name == self._ran

    def written(self) -> bool:
        """Returns whether writes to this rank's parameters were seen since they were gathered."""
        return self._counts != self._writes.counts()

    def after_backward(self, last: bool) -> None:
        """Call after a backward pass; `last` before the optimizer steps."""
        if self._stage == 3:  # between micro-batches, plans may keep what was gathered
            self._counts = None if last else self._writes.counts()

    def doubt(self) -> None:
        """Makes the next step gather again."""
        self._counts = None

    def forget(self) -> None:
        """Call when an optimizer has stepped, or other code may have written to parameters: copies are out of date."""
        self._counts = None
        self._derived.invalidate()
        self._runtime.parameters.invalidate()


class _WriteWatch:
    """Counts in-place writes to the parameters of a model.

    PyTorch counts them per tensor, and a parameter is several: what users hold, the local tensor inside it, and what
    graphs and optimizers read. Writes through ``parameter.data``, and by ``torch._foreach`` functions that take
    DTensors, are counted nowhere.
    """

    def __init__(self, model: ShardedModel) -> None:
        # Views of a flat buffer share one count: one tensor for each buffer is enough.
        self._tensors = [model.by_name[flat.shards[0].spec.name].leaf for flat in model.flat_layouts]
        for parameter in model.parameters:
            self._tensors += [parameter.dtensor, compat.local_of(parameter.dtensor)]

    def counts(self) -> list[int]:
        """The counts so far; equal lists mean that nothing was written in between."""
        with compat.reading_attributes():
            return [compat.version_of(tensor) for tensor in self._tensors]
