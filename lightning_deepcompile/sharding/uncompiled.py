"""The uncompiled path: whole parameters for code that runs as Python inside of a step, or that a hook calls.

Compiled code gathers by its program. Other code must be as correct without one: code that Dynamo or a compiler could
not take, that was compiled too often, or that a user keeps out of graphs. It reads parameters in two ways.

* A module's own ``forward`` gets plain whole tensors. The first read gathers the block that the parameter belongs to;
  two blocks stay, the one in use and the one before it. Autograd saves handles in place of whole parameters and gathers
  again. One node per block reduces its gradients when the last of them is computed. The pattern is FSDP2's.
* Other code holds the parameter itself: ``self.layer.weight`` of another module, or the results of
  ``self.parameters()``. While a step runs it is a DTensor that computes as the whole parameter does
  (`parameter_class`). Writes to it are kept: in stored precision, on this rank's rows. C functions that read it
  nevertheless leave a whole gradient on it, which is reduced before autograd sees it.

`WholeBlocks` gathers in the order of reads. `Agreement` compares ranks like any path.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_deepcompile import compat
from lightning_deepcompile.sharding.anomalies import Anomalies
from lightning_deepcompile.sharding.errors import UnsupportedStepError
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.parameter_class import parameter_class, resting_class
from lightning_deepcompile.sharding.whole_blocks import WholeBlocks


@dataclass(frozen=True)
class _Handle:
    """The object that autograd saves in place of a whole parameter, or a view of it."""

    parameter: ShardedParameter
    stored: bool
    size: Sequence[int]
    stride: Sequence[int]
    offset: int | torch.SymInt


class _Whole(torch.autograd.Function):
    """Maps the shards of a block to its whole parameters, which have been gathered already."""

    @staticmethod
    def forward(path: Uncompiled, parameters: list[ShardedParameter], whole: list[Tensor], *leaves: Tensor) -> Any:
        # Tensors of their own over the same memory: as views of one input they could not be written to.
        return tuple(compat.alias(tensor) for tensor in whole)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # A graph that the path keeps must not keep the path: nothing finds cycles through autograd's nodes.
        ctx.reduce, ctx.parameters = compat.held_weakly(inputs[0].reduce), inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, None, *ctx.reduce(ctx.parameters, grads))


class Uncompiled:
    """Gathers for code that is not compiled; one per sharded model.

    Args:
        parameters: All sharded parameters.
        blocks: Gathers them.
        outside: Called before a module is called outside of steps, which all ranks must do.

    Attributes:
        hands_out_plain: Whether all code gets plain whole tensors where it reads an attribute, for function transforms,
            which take neither subclasses nor hooks of autograd.
        anomalies: Names modules with NaNs in their gradients.
    """

    def __init__(
        self, parameters: Sequence[ShardedParameter], blocks: WholeBlocks, outside: Callable[[], object]
    ) -> None:
        self._by_tensor: dict[Tensor, ShardedParameter] = {p.dtensor: p for p in parameters}
        self.blocks, self.anomalies = blocks, Anomalies()
        self._edges: dict[ShardedParameter, list[Any]] = {}
        self._calls: list[nn.Module] = []
        self._before_outside = outside
        self.hands_out_plain = False
        self._accumulators: dict[ShardedParameter, Any] = {}  # autograd nodes, which must be kept
        self._step_class, self._idle_class = parameter_class(self), resting_class(self)
        self._current_class: type[DTensor] = DTensor
        self._thread: int | None = None  # the one that a step runs on
        self._set_class(self._idle_class)
        self._around = self._idle_class  # the class outside of `outside`

    # Around code -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_step(self, *, stored: bool = False) -> Iterator[None]:
        """Returns a context for a step, its backward pass, or a call of a module outside of both.

        Args:
            stored: Whether parameters are gathered as they are stored, not as steps compute with them.
        """
        before = self.blocks.stored, self._calls, self._thread, self._current_class
        self.blocks.stored, self._calls, self._thread = stored, [], threading.get_ident()
        self._set_class(self._step_class)
        try:
            yield
            self.blocks.settle()
        finally:
            self.blocks.stored, self._calls, self._thread, current = before
            self._set_class(current)

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Returns a context for code that a step calls and that handles parameters as shards: mainly optimizers."""
        current, around = self._current_class, self._around
        self.blocks.settle()
        self._around = current
        self._set_class(self._idle_class)
        try:
            yield
        finally:
            self._set_class(current)
            self._around = around

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Returns a context for code within `outside` that belongs to the step again: an optimizer's closure."""
        current = self._current_class
        self._set_class(self._around)
        try:
            yield
            self.blocks.settle()
        finally:
            self._set_class(current)

    def call(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a module that has parameters of its own."""
        self._calls.append(module)
        try:
            with contextlib.nullcontext() if len(self._calls) > 1 else self.saving():
                result = run(*args, **kwargs)
            if torch.is_anomaly_enabled():
                own = next(self._by_tensor[p] for p in module._parameters.values() if p in self._by_tensor)
                self.anomalies.mark(module, own.layout.spec, result)
            return result
        finally:
            self._calls.pop()

    def call_outside(
        self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a module while no step runs; see `call`."""
        if self.blocks.uneven is None:
            self._before_outside()
        self.clear()  # nothing reports changes of parameters outside of steps
        try:
            with self.in_step(stored=True):
                return self.call(module, run, args, kwargs)
        finally:
            self.clear()

    def clear(self) -> None:
        """Drops whole parameters; call when parameters may have changed, on all ranks alike."""
        self.blocks.clear()
        self._edges.clear()

    # Reading ----------------------------------------------------------------------------------------------------------

    def read(self, module: nn.Module, parameter: nn.Parameter, *, by_hand: bool = False) -> Tensor:
        """Returns the value of ``module.name``.

        Args:
            module: The module that holds the parameter.
            parameter: Its parameter.
            by_hand: Whether the module's own code treats the parameter as one, and not as a tensor to compute with.
        """
        own = bool(self._calls) and self._calls[-1] is module
        if self.is_elsewhere:
            return parameter
        if not self.hands_out_plain and (by_hand or not own):
            return parameter
        return self.value(self._by_tensor[parameter])

    def value(self, parameter: ShardedParameter, *, stored: bool | None = None) -> Tensor:
        """Returns the whole parameter, with a history if gradients are wanted.

        Args:
            parameter: The parameter.
            stored: Whether in its stored form; by default in the form that the running code computes with.
        """
        with compat.outside_transforms():
            return self._value(parameter, self.blocks.stored if stored is None else stored)

    def _value(self, parameter: ShardedParameter, stored: bool) -> Tensor:
        if not parameter.is_cast:
            stored = False  # the same, and one of them is enough
        block = self.blocks.gather(parameter, stored)
        if not (torch.is_grad_enabled() and parameter.leaf.requires_grad):
            return block.whole[parameter]
        if parameter not in block.tracked:
            members = [p for p in block.parameters if p.leaf.requires_grad]
            whole = _Whole.apply(self, members, [block.whole[p] for p in members], *[p.leaf for p in members])
            block.tracked = dict(zip(members, whole, strict=True))
            for member, tensor in block.tracked.items():
                block.versions[member] += compat.version_of(tensor)
                self._edges.setdefault(member, []).append(torch.autograd.graph.get_gradient_edge(tensor))
        return block.tracked[parameter]

    def hold(self, tensor: Tensor) -> Tensor:
        """Returns the whole parameter that users hold as `tensor`, for code that may write to it."""
        return self.blocks.hold(self._by_tensor[tensor])

    # Gradients --------------------------------------------------------------------------------------------------------

    def reduce(self, parameters: list[ShardedParameter], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns this rank's shards of the mean gradients of a block.

        Args:
            parameters: Of the block, those that require gradients.
            grads: Their whole gradients; None for those that were not used.
        """
        wanted = [(p, grad) for p, grad in zip(parameters, grads, strict=True) if grad is not None]
        if self.blocks.uneven is not None and wanted:
            raise UnsupportedStepError(
                f"A step computes gradients of parameters ({wanted[0][0].layout.spec.name!r}, ...) while other ranks "
                "have no batches left: a gradient is the mean over all ranks. Give all ranks as many batches, or "
                "switch gradients of parameters off in the step (`self.requires_grad_(False)`)."
            )
        with self.blocks.compared("reduce", [(p, grad.dtype) for p, grad in wanted]):
            shards = {
                p: grad.to(p.leaf.dtype)
                if p.ranks.world_size == 1
                else torch.ops.dc.reduce(grad, p.ds_id, p.layout.shard_shape, p.leaf.dtype)
                for p, grad in wanted
            }
        return [shards.get(parameter) for parameter in parameters]

    def differentiate(self, arguments: dict[str, Any], run: Callable[..., Any]) -> tuple[Tensor | None, ...]:
        """Runs ``torch.autograd.grad`` with parameters among its inputs: whole gradients, of this rank's data."""
        inputs = arguments["inputs"]
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        places = [self._edges.get(self._by_tensor[one], []) if self.is_ours(one) else [one] for one in inputs]
        flat = list(itertools.chain.from_iterable(places))
        if not flat:
            raise UnsupportedStepError(
                "`torch.autograd.grad` is called for parameters that compiled code has used: their gradients never "
                "leave its graphs. Put `@torch.compiler.disable` on the step, or on what computes with them."
            )
        grads = iter(run(**{**arguments, "inputs": flat, "allow_unused": True}))
        found = []
        for one, place in zip(inputs, places, strict=True):
            parts = [part for part in itertools.islice(grads, len(place)) if part is not None]
            found.append(sum(parts[1:], parts[0]) if parts else None)
            if not parts and not arguments.get("allow_unused"):
                if not arguments.get("materialize_grads"):
                    raise RuntimeError(
                        "One of the differentiated Tensors appears to not have been used in the graph. Set "
                        f"allow_unused=True if this is the desired behavior. It is of shape {tuple(one.shape)}."
                    )
                found[-1] = one.new_zeros(one.shape) if not self.is_ours(one) else torch.zeros_like(self.whole_of(one))
        return tuple(found)

    @property
    def is_idle(self) -> bool:
        """True if no step runs."""
        return self._current_class is self._idle_class

    @property
    def is_elsewhere(self) -> bool:
        """True if a step runs on another thread than this one: autograd's threads run its backward pass."""
        return not self.is_idle and threading.get_ident() != self._thread and not compat.in_backward()

    def check_thread(self, what: str) -> None:
        """Raises on another thread than the step's: a gather from there would make ranks diverge.

        Raises:
            UnsupportedStepError: Says what to do instead.
        """
        if self.is_elsewhere:
            raise UnsupportedStepError(
                f"The thread {threading.current_thread().name!r} computes with sharded parameters ({what}) while a "
                "step runs on another thread: ranks would gather in different orders. It may read their shapes, dtypes "
                "and the like at any time. Take values in a hook, by `strategy.full_parameters()` or "
                "`parameter.full_tensor()`, and give the thread those."
            )

    def is_ours(self, value: Any) -> TypeGuard[Tensor]:
        """Returns whether `value` is one of the parameters."""
        return type(value) is self._step_class

    def of(self, tensor: Tensor) -> ShardedParameter | None:
        """The parameter that users hold as `tensor`; None if it is not one of the model's."""
        return self._by_tensor.get(tensor)

    def whole_of(self, tensor: Tensor) -> Tensor:
        """The whole parameter that users hold as `tensor`, for computing."""
        return self.value(self._by_tensor[tensor])

    # Autograd ---------------------------------------------------------------------------------------------------------

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for code that computes with whole parameters: autograd saves handles of them."""
        # Under activation checkpointing nothing worth a handle is saved, and its own hooks must see everything.
        # Function transforms refuse hooks.
        no_hooks = self.hands_out_plain or compat.in_function_transform() or compat.hooks_saved_tensors()
        if not torch.is_grad_enabled() or no_hooks:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        owner = self.blocks.owner_of(tensor)
        if owner is None:
            return tensor
        return _Handle(*owner, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: Any) -> Tensor:
        if type(saved) is not _Handle:
            return saved
        whole = self.blocks.gather(saved.parameter, saved.stored).whole[saved.parameter]
        return whole.as_strided(saved.size, saved.stride, saved.offset)

    def _set_class(self, kind: type[DTensor]) -> None:
        if kind is self._current_class:
            return
        self._current_class = kind
        for tensor, parameter in self._by_tensor.items():
            if kind is self._step_class and parameter not in self._accumulators and tensor.requires_grad:
                self._watch(parameter)
            tensor.__class__ = kind

    def _watch(self, parameter: ShardedParameter) -> None:
        """Reduces whole gradients that reach the parameter itself, from C functions that took it for a plain tensor."""
        path, held_weakly = weakref.ref(self), weakref.ref(parameter)  # nothing finds cycles through autograd's nodes

        def reduce(grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...] | None:
            (grad,), alive, parameter = grads, path(), held_weakly()
            if alive is None or parameter is None or grad is None or isinstance(grad, DTensor):
                return None
            with torch.no_grad(), compat.plain_functions():
                (shard,) = alive.reduce([parameter], [grad])
                assert shard is not None
                leaf = parameter.leaf
                leaf.grad = shard if leaf.grad is None else leaf.grad + shard  # merged when the pass ends
                return (compat.with_local(cast(DTensor, parameter.dtensor), torch.zeros_like(parameter.local)),)

        with torch.enable_grad():
            node = torch.autograd.graph.get_gradient_edge(parameter.dtensor).node
        node.register_prehook(reduce)
        self._accumulators[parameter] = node
