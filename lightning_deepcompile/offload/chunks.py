"""Divides an optimizer's parameters into chunks that it steps one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_deepcompile.offload.leaving_states import changed_settings, settings_of
from lightning_deepcompile.plan.offload import leaving_order


class Parts(Protocol):
    """Divides an optimizer's steps.

    Attributes:
        needs_closure: Whether steps without a closure are given one, which calls `begin`; if not, `begin` comes before
            the optimizer's own step.
    """

    needs_closure: bool

    @property
    def stepping(self) -> bool:
        """True during a step: calls of `step` are then parts of it."""

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Steps all parts but the last, with the arguments of `step`, and gives the optimizer that one's groups."""

    def finish(self) -> None:
        """Ends the step; call when the last part has been stepped."""

    def restore(self) -> None:
        """Restores the optimizer's own groups."""


@dataclass
class Chunk:
    """Parameters that step together.

    Args:
        params: For each of the optimizer's groups, in its order.
        offloaded: Whether their states come from host memory, or go there.
        arrived: Of each state that was fetched: parameter, name, its host buffer, and the tensor on the device.
        shards: Of each parameter that was fetched itself: parameter, its host buffer, and the tensor on the device.
        mapped: Of each of `shards` that is in use, what the parameter was before, and will be again.
        slot: Of the runtime's buffers, the one for what is fetched while the optimizer steps; None if all is there.
        slots: All that hold some of it.
    """

    params: list[list[Tensor]]
    offloaded: bool
    arrived: list[tuple[Tensor, str, Tensor, Tensor]] = field(default_factory=list)
    shards: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    mapped: list[Tensor] = field(default_factory=list)
    slot: int | None = None
    slots: set[int] = field(default_factory=set)

    def narrow(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Copies of the optimizer's groups that hold only this chunk's parameters."""
        return [{**group, "params": list(params)} for group, params in zip(groups, self.params, strict=True)]


def make_chunks(
    groups: Sequence[dict[str, Any]],
    offloaded: Callable[[Tensor], bool],
    size_of: Callable[[int, Tensor], int],
    limit: int,
    temporaries: Callable[[int, Tensor], int] = lambda group, parameter: 0,
) -> list[Chunk]:
    """Divides the parameters; those whose states stay on the device come first: the next arrive meanwhile.

    Others come in the order in which they leave (`leaving_order`), so that most go round in small buffers.

    Args:
        groups: The optimizer's.
        offloaded: Whether a parameter's states come and go.
        size_of: Bytes of the states of a parameter of a group.
        limit: Most bytes of a chunk that has more than one parameter.
        temporaries: Bytes that a step on a parameter takes besides, by which those divide whose states stay.

    Returns:
        The chunks; none is empty.
    """
    chunks: list[Chunk] = []

    def divide(parts: Iterable[tuple[int, int, Tensor]], *, offloaded: bool) -> None:
        filled = limit + 1
        for size, index, parameter in parts:
            if filled + size > limit:
                chunks.append(Chunk([[] for _ in groups], offloaded))
                filled = 0
            chunks[-1].params[index].append(parameter)
            filled += size

    of_all = [(k, p) for k, group in enumerate(groups) for p in group["params"]]
    divide([(temporaries(k, p), k, p) for k, p in of_all if not offloaded(p)], offloaded=False)
    leaving = [(size_of(k, p), k, p) for k, p in of_all if offloaded(p)]
    divide(sorted(leaving, key=lambda one: leaving_order(one[0], limit)), offloaded=True)
    return chunks


class GroupChanges:
    """The changes that steps on chunks make to the settings of groups; each chunk must make the same ones.

    Args:
        optimizer: Holds its own groups.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = optimizer.param_groups
        self._before = [settings_of(group) for group in self.groups]
        self._changes: list[dict[str, Any] | None] = [None] * len(self.groups)

    def add(self, chunk: Chunk, narrowed: Sequence[dict[str, Any]], kind: str) -> None:
        """Records the changes that a step on `chunk` made.

        Args:
            chunk: What was stepped.
            narrowed: The groups that the optimizer held meanwhile.
            kind: The optimizer's name, for the message.

        Raises:
            RuntimeError: If it depends on which parameters were stepped.
        """
        for index, group in enumerate(narrowed):
            if not chunk.params[index]:
                continue
            changed = changed_settings(self._before[index], group)
            known = self._changes[index]
            in_place = [k for k, v in changed.items() if isinstance(v, Tensor)]
            if in_place or (known is not None and known != changed):
                names = sorted({*changed, *(known or {})})
                raise RuntimeError(
                    f"{kind} changes {names} of its parameter group {index} in a way that depends on which parameters "
                    "step together, so its states cannot be offloaded. Use CompileConfig(offload='none'), or an "
                    "element-wise optimizer."
                )
            self._changes[index] = changed

    def apply(self) -> None:
        """Applies to the optimizer's own groups the changes that one step over all parameters would have made."""
        for group, changed in zip(self.groups, self._changes, strict=True):
            group.update(changed or {})
