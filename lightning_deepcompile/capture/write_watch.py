"""Notices that somebody wrote to parameters, so that what was gathered of them is out of date."""

from __future__ import annotations

from lightning_deepcompile.capture.sharding import ShardedModel, ShardedParameter

__all__ = ["WriteWatch", "writes_to"]


class WriteWatch:
    """Counts in-place writes to the parameters of a model.

    PyTorch counts them per tensor, and a parameter is several: what users hold, the local tensor inside it, and what
    graphs and optimizers read. Writes through ``parameter.data``, and by ``torch._foreach`` functions that take
    DTensors, are counted nowhere.

    Args:
        model: The sharded model.
    """

    def __init__(self, model: ShardedModel) -> None:
        # Views of a flat buffer share one count: a tensor for each buffer will do.
        self._tensors = [model.by_name[chunk.shards[0].spec.name].leaf for chunk in model.chunks]
        for parameter in model.parameters:
            self._tensors += [parameter.dtensor, parameter.dtensor._local_tensor]

    def counts(self) -> list[int]:
        """The counts so far; equal lists mean that nothing was written in between."""
        return [tensor._version for tensor in self._tensors]


def writes_to(parameter: ShardedParameter) -> list[int]:
    """The counts of one parameter, and of writes to others in its flat buffer."""
    return [tensor._version for tensor in (parameter.leaf, parameter.dtensor, parameter.dtensor._local_tensor)]
