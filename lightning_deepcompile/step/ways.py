"""Decides how each parameter group of an optimizer steps: on shards, on owner ranks, or as DTensors."""

from __future__ import annotations

import enum
import inspect
import weakref
from dataclasses import dataclass

from torch import optim
from torch.optim import Optimizer

from lightning_deepcompile.ranks.exchange import exchange
from lightning_deepcompile.sharding.shards import ShardedModel

__all__ = ["Decision", "OptimizerWays", "Way", "is_elementwise", "ways_of"]


class Way(enum.Enum):
    """How a parameter group steps."""

    SHARDS = "on shards"
    """Each rank steps on its own rows, as plain tensors: right where every element is updated by itself."""

    OWNERS = "on owner ranks"
    """One rank steps on each unsharded tensor, and sends rows back: right where tensors do not affect each other."""

    DTENSORS = "as DTensors"
    """Each rank steps on DTensors, under PyTorch's rules for them: right for whatever these rules cover."""


@dataclass(frozen=True)
class Decision:
    """How a parameter group steps.

    Args:
        way: How.
        reason: Why, in words.
    """

    way: Way
    reason: str


# Each element of their parameters is updated by itself. Subclasses may do anything.
_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)

_WHOLE_TENSOR_OPTIMIZERS = frozenset(
    {"adafactor", "distributedshampoo", "galoreadamw", "lamb", "lars", "muon", "shampoo", "soap"}
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Returns whether the class is one of PyTorch's own that update every element by itself, and unchanged."""
    kind = type(optimizer)
    return kind in _ELEMENTWISE and inspect.unwrap(kind.step).__module__.startswith("torch.optim.")


def ways_of(optimizer: Optimizer) -> list[Decision]:
    """Decides how each parameter group of `optimizer` steps; the optimizer is left as it is.

    Args:
        optimizer: Before its first step, or later.

    Returns:
        One decision for each of its parameter groups.
    """
    name = type(optimizer).__name__
    decision = Decision(Way.SHARDS, f"{name} is element-wise")
    if not is_elementwise(optimizer) and name.lower() in _WHOLE_TENSOR_OPTIMIZERS:
        decision = Decision(Way.OWNERS, f"{name} needs unsharded tensors")
    return [decision] * len(optimizer.param_groups)


class OptimizerWays:
    """The ways of one optimizer's parameter groups, which all ranks agree on; decided again when groups are added.

    Args:
        optimizer: Holds the module's parameters.
        model: How they are sharded.
    """

    def __init__(self, optimizer: Optimizer, model: ShardedModel) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._ranks = model.ranks
        self._decisions: list[Decision] = []

    def decisions(self) -> list[Decision]:
        """Returns one decision for each parameter group; a collective when groups have been added."""
        optimizer = self._optimizer()
        assert optimizer is not None  # it is attached, or steps
        if len(self._decisions) != len(optimizer.param_groups):
            self._decisions = self._decide(optimizer)
        return self._decisions

    def ways(self) -> list[Way]:
        """Returns the way of each parameter group; see `decisions`."""
        return [decision.way for decision in self.decisions()]

    def _decide(self, optimizer: Optimizer) -> list[Decision]:
        if self._ranks.shards == 1:
            return [Decision(Way.SHARDS, "each rank holds all rows")] * len(optimizer.param_groups)
        mine = ways_of(optimizer)
        everybody = exchange(mine, self._ranks.group)
        return [
            Decision(Way.DTENSORS, "ranks found different ways") if len({d.way for d in found}) > 1 else found[0]
            for found in zip(*everybody, strict=True)
        ]
