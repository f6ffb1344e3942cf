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

Everything here follows from the order in which code reads parameters, never from when memory happens to be freed, so
that ranks that run the same code gather alike. `Agreement` compares them like any path.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from lightning_deepcompile import compat
from lightning_deepcompile.program.program import LOCAL_ID
from lightning_deepcompile.sharding.errors import UnsupportedStepError
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.parameter_class import parameter_class, resting_class

__all__ = ["Uncompiled"]

_RESIDENT = 2
"""Blocks that stay whole: the one in use, and the one before it, which a backward pass begins with."""


@dataclass(eq=False)
class _Block:
    """Parameters that are gathered together, each in a dtype, and their whole forms.

    Args:
        parameters: In registration order.
        dtypes: In which they are gathered.
        whole: Each parameter, plain, without history.
        tracked: The same memory, with gradients that go to the shards; made when first read with gradients on.
    """

    parameters: list[ShardedParameter]
    dtypes: list[torch.dtype]
    whole: dict[ShardedParameter, Tensor] = field(default_factory=dict)
    tracked: dict[ShardedParameter, Tensor] = field(default_factory=dict)
    versions: dict[ShardedParameter, int] = field(default_factory=dict)


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
        stays: Whether parameters stay whole until they change (stages 1 and 2).
        compare: Called with the communication to come: ``"gather"`` or ``"reduce"``, and parameters by local id
            with the dtypes of their gathered forms, or of their gradients. A function that it returns is called
            afterwards.
        written: Called when code wrote to parameters: programs' gathered copies are out of date.
        noticed: Called when code that is not compiled gathers a block for the first time.
        outside: Called before a module is called outside of steps, which all ranks must do.

    Attributes:
        hands_out_plain: Whether all code gets plain whole tensors where it reads an attribute, for function transforms,
            which take neither subclasses nor hooks of autograd.
        gathered: The number of blocks gathered so far.
        uneven: Called with the number of a block before it is gathered, while ranks gather at their own pace: it
            returns when all ranks gather that block. None: ranks run the same code, and gather alike.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        *,
        stays: bool = False,
        compare: Callable[[str, Sequence[tuple[int, str]]], Callable[[], None] | None] | None = None,
        written: Callable[[], None] | None = None,
        noticed: Callable[[], None] | None = None,
        outside: Callable[[], object] | None = None,
    ) -> None:
        self._by_tensor: dict[Tensor, ShardedParameter] = {p.dtensor: p for p in parameters}
        blocks: dict[str, list[ShardedParameter]] = {}
        for parameter in parameters:
            blocks.setdefault(parameter.layout.spec.block, []).append(parameter)
        self._members = {parameter: members for members in blocks.values() for parameter in members}
        self._stays = stays
        self._resident: dict[tuple[ShardedParameter, bool], _Block] = {}  # by their first parameters; oldest first
        self._owners: dict[torch.UntypedStorage, tuple[ShardedParameter, bool]] = {}
        self._held: dict[ShardedParameter, Tensor] = {}  # whole, as stored: code may write to them until the step ends
        self._edges: dict[ShardedParameter, list[Any]] = {}
        self._calls: list[nn.Module] = []
        self._stored = False  # outside of steps parameters are gathered as they are stored
        self._compare, self._written, self._tell, self._before_outside = compare, written, noticed, outside
        self.gathered = 0
        self.uneven: Callable[[int], None] | None = None
        self._noticed: set[ShardedParameter] = set()
        self.hands_out_plain = False
        self._accumulators: dict[ShardedParameter, Any] = {}  # autograd nodes, which must be kept
        self._step_class, self._idle_class = parameter_class(self), resting_class(self)
        self._current_class: type[DTensor] = DTensor
        self._thread: int | None = None  # the one that a step runs on
        self._differentiated = ""  # the module whose backward pass began last, during anomaly detection
        self._set_class(self._idle_class)
        self._around = self._idle_class  # the class outside of `outside`

    # Around code -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_step(self, *, stored: bool = False) -> Iterator[None]:
        """Returns a context for a step, its backward pass, or a call of a module outside of both.

        Args:
            stored: Whether parameters are gathered as they are stored, not as steps compute with them.
        """
        before = self._stored, self._calls, self._thread, self._current_class
        self._stored, self._calls, self._thread = stored, [], threading.get_ident()
        self._set_class(self._step_class)
        try:
            yield
            self.settle()
        finally:
            self._stored, self._calls, self._thread, current = before
            self._set_class(current)

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Returns a context for code that a step calls and that handles parameters as shards: mainly optimizers."""
        current, around = self._current_class, self._around
        self.settle()
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
            self.settle()
        finally:
            self._set_class(current)

    def call(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a module that has parameters of its own.

        Args:
            module: The module.
            run: The function that its call runs.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        self._calls.append(module)
        try:
            with contextlib.nullcontext() if len(self._calls) > 1 else self.saving():
                result = run(*args, **kwargs)
            if torch.is_anomaly_enabled():
                self._mark(module, result)
            return result
        finally:
            self._calls.pop()

    def _mark(self, module: nn.Module, result: Any) -> None:
        """Registers hooks by which a backward pass records that it has reached the end of `module`."""
        spec = next(self._by_tensor[p].layout.spec for p in module._parameters.values() if p in self._by_tensor)
        label = f"{spec.name.rpartition('.')[0]!r} ({type(module).__name__}, in the block {spec.block!r})"
        held_weakly = weakref.ref(self)

        def differentiate(_: Any) -> None:
            if (path := held_weakly()) is not None:
                path._differentiated = label

        def mark(tensor: Any) -> Any:
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(differentiate)
            return tensor

        fx.node.map_aggregate(result, mark)

    def anomaly_error(self, error: BaseException) -> BaseException | None:
        """Returns the error for an anomaly that PyTorch found in a backward pass; None for any other error.

        Args:
            error: The error that the pass raised.
        """
        label, self._differentiated = self._differentiated, ""
        if not (isinstance(error, RuntimeError) and torch.is_anomaly_enabled() and "returned nan values" in str(error)):
            return None
        rank, near = (dist.get_rank() if dist.is_initialized() else 0), ""
        if label:
            near = f" It belongs to the module {label}, or to what comes between that module and those before it."
        return RuntimeError(
            f"A gradient became NaN on rank {rank} (`detect_anomaly`): {error}{near} The warning above shows the "
            "line that called the operation in the forward pass."
        )

    def call_outside(
        self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a module while no step runs; see `call`."""
        if self._before_outside is not None and self.uneven is None:
            self._before_outside()
        self.clear()  # nothing reports changes of parameters outside of steps
        try:
            with self.in_step(stored=True):
                return self.call(module, run, args, kwargs)
        finally:
            self.clear()

    def clear(self) -> None:
        """Drops whole parameters; call when parameters may have changed, on all ranks alike."""
        self._resident.clear()
        self._owners.clear()
        self._held.clear()
        self._edges.clear()

    def settle(self) -> None:
        """Copies what code wrote to whole parameters to this rank's rows."""
        wrote = self._keep_held(self._held)
        for block in self._resident.values():
            wrote |= self._keep_writes(block)
        if wrote and self._written is not None:
            self._written()

    def _keep_held(self, parameters: Iterable[ShardedParameter]) -> bool:
        held = [parameter for parameter in parameters if parameter in self._held]
        with torch.no_grad():
            for parameter in held:
                # Without a count of the write: graphs under way gather again, as PyTorch's would read the new values.
                parameter.local.data.copy_(parameter.rows(self._held[parameter]))
        return bool(held)

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
            return self._value(parameter, self._stored if stored is None else stored)

    def _value(self, parameter: ShardedParameter, stored: bool) -> Tensor:
        if not parameter.is_cast:
            stored = False  # the same, and one of them is enough
        block = self._gather(parameter, stored)
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
        """Returns the whole parameter in its stored form, for code that may write to it; valid until the step ends.

        Args:
            tensor: The parameter as users hold it.
        """
        parameter = self._by_tensor[tensor]
        same = not parameter.is_cast
        if parameter not in self._held:
            with compat.outside_transforms():
                self._held[parameter] = self._gather(parameter, stored=not same).whole[parameter]
        if not same:  # the form for computing would not show the writes
            self._evict((self._members[parameter][0], False))
        return self._held[parameter]

    def _gather(self, parameter: ShardedParameter, stored: bool) -> _Block:
        members = self._members[parameter]
        key = (members[0], stored)
        block = self._resident.pop(key, None)
        if block is None:
            while len(self._resident) >= _RESIDENT and not self._stays:
                self._evict(next(iter(self._resident)))
            if self._keep_held(members) and self._written is not None:
                self._written()
            if self.uneven is not None:
                self.uneven(_number(members, stored))
            else:
                self._notice(members[0])
            block = self._gather_block(members, stored)
            self.gathered += 1
        self._resident[key] = block  # the newest
        return block

    def take_part(self, number: int) -> None:
        """Gathers a block that another rank needs.

        Args:
            number: The argument of `uneven` on that rank.
        """
        members = next(m for m in self._members.values() if _number(m, False) == number & ~1)
        stored = bool(number & 1)
        with torch.no_grad(), compat.below_autograd():
            for parameter in members:
                dtype = parameter.leaf.dtype if stored else parameter.info.dtype
                if not _is_there(parameter, dtype):
                    _gather(parameter, dtype)

    def _notice(self, first: ShardedParameter) -> None:
        if self._tell is not None and not self._stored and first not in self._noticed:
            self._noticed.add(first)
            self._tell()

    def _gather_block(self, members: list[ShardedParameter], stored: bool) -> _Block:
        dtypes = [p.leaf.dtype if stored else p.info.dtype for p in members]
        block = _Block(members, dtypes)
        there: dict[ShardedParameter, Tensor] = {}
        absent: list[tuple[ShardedParameter, torch.dtype]] = []
        for parameter, dtype in zip(members, dtypes, strict=True):
            held = self._held.get(parameter)
            if held is not None and held.dtype == dtype:
                there[parameter] = held
            elif _is_there(parameter, dtype):
                there[parameter] = compat.alias(parameter.leaf)
            # At their own pace, other ranks do not know that this one has it.
            if not _is_there(parameter, dtype) and (parameter not in there or self.uneven is not None):
                absent.append((parameter, dtype))
        with self._compared("gather", absent), torch.no_grad(), compat.below_autograd():
            for parameter, dtype in absent:
                whole = _gather(parameter, dtype)
                if parameter not in there:
                    there[parameter] = whole
                    self._owners[whole.untyped_storage()] = (parameter, stored)
        for parameter in members:
            block.whole[parameter] = there[parameter]
            block.versions[parameter] = compat.version_of(there[parameter])
        return block

    @contextlib.contextmanager
    def _compared(self, kind: str, parameters: Iterable[tuple[ShardedParameter, torch.dtype]]) -> Iterator[None]:
        """Compares communication with other ranks' around the body."""
        behind = None
        if self._compare is not None and self.uneven is None:
            lines = [(p.ds_id & LOCAL_ID, str(dtype).removeprefix("torch.")) for p, dtype in parameters]
            behind = self._compare(kind, lines)
        yield
        if behind is not None:
            behind()

    def _evict(self, key: tuple[ShardedParameter, bool]) -> None:
        block = self._resident.get(key)
        if block is None:
            return
        if self._keep_writes(block) and self._written is not None:
            self._written()
        del self._resident[key]
        for whole in block.whole.values():
            self._owners.pop(whole.untyped_storage(), None)

    def _keep_writes(self, block: _Block) -> bool:
        """Keeps in-place writes of a module's own code to its parameters, which PyTorch's counts reveal."""
        wrote = False
        for parameter, whole in block.whole.items():
            tracked = block.tracked.get(parameter)
            version = compat.version_of(whole) + (0 if tracked is None else compat.version_of(tracked))
            if version == block.versions[parameter]:
                continue
            block.versions[parameter] = version
            if parameter in self._held:
                continue
            wrote = True
            with torch.no_grad():
                rows, local = parameter.rows(whole), parameter.local
                # Elements that did not change keep their stored precision.
                local.data.copy_(torch.where(rows == local.to(rows.dtype), local, rows.to(local.dtype)))
        return wrote

    # Gradients --------------------------------------------------------------------------------------------------------

    def reduce(self, parameters: list[ShardedParameter], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns this rank's shards of the mean gradients of a block.

        Args:
            parameters: Of the block, those that require gradients.
            grads: Their whole gradients; None for those that were not used.
        """
        wanted = [(p, grad) for p, grad in zip(parameters, grads, strict=True) if grad is not None]
        if self.uneven is not None and wanted:
            raise UnsupportedStepError(
                f"A step computes gradients of parameters ({wanted[0][0].layout.spec.name!r}, ...) while other ranks "
                "have no batches left: a gradient is the mean over all ranks. Give all ranks as many batches, or "
                "switch gradients of parameters off in the step (`self.requires_grad_(False)`)."
            )
        with self._compared("reduce", [(p, grad.dtype) for p, grad in wanted]):
            shards = {
                p: grad.to(p.leaf.dtype)
                if p.ranks.world_size == 1
                else torch.ops.dc.reduce(grad, p.ds_id, p.layout.shard_shape, p.leaf.dtype)
                for p, grad in wanted
            }
        return [shards.get(parameter) for parameter in parameters]

    def differentiate(self, arguments: dict[str, Any], run: Callable[..., Any]) -> tuple[Tensor | None, ...]:
        """Runs ``torch.autograd.grad`` with parameters among its inputs: whole gradients, of this rank's data.

        Args:
            arguments: Those of ``torch.autograd.grad``.
            run: The function itself.
        """
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

        Args:
            what: A description of what is computed.

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
        owner = self._owners.get(storage) if (storage := compat.storage_of(tensor)) is not None else None
        if owner is None:
            return tensor
        return _Handle(*owner, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: Any) -> Tensor:
        if type(saved) is not _Handle:
            return saved
        whole = self._gather(saved.parameter, saved.stored).whole[saved.parameter]
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


def _number(members: Sequence[ShardedParameter], stored: bool) -> int:
    """Number of a block, stored or as steps compute with it; never 0, and the same on all ranks."""
    return (members[0].ds_id & LOCAL_ID) + 1 << 1 | stored


def _is_there(parameter: ShardedParameter, dtype: torch.dtype) -> bool:
    """Returns whether there is nothing to gather, and nothing to release."""
    return parameter.is_whole and dtype == parameter.leaf.dtype


def _gather(parameter: ShardedParameter, dtype: torch.dtype) -> Tensor:
    whole: Tensor = torch.ops.dc.gather(parameter.leaf, parameter.ds_id, parameter.layout.spec.shape, dtype)
    return whole


for _function in (_Whole.forward, _Whole.setup_context, _Whole.backward):
    compat.never_a_frame(_function)
compat.never_frames(Uncompiled)
