"""Autograd and tensors: modes, hooks, function transforms, memory, and counts of writes.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TorchDispatchMode",
    "NO_TORCH_FUNCTION",
    "after_backward",
    "assert_on_device",
    "is_accumulated",
    "is_profiling",
    "is_view",
    "keeps_graph",
    "name_of_operator",
    "stand_in",
    "version_of",
    "alias",
    "below_autograd",
    "has_hooks",
    "hooks_saved_tensors",
    "in_backward",
    "in_function_transform",
    "unrecorded",
    "outside_transforms",
    "plain_functions",
    "storage_of",
    "storage_uses",
    "take_accumulation_hooks",
    "written_by",
]


def alias(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same memory that is no view and has its own count of writes."""
    with torch.no_grad():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None where it has none of its own, as inside of a function transform."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or type(tensor) not in (Tensor, nn.Parameter):
        return None
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def storage_uses(tensor: Tensor) -> int:
    """The number of tensors that share the memory of `tensor`, itself included; temporary Python objects count, too."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def is_profiling() -> bool:
    """Returns whether a profiler of PyTorch is on, ``emit_nvtx`` included."""
    return torch.autograd._profiler_enabled()


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Hides work that is started inside from profilers.

    For asynchronous collectives of ``torch.distributed``: the record of one ends on the thread that finishes it, and
    writes into the profile even where that was taken, and freed, in the meantime (seen to crash with gloo in 2.13.0).
    """
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


def keeps_graph() -> bool:
    """Returns whether the backward pass under way keeps its graph for another one (``retain_graph=True``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def in_backward() -> bool:
    """Returns whether this thread runs a backward pass of autograd."""
    return torch._C._current_graph_task_id() != -1


def hooks_saved_tensors() -> bool:
    """Returns whether hooks for saved tensors are on, either of activation checkpointing or a user's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def in_function_transform() -> bool:
    """Returns whether the code runs inside of ``torch.func.grad``, ``vmap`` or the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Returns a context outside of ``torch.func.grad``, ``vmap`` and the like, though their code runs."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack() if in_function_transform() else contextlib.nullcontext()


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which operators run without autograd and without the Python derivatives of custom ones.

    ``torch.no_grad()`` still runs those, which costs some 70 us for each call.
    """
    return torch._C._AutoDispatchBelowAutograd()


def plain_functions() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which functions treat tensor subclasses as if they had no ``__torch_function__``."""
    return torch._C.DisableTorchFunctionSubclass()


def is_accumulated(leaf: Tensor) -> bool:
    """Returns whether the backward pass under way adds to the gradient of `leaf`, if its nodes give it one."""
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    return torch._C._will_engine_execute_node(node)


def after_backward(call: Callable[[], None]) -> None:
    """Schedules `call` for the time when the backward pass under way has set all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def has_hooks(tensor: Tensor) -> bool:
    """Returns whether a hook is registered for the gradient of a tensor (``register_hook``)."""
    return bool(tensor._backward_hooks)


def take_accumulation_hooks(tensor: Tensor) -> dict[int, Callable[[Tensor], None]] | None:
    """Takes the hooks of ``register_post_accumulate_grad_hook`` from autograd; handles go on removing them.

    Args:
        tensor: A leaf.

    Returns:
        The hooks, by the numbers of their handles; None if there are none.
    """
    hooks: Any = getattr(tensor, "_post_accumulate_grad_hooks", None)
    if hooks:
        tensor._post_accumulate_grad_hooks = OrderedDict()  # type: ignore[attr-defined] # None would leave them
    return hooks or None


def name_of_operator(function: Any) -> str:
    """Name of an operator (``OpOverload``), without its overload."""
    return function._schema.name.partition("::")[2]


def written_by(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call of an operator (``OpOverload``) writes to, those in lists included."""
    found: list[Tensor] = []
    for place, name in _written(function):
        value = args[place] if place < len(args) else kwargs.get(name)
        found += value if isinstance(value, list | tuple) else [] if value is None else [value]
    return found


@functools.cache
def _written(function: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(function._schema.arguments)
    return tuple(
        (place, one.name) for place, one in arguments if one.alias_info is not None and one.alias_info.is_write
    )


@functools.cache
def is_view(function: Any) -> bool:
    """Returns whether an operator (``OpOverload``) returns views of its first argument, and writes to nothing."""
    first, returns = next(iter(function._schema.arguments), None), function._schema.returns
    return not _written(function) and bool(returns) and None not in (first and first.alias_info, returns[0].alias_info)


def version_of(tensor: Tensor) -> int:
    """The number of writes to the memory of `tensor` that PyTorch has seen."""
    return tensor._version


def stand_in(kind: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a tensor of a subclass with a ``__torch_dispatch__`` that has this shape, and no memory."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def assert_on_device(fits: Tensor, text: str) -> None:
    """Ends the program with `text` unless the 0-dim `fits` is true; the host does not wait for it."""
    torch._assert_async(fits, text)


NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""What a subclass's ``__torch_function__`` is if functions treat it as they treat tensors."""
