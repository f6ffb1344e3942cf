"""Reads ``module.weight`` of a sharded module: a gather while a step or the module itself runs, otherwise the shard.

The owning module's class is replaced by a subclass with one property per sharded parameter. Dynamo inlines the
property, so the graph shows ``dc.gather(shard, ...)`` where the parameter was read, without graph breaks, hooks or
patches. `state_dict`, `named_parameters` and checkpoints read ``_parameters`` and keep their keys. The idea comes from
SimpleFSDP.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import types
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_deepcompile import compat
from lightning_deepcompile.sharding.mentions import mentions
from lightning_deepcompile.sharding.uncompiled import Uncompiled

# A parameter's leaf and its number are separate attributes of the module: Dynamo turns every container on the way to a
# value, and every value in it, into inputs and guards. The number is a text: integers of modules are inputs of a
# compiled step (`compat.step_settings`), and symbols once another training has had other ones.
_LEAF, _ID = "_dc_leaf_{}", "_dc_id_{}"
_STATE = "_dc_step_state"
_RNN_WEIGHTS = "_flat_weights"
_NO_EXPORT = (
    "torch.export met a sharded module. Export inside of `with trainer.strategy.full_parameters():`, or export a "
    "module that was loaded from a checkpoint."
)
_BY_HAND = frozenset({"data", "grad", "is_leaf", "requires_grad"})
"""Attributes that make code treat its parameters as such, and not as tensors to compute with."""


class StepState:
    """Determines the meaning of reading a parameter in eager code; shared by all modules of one strategy.

    Attributes:
        path: Gathers for code that is not compiled; None while no code may gather.
        whole: True while whole parameters are in place of the shards: nothing is gathered.
        keeper: The object that runs the modules, kept alive by them; None if its maker keeps it.
        twins: The pickled forms of parameters.
    """

    __slots__ = ("keeper", "path", "twins", "whole")

    def __init__(self) -> None:
        self.keeper: Any = None
        self.path: Uncompiled | None = None
        self.whole = False
        self.twins: MutableMapping[Tensor, nn.Parameter] = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return StepState, ()  # in another process nothing runs the modules

    @contextlib.contextmanager
    def holding_whole(self) -> Iterator[None]:
        """Returns a context in which whole parameters are in place of the shards; may be nested."""
        before, self.whole = self.whole, True
        try:
            yield
        finally:
            self.whole = before


def _parameter_property(name: str, size: tuple[int, ...], dtype: torch.dtype, by_hand: bool) -> property:
    leaf_name, id_name = _LEAF.format(name), _ID.format(name)
    # The tracer resolves each name when it traces. This function is True only for the tracer: other threads that read
    # parameters while this one compiles, and code that a compiler runs, read as usual.
    is_traced, parameter = torch.compiler.is_dynamo_compiling, torch.ops.dc.parameter
    is_exporting = compat.is_exporting

    def read(self: nn.Module) -> Tensor | None:
        # Compiled code always gathers: the tracer takes this branch as a constant, without a guard.
        if is_exporting():  # nothing that `torch.export` writes down can gather
            if self.__dict__[_STATE].whole:
                return self._parameters[name]
            raise RuntimeError(_NO_EXPORT)
        if is_traced():
            return parameter(getattr(self, leaf_name), int(getattr(self, id_name)), size, dtype)
        # Eager code outside of a step and of the module's own call gets the shard: reading an attribute must never
        # start a collective that other ranks do not expect.
        state, own = self.__dict__[_STATE], self._parameters[name]
        path = state.path
        if path is None or path.is_idle or state.whole or not isinstance(own, DTensor):
            return own  # a tensor that `torch.func.functional_call` may have put there
        return path.read(self, own, by_hand=by_hand)

    return property(read, doc=f"The parameter `{name}`: gathered while it is computed with, else this rank's shard.")


def _call_property() -> property:
    is_traced, is_exporting = torch.compiler.is_dynamo_compiling, compat.is_exporting

    # Users call parts of their model in hooks, to generate a sample, say; all ranks must do so, as with FSDP. PyTorch
    # reads this attribute in every call of a module. A `__call__` of our own would do, but Dynamo goes straight to
    # `forward` only if the call is PyTorch's own.
    def inner_call(self: nn.Module) -> Callable[..., Any] | None:
        own = self.__dict__.get(compat.INNER_CALL)  # of a module that the user compiled by itself
        if is_traced():
            return own
        state = self.__dict__[_STATE]
        if is_exporting() and not state.whole:
            raise RuntimeError(_NO_EXPORT)
        return own if state.path is None or state.whole else functools.partial(_call_gathering, self, own)

    def set_own(self: nn.Module, value: Callable[..., Any] | None) -> None:
        self.__dict__[compat.INNER_CALL] = value

    return property(inner_call, set_own, doc="What a call runs, if not the module's hooks and `forward` as they are.")


def _call_gathering(module: nn.Module, own: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    path = module.__dict__[_STATE].path
    path.check_thread(type(module).__name__)
    run = own or compat.hooked_forward(module)
    return (path.call_outside if path.is_idle else path.call)(module, run, args, kwargs)


def property_codes() -> frozenset[types.CodeType]:
    """Code objects of the functions that the subclasses' properties call."""
    properties = _parameter_property("", (), torch.float32, False), _call_property()
    return frozenset(one.fget.__code__ for one in properties if one.fget is not None)


def _rnn_weights(self: nn.Module) -> list[Tensor]:
    # torch.nn.RNNBase keeps a list of its parameters beside them; built on read, it cannot hold stale tensors.
    return [getattr(self, name) for name in self.__dict__["_flat_weights_names"]]


def _deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Makes a copy with tensors of its own: an object of the original class, with its own shards, unknown to steps.

    Gradients are not copied: PyTorch's own copy of a DTensor fails where it begins inside of a larger memory.
    """
    for parameter in self._parameters.values():
        if isinstance(parameter, DTensor) and id(parameter) not in memo:  # the protocol's own numbers
            twin = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            twin.__dict__.update(copy.deepcopy(parameter.__dict__, memo))
            memo[id(parameter)] = twin
    original: Any = type(self).__mro__[1]
    memo[id(self)] = new = original.__new__(original)
    state = dict(original.__reduce_ex__(self, 4)[2])  # the state that the module wants copied
    _remove_access(state)
    new.__setstate__(copy.deepcopy(state, memo))
    return new


def _apply_of(original: type[nn.Module]) -> Callable[..., nn.Module]:
    """Makes the method behind ``module.to(...)``. It assigns only what it changes: `ShardedModel.check_installed`."""

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        parameters = self._parameters
        with torch.no_grad():
            changed = {name: p for name, p in parameters.items() if p is not None and not _stays(p, fn(p))}
        # PyTorch swaps a tensor subclass for a new one, with its attributes, even where nothing changes.
        self.__dict__["_parameters"] = changed
        try:
            return original._apply(self, fn, recurse)
        finally:
            parameters.update(changed)
            self.__dict__["_parameters"] = parameters

    return _apply


def _stays(tensor: Tensor, new: Tensor) -> bool:
    """Returns whether `new`, made of a parameter, is that parameter: of the same dtype, in the same memory."""
    if not (isinstance(tensor, DTensor) and isinstance(new, DTensor)) or new.dtype != tensor.dtype:
        return new is tensor
    return compat.local_of(new).data_ptr() == compat.local_of(tensor).data_ptr()


def _reduced(self: nn.Module, protocol: Any) -> Any:
    """Returns the pickled form: a module of the original class, unknown to steps.

    Its parameters are whole and plain if one rank has all of them, else DTensors with this rank's shards.
    """
    original: Any = type(self).__mro__[1]
    reduced = original.__reduce_ex__(self, protocol)
    if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    function, arguments, attributes, *rest = reduced
    twins = attributes[_STATE].twins
    attributes = dict(attributes)
    attributes["_parameters"] = {
        name: _pickled(parameter, twins) if isinstance(parameter, DTensor) else parameter
        for name, parameter in attributes["_parameters"].items()
    }
    _remove_access(attributes)
    if arguments == (type(self),):  # `copyreg.__newobj__`, which makes nothing of another class
        return copyreg._reconstructor, (original, object, None), attributes, *rest  # type: ignore[attr-defined]
    arguments = tuple(original if argument is type(self) else argument for argument in arguments)
    return function, arguments, attributes, *rest


def _pickled(parameter: Any, twins: MutableMapping[Tensor, nn.Parameter]) -> nn.Parameter:
    if parameter.device_mesh.size() > 1:
        return parameter
    # One twin for all names of a parameter, so that tied parameters are one object again after loading.
    twin = twins.get(parameter)
    if twin is None:
        twin = twins[parameter] = nn.Parameter(parameter.detach().to_local(), parameter.requires_grad)
    twin.data = parameter.detach().to_local()
    twin.requires_grad_(parameter.requires_grad)
    twin.__dict__.update(parameter.__dict__)
    return twin


def _shallow_copy(self: nn.Module) -> nn.Module:
    """Copies a module as `copy.copy` would without the subclass's `__reduce_ex__`, which is for pickling."""
    original: Any = type(self).__mro__[1]
    new = object.__new__(type(self))
    new.__setstate__(original.__reduce_ex__(self, 4)[2])
    return new


_Parameters = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

# One subclass per original class and parameters, shared by all layers: a class of its own for every layer would make
# Dynamo guard on, and compile for, every layer separately. Sizes belong to the class, as Dynamo compiles for each
# anyway, and does not guard on what follows from the class.
_classes: dict[tuple[type[nn.Module], _Parameters], type[nn.Module]] = {}


def sharded_class(original: type[nn.Module], parameters: _Parameters) -> type[nn.Module]:
    """Returns the subclass of `original` whose `parameters` are read through gathers; cached.

    Args:
        original: Class of the owning module.
        parameters: Local name, full size and compute dtype of its sharded parameters, in registration order.

    Returns:
        A subclass with the name of `original`, importable from this module as ``Sharded<Original>``, which is its
        qualified name.
    """
    key = (original, parameters)
    if key not in _classes:
        # Code that writes through `.data` must hold the parameter, and code that reads `.grad` must get the object that
        # has one. PyTorch's own modules do neither.
        library = original.__module__.partition(".")[0] == "torch"
        by_hand = not library and bool(_BY_HAND & mentions([original.forward]).names)
        body: dict[str, Any] = {
            name: _parameter_property(name, size, dtype, by_hand) for name, size, dtype in parameters
        }
        if original.__call__ is nn.Module.__call__:
            body[compat.INNER_CALL] = _call_property()
        if issubclass(original, nn.RNNBase):
            body[_RNN_WEIGHTS] = property(_rnn_weights, lambda self, value: None)
            body["_update_flat_weights"] = lambda self: None  # outside of graphs it would gather each weight again
        if not hasattr(original, "__deepcopy__"):
            body["__deepcopy__"] = _deep_copy
        if not hasattr(original, "__copy__"):
            body["__copy__"] = _shallow_copy
        body["__reduce_ex__"] = _reduced
        # Users create another instance of ``type(self)``, as `load_from_checkpoint` does: it is a plain one.
        body["__new__"] = lambda cls, *args, **kwargs: original(*args, **kwargs)
        body["_apply"] = _apply_of(original)
        label = f"Sharded{original.__name__}"
        if label in globals():
            label = f"{label}_{len(_classes)}"
        body |= {"__module__": __name__, "__qualname__": label}
        # Summaries and printed modules show its short name.
        _classes[key] = globals()[label] = type(original.__name__, (original,), body)
    return _classes[key]


def install_access(
    module: nn.Module, entries: dict[str, tuple[Tensor, int, tuple[int, ...], torch.dtype]], state: StepState
) -> None:
    """Makes `module` read its parameters through gathers.

    Args:
        module: The module that owns the parameters directly.
        entries: Local parameter name to (leaf, parameter id, full size, compute dtype).
        state: Shared by all modules of one strategy.
    """
    for name, (leaf, ds_id, _, _) in entries.items():
        module.__dict__ |= {_LEAF.format(name): leaf, _ID.format(name): str(ds_id)}
    module.__dict__[_STATE] = state
    if isinstance(module, nn.RNNBase):
        module.__dict__.pop(_RNN_WEIGHTS, None)
    parameters = tuple((name, tuple(size), dtype) for name, (_, _, size, dtype) in entries.items())
    module.__class__ = sharded_class(type(module), parameters)


def renew_leaf(module: nn.Module, name: str) -> None:
    """Makes Dynamo re-examine the leaf of the parameter `name`: it does not notice a change by itself."""
    leaf = module.__dict__.pop(_LEAF.format(name))
    module.__dict__[_LEAF.format(name)] = leaf


def uninstall_access(module: nn.Module) -> None:
    """Restores the plain parameters and the class of `module` after `install_access`.

    Args:
        module: Any module; modules without access are not changed.
    """
    if _STATE in module.__dict__:
        _remove_access(module.__dict__)
        module.__class__ = type(module).__mro__[1]


@contextlib.contextmanager
def as_built(module: nn.Module) -> Iterator[None]:
    """Returns a context in which all modules have their original classes: for code that looks at names of classes.

    Nothing may be computed with the modules inside.
    """
    sharded = {child: type(child) for child in module.modules() if _STATE in child.__dict__}
    for child, access in sharded.items():
        child.__class__ = access.__mro__[1]
    try:
        yield
    finally:
        for child, access in sharded.items():
            child.__class__ = access


def step_states(module: nn.Module) -> list[StepState]:
    """The states of `module` and its children: one for each strategy that has sharded some of them."""
    return list(dict.fromkeys(m.__dict__[_STATE] for m in module.modules() if _STATE in m.__dict__))


def _remove_access(attributes: dict[str, Any]) -> None:
    del attributes[_STATE]
    parameters = attributes["_parameters"]
    for name in parameters:
        attributes.pop(_LEAF.format(name), None)
        attributes.pop(_ID.format(name), None)
    if "_flat_weights_names" in attributes:
        attributes[_RNN_WEIGHTS] = [parameters[name] for name in attributes["_flat_weights_names"]]
