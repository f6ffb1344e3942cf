"""Numbers that steps compute from their last value: ``self.mean = 0.9 * self.mean + 0.1 * loss.item()``.

Where the result is not a tensor, Dynamo compiles a step anew for every value of such a float. Before that ends
training it is shown an object that computes with a tensor of one element and double precision, and is as immutable as a
float; between steps the attribute is the float that it would have been.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

__all__ = ["StepNumber", "StepNumbers", "plain"]

_TRACED = 6
"""After so many steps that were compiled anew when a float had changed in the step before, stand-ins are used."""

on_host = torch.compiler.disable


def _tensor_of(value: Any, dtype: torch.dtype = torch.float64) -> Any:
    return value.tensor.to(dtype) if isinstance(value, StepNumber) else value


@dataclass(frozen=True, eq=False, repr=False)
class StepNumber:
    """Takes a float's place while a step runs. With numbers it makes numbers; among tensors it does not set the dtype.

    Args:
        tensor: One element in double precision; never written to.
    """

    tensor: Tensor

    def __neg__(self) -> StepNumber:
        return StepNumber(-self.tensor)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = [value.dtype for value in args if isinstance(value, Tensor)]
        dtype = next(
            (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex), torch.get_default_dtype()
        )
        kwargs = {name: _tensor_of(value, dtype) for name, value in (kwargs or {}).items()}
        return function(*[_tensor_of(value, dtype) for value in args], **kwargs)


def _on_tensor(compute: Callable[[Any, Any], Any], *, reverse: bool) -> Callable[[StepNumber, Any], Any]:
    """Arithmetic of two numbers, inside of the graph."""

    def method(self: StepNumber, other: Any) -> Any:
        if not isinstance(other, StepNumber | float | int | torch.SymFloat | torch.SymInt):
            return NotImplemented
        mine, others = self.tensor, _tensor_of(other)
        return StepNumber(compute(others, mine) if reverse else compute(mine, others))

    return method


def _on_float(name: str) -> Callable[..., Any]:
    """The float's own method, behind a break of the graph."""

    @on_host
    def method(self: StepNumber, *args: Any) -> Any:
        return getattr(float(self.tensor), name)(*[float(a) if isinstance(a, StepNumber) else a for a in args])

    return method


for _name in ("add", "sub", "mul", "truediv"):
    setattr(StepNumber, f"__{_name}__", _on_tensor(getattr(operator, _name), reverse=False))
    setattr(StepNumber, f"__r{_name}__", _on_tensor(getattr(operator, _name), reverse=True))
for _name in (
    "float int bool format repr str hash eq ne lt le gt ge abs round trunc floor ceil "
    "pow rpow floordiv rfloordiv mod rmod"
).split():
    setattr(StepNumber, f"__{_name}__", _on_float(f"__{_name}__"))


def plain(value: Any) -> Any:
    """`value`; a float where a number stands in for one."""
    return float(value) if type(value) is StepNumber else value


class StepNumbers:
    """Watches a LightningModule's own floats, and gives those that steps change a stand-in, once that is needed.

    Args:
        module: The module; LightningModules inside of it are watched, too.
        device: Where steps compute.
        traced: How many graphs have been traced so far.
    """

    def __init__(self, module: nn.Module, device: torch.device, traced: Callable[[], int]) -> None:
        self._modules = [child for child in module.modules() if isinstance(child, pl.LightningModule)]
        self._device, self._traced = device, traced
        self._changing: set[tuple[int, str]] = set()  # by steps, so far
        self._changed = False  # whether the last step did
        self._counts: Counter[str] = Counter()  # of steps that were compiled anew after one that did

    def run(self, name: str, step: Callable[[], Any]) -> Any:
        """Runs a step in which stand-ins are in place.

        Args:
            name: The step's.
            step: The step.

        Returns:
            What it returns, with floats.
        """
        before, traced = self._floats(), self._traced()
        stands_in = self._counts[name] >= _TRACED
        for number, attribute in self._changing & before.keys() if stands_in else ():
            value = torch.tensor(before[number, attribute], dtype=torch.float64, device="cpu")
            vars(self._modules[number])[attribute] = StepNumber(value.to(self._device, non_blocking=True))
        try:
            return _without_stand_ins(step()) if stands_in else step()
        finally:
            if stands_in:
                self._settle()
            self._counts[name] += self._changed and self._traced() > traced
            after = self._floats()
            changed = {place for place in after.keys() & before.keys() if after[place] != before[place]}
            self._changing |= changed
            self._changed = bool(changed)

    def _settle(self) -> None:
        for module in self._modules:
            attributes = vars(module)
            for name, value in attributes.items():
                attributes[name] = plain(value)

    def _floats(self) -> dict[tuple[int, str], float]:
        return {
            (number, name): value
            for number, module in enumerate(self._modules)
            for name, value in vars(module).items()
            if type(value) is float
        }


def _without_stand_ins(value: Any) -> Any:
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return plain(value)
