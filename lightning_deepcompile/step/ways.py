"""Decides how each parameter group of an optimizer steps: on shards, on owner ranks, or as DTensors."""

from __future__ import annotations

import enum
import inspect
import logging
import time
import weakref
from dataclasses import dataclass

from torch import optim
from torch.optim import Optimizer

from lightning_deepcompile.ranks.exchange import exchange, raise_together
from lightning_deepcompile.sharding.shards import ShardedModel
from lightning_deepcompile.step.dtensor_steps import dtensor_problem
from lightning_deepcompile.step.probe import may_draw, probe

_log = logging.getLogger(__name__)


class Way(enum.Enum):
    """The ways in which a parameter group can step."""

    SHARDS = "on shards"
    """Each rank steps on its own rows, as plain tensors: right where every element is updated by itself."""

    OWNERS = "on owner ranks"
    """One rank steps on each unsharded tensor, and sends rows back: right where tensors do not affect each other."""

    DTENSORS = "as DTensors"
    """Each rank steps on DTensors, under PyTorch's rules for them: right for whatever these rules cover."""


@dataclass(frozen=True)
class Decision:
    """The way in which a parameter group steps.

    Args:
        way: The way.
        reason: The reason, in words.
        together: With `Way.OWNERS`: one rank owns all tensors, as they affect each other.
        draws: The optimizer's steps draw random numbers, or may do so: ranks that step on the same tensor part.
    """

    way: Way
    reason: str
    together: bool = False
    draws: bool = False


# They update each element of their parameters by itself. Subclasses may do anything.
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


def is_elementwise(optimizer: Optimizer) -> bool:
    """Returns whether the class is one of PyTorch's own that update every element by itself, and unchanged."""
    kind = type(optimizer)
    return kind in _ELEMENTWISE and inspect.unwrap(kind.step).__module__.startswith("torch.optim.")


def _inherits_steps(kind: type[Optimizer]) -> bool:
    """Returns whether a class steps by the code of one of PyTorch's element-wise ones."""
    base = next((one for one in kind.__mro__ if one in _ELEMENTWISE), None)
    if base is None:
        return False
    below = kind.__mro__[: kind.__mro__.index(base)]
    own = ((name, value) for one in below for name, value in vars(one).items() if not name.startswith("__"))
    # PyTorch wraps `step` of each class anew.
    return all(not hasattr(base, name) or _same(value, getattr(base, name)) for name, value in own)


def _same(value: object, other: object) -> bool:
    return callable(value) and callable(other) and inspect.unwrap(value) is inspect.unwrap(other)


def ways_of(optimizer: Optimizer, shards: int = 2) -> list[Decision]:
    """Finds out how an optimizer steps on each of its parameter groups.

    Args:
        optimizer: Before its first step, or later.
        shards: Number of ranks that share its parameters.

    Returns:
        One decision for each of its parameter groups.

    Raises:
        ValueError: If its steps communicate.
    """
    if _inherits_steps(type(optimizer)):
        return [Decision(Way.SHARDS, "element-wise, by PyTorch's own code")] * len(optimizer.param_groups)
    findings = probe(optimizer, shards)
    draws = any(finding.draws for finding in findings)
    if not all(finding.elementwise or finding.by_tensor for finding in findings):
        reasons = dict.fromkeys(finding.coupling[0] for finding in findings if finding.coupling)
        return [Decision(Way.DTENSORS, "; ".join(reasons), draws=draws)] * len(findings)
    return [
        Decision(Way.SHARDS, "element-wise, as its steps on small tensors show", draws=draws)
        if finding.elementwise
        else Decision(Way.OWNERS, finding.why_not[0], draws=draws)
        for finding in findings
    ]


def couples_tensors(optimizer: Optimizer) -> bool:
    """Returns whether a step on some of the parameters differs from one on all; also for one rank."""
    try:
        return any(decision.way is Way.DTENSORS for decision in ways_of(optimizer))
    except ValueError:
        return True


class OptimizerWays:
    """The ways of one optimizer's parameter groups, which all ranks agree on; decided again when groups are added.

    Args:
        optimizer: Holds the module's parameters.
        model: The sharded model.
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
            if self._ranks.group.rank() == 0:
                _log.log(logging.WARNING if self.together else logging.INFO, "Steps of %s.", self.describe())
        return self._decisions

    def ways(self) -> list[Way]:
        """Returns the way of each parameter group; see `decisions`."""
        return [decision.way for decision in self.decisions()]

    @property
    def together(self) -> bool:
        """Returns whether one rank owns all tensors."""
        return any(decision.together for decision in self.decisions())

    @property
    def draws(self) -> bool:
        """Returns whether steps draw random numbers, so that ranks that step on the same tensor part."""
        return any(decision.draws for decision in self.decisions())

    def describe(self) -> str:
        """Returns how the optimizer steps and why, in one line."""
        optimizer = self._optimizer()
        if optimizer is None:
            return ""
        places: dict[Decision, list[int]] = {}
        for index, decision in enumerate(self._decisions):
            places.setdefault(decision, []).append(index)
        texts = [f"{decision.way.value} ({decision.reason})" for decision in places]
        if len(texts) > 1:
            numbers = (", ".join(map(str, indices)) for indices in places.values())
            texts = [f"groups {those} {text}" for those, text in zip(numbers, texts, strict=True)]
        return f"{type(optimizer).__name__} {'; '.join(texts)}"

    def _decide(self, optimizer: Optimizer) -> list[Decision]:
        if self._ranks.shards == 1:
            draws = not _inherits_steps(type(optimizer)) and self._ranks.replicas > 1 and may_draw(optimizer)
            draws = any(exchange(draws, self._ranks.group))
            return [Decision(Way.SHARDS, "each rank holds all rows", draws=draws)] * len(optimizer.param_groups)
        began = time.perf_counter()
        with raise_together(f"Probing how {type(optimizer).__name__} steps", self._ranks.group):
            mine = ways_of(optimizer, self._ranks.shards)
        seconds = time.perf_counter() - began
        if seconds > 1:
            _log.info("Probing how %s steps took %.1f s.", type(optimizer).__name__, seconds)
        everybody = exchange(mine, self._ranks.group)
        decisions = everybody[0]
        if any([d.way for d in one] != [d.way for d in decisions] for one in everybody):
            decisions = [Decision(Way.DTENSORS, "ranks found different ways", draws=True)] * len(mine)
        if any(decision.way is Way.DTENSORS for decision in decisions):
            reason = decisions[0].reason
            problem = dtensor_problem(optimizer, self._ranks)
            if problem:
                why = f"{reason}; on DTensors {problem}; so the first of {self._ranks.shards} ranks steps on all"
                decisions = [Decision(Way.OWNERS, why, together=True, draws=decisions[0].draws)] * len(mine)
        return decisions
