"""Finds out how much memory an optimizer's step takes besides its states, by letting it step on small parameters.

PyTorch's classes step on lists of tensors on GPUs, and hold a value as large as all parameters of a group meanwhile:
Adam's denominators, say. Chunk by chunk, a step holds those of one chunk.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.offload.leaving_states import put_back

_log = logging.getLogger(__name__)

_SHAPE = (6, 5)  # of a small parameter


class Temporaries(NamedTuple):
    """Bytes of values that a step makes and drops, for each element of a group's parameters.

    Args:
        each: For the elements of one parameter at a time.
        together: For the elements of all parameters of the group.
    """

    each: int = 0
    together: int = 0

    def of(self, elements: Iterable[int]) -> int:
        """Returns the bytes of a step on parameters with so many elements."""
        elements = list(elements)
        return max(self.each * max(elements, default=0), self.together * sum(elements))


def step_bytes(temporaries: Sequence[Temporaries], elements: Sequence[Sequence[int]], chunk: int) -> tuple[int, int]:
    """Returns the bytes of a step besides states: on all parameters of a group together, and chunk by chunk.

    Args:
        temporaries: Of each group.
        elements: Of each group's parameters; the groups step one after the other.
        chunk: Most bytes of the temporary values of a chunk of more than one parameter.
    """
    whole = divided = 0
    for each, sizes in zip(temporaries, elements, strict=False):
        together, largest = each.of(sizes), each.of([max(sizes, default=0)])
        whole, divided = max(whole, together), max(divided, min(together, max(chunk, largest)))
    return whole, divided


class _Made(compat.TorchDispatchMode):
    """Counts the results of operations that exist at one time and have as many elements as a small parameter."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.most = 0
        self._elements = elements
        self._there: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            given, made = list(_tensors((args, kwargs))), _tensors(result)
            new = [one for one in made if one.numel() == self._elements and all(one is not other for other in given)]
            self._there = [one for one in self._there if one() is not None] + [weakref.ref(one) for one in new]
            self.most = max(self.most, sum(t.nbytes for one in self._there if (t := one()) is not None))
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yields the tensors of an operator's arguments or results: by themselves and in lists."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple | dict):
        for one in values.values() if isinstance(values, dict) else values:
            yield from _tensors(one)


@torch.no_grad()
def probe_temporaries(optimizer: Optimizer, device: torch.device, *, lists: bool = False) -> tuple[Temporaries, ...]:
    """Lets an optimizer step on small parameters, and counts what it makes in a step that finds its states.

    Its groups, state and random numbers are what they were afterwards.

    Args:
        optimizer: One that `probe_states` accepts.
        device: Where the small parameters are.
        lists: The step is one on lists of tensors where the optimizer leaves that open, as it is on GPUs.

    Returns:
        One for each group; zeros where the optimizer does not step so.
    """
    found = []
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []), put_back(optimizer) as groups:
        for group in groups:
            settings = dict(group)
            if lists and group.get("foreach", False) is None and not group.get("fused"):
                settings.update(foreach=True, **({"capturable": False} if "capturable" in group else {}))
            try:
                found_here = [
                    _of_group(optimizer, settings, dtype, device)
                    for dtype in {parameter.dtype for parameter in group["params"]}
                ]
            except Exception as error:
                _log.debug("The temporary values of %s are not known: %s", type(optimizer).__name__, error)
                found_here = []
            found.append(Temporaries(*map(max, zip(*found_here, strict=True))))
    return tuple(found)


def _of_group(optimizer: Optimizer, settings: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Temporaries:
    # A loop over parameters still holds the values of the one before.
    two, three = (_most(optimizer, settings, dtype, device, count) for count in (2, 3))
    return Temporaries(two - (three - two), three - two)


def _most(optimizer: Optimizer, settings: dict[str, Any], dtype: torch.dtype, device: torch.device, count: int) -> int:
    """Returns the bytes that a second step on `count` small parameters makes at one time, by elements of one."""
    small = [torch.zeros(_SHAPE, dtype=dtype, device=device) for _ in range(count)]
    for one in small:
        one.grad = torch.zeros_like(one)
    optimizer.state.clear()
    optimizer.param_groups = [{**settings, "params": small}]
    made = _Made(small[0].numel())
    with compat.unhooked_step(optimizer) as step:
        step(optimizer)
        with made:
            step(optimizer)
    optimizer.state.clear()
    return made.most // small[0].numel()
