"""Tensors that consist of other tensors, such as states that are quantised: codes, scales and a table.

PyTorch's protocol for them is ``__tensor_flatten__`` and ``__tensor_unflatten__``. Few of such classes implement more
operators than their optimizer needs. So they are copied, sent and compared as their plain parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_deepcompile import compat


def is_composite(value: Any) -> bool:
    """Returns whether `value` is a tensor that consists of others; a DTensor is not: it is distributed."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and hasattr(value, "__tensor_flatten__")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors that one consists of, in order: rows of a DTensor, codes and scales of a quantised one.

    Args:
        tensor: Any; a plain one is its own only part.
    """
    if isinstance(tensor, DTensor):
        return parts_of(compat.local_of(tensor))
    if not is_composite(tensor):
        return [tensor]
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def unpacked(tensor: Tensor) -> Tensor:
    """Returns the values of a tensor as plain numbers; a plain one itself."""
    if not is_composite(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def copied(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Returns a copy on `device`, of the same form; it shares no memory with `tensor`."""
    return Form.of(tensor).build(iter([part.detach().to(device, copy=True) for part in parts_of(tensor)]))


@dataclass(frozen=True)
class Form:
    """Everything about a tensor but its values; ranks can send it.

    Args:
        shape: The tensor's.
        dtype: Likewise.
        kind: The class of one that consists of others; None for a plain one.
        stride: Likewise.
        context: What the class needs besides its parts.
        members: The parts, by their names.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Any = None
    stride: tuple[int, ...] = ()
    context: Any = None
    members: tuple[tuple[str, Form], ...] = ()

    @staticmethod
    def of(tensor: Tensor) -> Form:
        """Returns the form of `tensor`."""
        if not is_composite(tensor):
            return Form(tuple(tensor.shape), tensor.dtype)
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        members = tuple((name, Form.of(getattr(tensor, name))) for name in names)
        return Form(tuple(tensor.shape), tensor.dtype, type(tensor), tuple(tensor.stride()), context, members)

    def parts(self) -> list[Form]:
        """Returns the forms of the plain parts, in the order of `parts_of`."""
        return [part for _, member in self.members for part in member.parts()] if self.kind is not None else [self]

    def build(self, parts: Iterator[Tensor]) -> Tensor:
        """Returns a tensor of this form.

        Args:
            parts: Its plain parts, in order.
        """
        if self.kind is None:
            return next(parts)
        members = {name: member.build(parts) for name, member in self.members}
        made: Tensor = self.kind.__tensor_unflatten__(members, self.context, self.shape, self.stride)
        return made
