"""The classes of a model's parameters, in steps and outside of them: DTensors with a few methods of their own."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from lightning_deepcompile import compat
from lightning_deepcompile.sharding.errors import hook_refused
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.sharded_tensor import ShardedTensor

HOOKS = "accumulation_hooks"
"""Attribute of a sharded parameter: the hooks that are called when its gradient is there."""

# Questions about a parameter other than its values: the DTensor answers as it does outside of a step.
_ABOUT = frozenset(
    """size dim ndimension numel nelement stride storage_offset element_size is_floating_point is_complex is_contiguous
    requires_grad_ get_device data_ptr untyped_storage register_hook register_post_accumulate_grad_hook retain_grad
    is_same_size __hash__ __repr__ __format__ __len__ __reduce_ex__ __deepcopy__ backward""".split()
)
_AUGMENTED = frozenset("__iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __setitem__".split())
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})  # properties that are about its values


class _WholeParameters(Protocol):
    """The members of `Uncompiled` that classes of parameters use."""

    @property
    def is_idle(self) -> bool: ...
    @property
    def is_elsewhere(self) -> bool: ...
    def check_thread(self, what: str) -> None: ...
    def is_ours(self, value: Any) -> TypeGuard[Tensor]: ...
    def of(self, tensor: Tensor) -> ShardedParameter | None: ...
    def whole_of(self, tensor: Tensor) -> Tensor: ...
    def hold(self, tensor: Tensor) -> Tensor: ...
    def differentiate(self, arguments: dict[str, Any], run: Callable[..., Any]) -> tuple[Tensor | None, ...]: ...
    def saving(self) -> contextlib.AbstractContextManager[Any]: ...


def hooked_class(path: _WholeParameters, kind: type[DTensor]) -> type[DTensor]:
    """Returns a base of the classes of a model's parameters, which decides which hooks may be registered.

    Args:
        path: Has the parameters.
        kind: The class that it extends.
    """
    held_weakly = weakref.ref(path)

    class HookedParameter(kind):  # type: ignore[valid-type, misc]
        """A sharded parameter, or an alias of one."""

        __slots__ = ()

        def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
            if (parameter := self._known()) is None:
                return super().register_hook(hook)
            raise hook_refused(parameter.layout.spec.name)

        def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
            if (parameter := self._known()) is None or not self.requires_grad:
                return super().register_post_accumulate_grad_hook(hook)
            handle = RemovableHandle(parameter.hooks)
            parameter.hooks[handle.id] = hook
            return handle

        def _known(self) -> ShardedParameter | None:
            path = held_weakly()
            return None if path is None else path.of(self)

    def hooks(self: Any) -> dict[int, Callable[[Tensor], None]] | None:
        return None if (parameter := self._known()) is None else parameter.hooks

    setattr(HookedParameter, HOOKS, property(hooks))
    return HookedParameter


def resting_class(path: _WholeParameters) -> type[DTensor]:
    """Returns the class of a model's parameters while no step runs: DTensors that also take whole values.

    Args:
        path: Gathers them.
    """
    hooked: Any = hooked_class(path, ShardedTensor)

    class RestingParameter(hooked):  # type: ignore[misc]
        """A sharded parameter, or an alias of one."""

        __slots__ = ()

        def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
            # From state dicts of whole tensors; PyTorch refuses to mix the two.
            return DTensor.copy_(self, other if isinstance(other, DTensor) else self._sharded(other), non_blocking)

        def _sharded(self, whole: Tensor) -> DTensor:
            """Returns this rank's rows of `whole`, which all ranks have."""
            whole, mesh = whole.detach().to(self.device).expand(self.shape), self.device_mesh
            same = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            return same.redistribute(mesh, self.placements)

        def detach(self) -> Tensor:
            alias = super().detach()
            alias.__class__ = RestingParameter  # which ``nn.Parameter(...)`` asks for
            return alias  # type: ignore[no-any-return] # of a class that is made here

    return RestingParameter


def parameter_class(path: _WholeParameters) -> type[DTensor]:
    """Returns the class that a model's parameters have while a step runs.

    Args:
        path: Gathers them.
    """
    held_weakly = weakref.ref(path)
    hooked: Any = hooked_class(path, DTensor)

    class ParameterInStep(hooked):  # type: ignore[misc]
        """A sharded parameter as code inside of a step sees it: computes as the whole one.

        Its gradient, ``requires_grad`` and the like are the shard's, as outside of steps.
        """

        __slots__ = ()

        @classmethod
        @torch.compiler.disable
        def __torch_function__(
            cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            path = held_weakly()
            kwargs = kwargs or {}
            with compat.plain_functions():
                if path is None or path.is_idle or compat.is_tracing():  # the tracer inspects values
                    return function(*args, **kwargs)
                return _compute(path, function, args, kwargs)

    return ParameterInStep


def _compute(path: _WholeParameters, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(function, "__name__", "")
    first = args[0] if args else None
    if path.is_elsewhere and not (function.__self__.__name__ not in _VALUES if name == "__get__" else name in _ABOUT):
        path.check_thread(name)
    if name in ("__get__", "__set__", "__delete__"):
        about = function.__self__.__name__
        if about not in _VALUES or not path.is_ours(first):
            return function(*args, **kwargs)
        if about != "data":
            return function(path.whole_of(first))
        held = path.hold(first)
        if name == "__set__":
            with torch.no_grad():
                return held.copy_(args[1])
        return function(held)
    if name in _ABOUT:
        return function(*args, **kwargs)
    if function is torch.autograd.grad:
        return path.differentiate(inspect.signature(function).bind(*args, **kwargs).arguments, function)
    written = first if name.endswith("_") and not name.endswith("__") or name in _AUGMENTED else kwargs.get("out")
    if path.is_ours(written):
        whole = path.hold(written)
        args = (whole, *args[1:]) if written is first else args
        kwargs = {**kwargs, "out": whole} if written is not first else kwargs
    args, kwargs = fx.node.map_aggregate(
        (args, kwargs), lambda value: path.whole_of(value) if path.is_ours(value) else value
    )
    with path.saving():
        result = function(*args, **kwargs)
    return written if path.is_ours(written) else result
