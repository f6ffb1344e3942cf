"""Deferred initialisation: modules on the meta device get memory and values block by block, right before sharding.

No rank ever holds more than one block of whole parameters. Values come from the same sources as without deferral: each
module's ``reset_parameters``, and, in models like Hugging Face's, ``_init_weights(module)`` of the model around it.
Memory is filled with a mark first, which reveals tensors that a module's initialisation misses. Parameters whose values
are read from a file are skipped: no rank allocates them whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor, nn

from lightning_deepcompile import compat

_RESETS = ("reset_parameters", "_reset_parameters")


def has_meta_tensors(module: nn.Module, given: Set[Tensor] = frozenset()) -> bool:
    """Returns whether `module`, without its children, has tensors on the meta device but those that are `given`."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(t is not None and t.is_meta and t not in given for t in tensors)


class Materializer:
    """Initialises modules of one model.

    Args:
        root: The model.
        device: The device of the tensors.
        given: Parameters that get their values from elsewhere.
    """

    def __init__(self, root: nn.Module, device: torch.device, given: Set[Tensor] = frozenset()) -> None:
        self._device, self._given = device, given
        # Order of initialisation: children before their parents, as constructors run.
        self._order: dict[nn.Module, tuple[int, str]] = {}
        self._initializers: dict[nn.Module, Any] = {}
        self._visit(root, "", None)

    def _visit(self, module: nn.Module, path: str, initializer: nn.Module | None) -> None:
        if module in self._order:
            return
        initializer = module if callable(getattr(module, "_init_weights", None)) else initializer
        if initializer is not None:
            self._initializers[module] = initializer
        for name, child in module.named_children():
            self._visit(child, f"{path}.{name}" if path else name, initializer)
        self._order[module] = len(self._order), path

    @torch.no_grad()
    def materialize(self, modules: Iterable[nn.Module]) -> None:
        """Gives the tensors of `modules` (without their children) memory and initial values; others are left alone.

        Raises:
            ValueError: For a module that nothing initialises; names it and the tensor.
        """
        chosen = sorted({m for m in modules if has_meta_tensors(m, self._given)}, key=self._order.__getitem__)
        for module in chosen:
            self._initialize(module)

    def _initialize(self, module: nn.Module) -> None:
        # A tensor that has its value already (a tied parameter, sharded with its first owner; a buffer that was read
        # from a file) must keep it; one that will get it later stays without memory.
        finished = {
            n: p for n, p in module._parameters.items() if p is not None and (not p.is_meta or p in self._given)
        }
        read = {name: b for name, b in module._buffers.items() if b is not None and not b.is_meta}
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in self._given:
                module._parameters[name] = self._allocate(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                empty = torch.empty_like(buffer, device=self._device)
                module._buffers[name] = empty.copy_(buffer) if name in read else _marked(empty)
        for reset in _RESETS:
            if callable(getattr(module, reset, None)):
                getattr(module, reset)()
                break
        if module in self._initializers:
            self._initializers[module]._init_weights(module)
        module._parameters.update(finished)
        module._buffers.update(read)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in finished and name not in read and _has_mark(tensor):
                path = self._order[module][1]
                raise ValueError(
                    "The model was built on the meta device (`empty_init=True`), and nothing initialises "
                    f"{f'{path}.{name}' if path else name!r} of {type(module).__name__}. Give that module a method "
                    "`reset_parameters()`, or build the model without `empty_init`."
                )

    def _allocate(self, parameter: nn.Parameter) -> nn.Parameter:
        memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
        allocated = nn.Parameter(_marked(memory), requires_grad=parameter.requires_grad)
        allocated.__dict__.update(parameter.__dict__)
        return allocated


def _marked(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return tensor.zero_()
    floating = tensor.is_floating_point() or tensor.is_complex()
    return tensor.fill_(float("nan") if floating else torch.iinfo(tensor.dtype).max)


def _has_mark(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype == torch.bool or isinstance(tensor, compat.FakeTensor):
        return False
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # Its minimum: it is NaN if any element is, and unlike a comparison needs no memory of the tensor's size.
    if tensor.is_floating_point():
        return bool(tensor.amin().isnan())
    return bool(tensor.amax() == torch.iinfo(tensor.dtype).max)
