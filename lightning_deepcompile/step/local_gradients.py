"""Finds this rank's part of the gradients of many parameters, with little host time."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_deepcompile import compat
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.shards import ShardedModel


@dataclass(eq=False)
class Found:
    """Parameters and their gradients, one after the other.

    Args:
        parameters: The module's.
        sharded: The sharded parameter of each; None for those that are not sharded.
        gradients: This rank's rows; None without a gradient.
        are_own: Whether the gradients of all sharded parameters are in the memory that programs write.
    """

    parameters: list[Tensor]
    sharded: list[ShardedParameter | None]
    gradients: list[Tensor | None]
    are_own: bool

    @property
    def places(self) -> list[Any]:
        """The addresses of the gradients, with their layout unless the parameter determines it."""
        return [
            None if gradient is None
            else gradient.data_ptr() if one is not None
            else (gradient.data_ptr(), gradient.dtype, gradient.stride())
            for one, gradient in zip(self.sharded, self.gradients, strict=True)
        ]  # fmt: skip


class LocalGradients:
    """Finds gradients, of the same parameters in most steps."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._parameters: list[Tensor] = []
        self._sharded: list[ShardedParameter | None] = []

    @torch.no_grad()
    def of(self, parameters: Iterable[Tensor]) -> Found:
        """Returns the gradients of `parameters`, the module's, as `GradientSession.local_grad` gives them."""
        parameters = list(parameters)
        if len(parameters) != len(self._parameters) or not all(map(operator.is_, parameters, self._parameters)):
            self._parameters = parameters
            self._sharded = [self._model.by_parameter.get(parameter) for parameter in parameters]
        with compat.reading_attributes():
            present = [parameter.grad for parameter in parameters]
        gradients: list[Tensor | None] = []
        are_own = True
        for gradient, one in zip(present, self._sharded, strict=True):
            if one is not None and gradient is not None:
                if gradient is one.grad_dtensor:
                    gradient = one.grad_local
                else:
                    gradient, are_own = one.rows(gradient), False
            gradients.append(gradient)
        return Found(parameters, self._sharded, gradients, are_own)
