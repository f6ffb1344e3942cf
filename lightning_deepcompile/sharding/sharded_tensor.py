"""Sharded tensors for users: operations compute with the whole tensor, and indices are global.

A DTensor leaves some of that to its user. Sums and norms stay a rank's part until somebody asks for all of it, and
``.item()`` does not; a slice of rows is a copy, so that writes to it are lost. Without GPUs it draws the same random
numbers for each rank's rows. Gradients, parameters and optimizers' states have a class that asks, that keeps what is
written, and that draws as one process does: each rank draws for the whole tensor and keeps its rows. States may be in
host memory, where ranks cannot communicate: operations on them run on the device.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication

from lightning_deepcompile import compat

_SAME = frozenset(("detach", "alias"))  # views that need no other rank
# Writes to places that differ between ranks: DTensors refuse these.
_BY_INDEX = frozenset(
    """index_put_ index_fill_ index_copy_ index_add_ index_reduce_ put_ scatter_ scatter_add_ scatter_reduce_
    masked_scatter_ tril_ triu_ renorm_ fill_diagonal_ cumsum_ cumprod_""".split()
)
_DATA: Any = DTensor.data  # a descriptor
_REFUSED = re.compile(r"DTensor|[Ss]hard|^aten\.|subclass")
_HINT = (
    "(The tensor is sharded. `tensor.full_tensor()`, on all ranks, is a plain copy of all of it; "
    "`strategy.full_parameters()` has whole parameters in place, and keeps what is written to them.)"
)


@compat.dispatches
class ShardedTensor(DTensor):
    """A sharded parameter, its gradient, its optimizer's state, or a result computed of them, between steps.

    On all ranks, code must do alike whatever needs more than a rank's rows: reductions, rows by index, values for
    Python.
    """

    __slots__ = ()

    @staticmethod
    def of(tensor: DTensor, before_use: Callable[[], None] | None = None) -> ShardedTensor:
        """Changes the class of `tensor` itself to this one; `before_use` is called before its memory is read."""
        tensor.__class__ = ShardedTensor
        if before_use is not None:
            tensor.__dict__["_dc_before_use"] = before_use
        return cast(ShardedTensor, tensor)

    @staticmethod
    def undone(tensor: DTensor) -> DTensor:
        """Changes the class of `tensor` itself back to PyTorch's."""
        tensor.__class__ = DTensor
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # its stub has no class
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, written = compat.name_of_operator(function), compat.written_by(function, args, kwargs)
        on_host = _prepare(args, kwargs) and not written and name not in _SAME
        draws = torch.Tag.nondeterministic_seeded in function.tags
        try:
            if written and (name in _BY_INDEX or any(_origin(one) is not None for one in written)):
                return _write_whole(function, args, kwargs, written)
            if draws:
                return _on_whole(function, args, kwargs, written, on_host)
            if name == "_local_scalar_dense":
                return function(_full(args[0]))
            if name == "fill_":  # DTensor knows only one overload of it
                function(compat.local_of(args[0]), _full(args[1]))
                _count_write(args[0])
                return args[0]
            # Values that are written to a parameter are the same on all ranks, or else ranks would diverge. Values that
            # are computed with one, of a rank's own batch, differ: there DTensor refuses plain tensors.
            call, named = fx.node.map_aggregate((args, kwargs), _on_device) if on_host else (args, kwargs)
            with _as_dtensors(call, named), implicit_replication() if written else contextlib.nullcontext():
                result = function(*call, **named)
        except (RuntimeError, NotImplementedError) as error:
            if _HINT in str(error) or not _REFUSED.search(str(error)):
                raise
            if _all_sharded(args, kwargs):  # as flattening rows that ranks have unequal numbers of
                return _on_whole(function, args, kwargs, written, on_host)
            raise type(error)(f"{error} {_HINT}") from error
        if written:
            for one in written:
                _count_write(one)
            return None if result is None else written[0] if len(written) == 1 else tuple(written)
        return _wrapped(result, function, args, kwargs, on_host)

    def to_local(self, **options: Any) -> Tensor:
        """Returns this rank's part, as in PyTorch."""
        _prepare(self)
        return super().to_local(**options)

    def full_tensor(self, **options: Any) -> Tensor:
        """Returns the whole tensor as in PyTorch, also for tensors in host memory."""
        return _full(self) if _prepare(self) else super().full_tensor(**options)

    @property
    def data(self) -> Tensor:
        """Values without a gradient; those of the same shape and dtype that are assigned are copied.

        By PyTorch's assignment, a DTensor would have other storage, and its values would stay as they were.
        """
        alias = ShardedTensor.of(_DATA.__get__(self))
        alias.__dict__["_dc_base"] = self
        return alias

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or (value.dtype, value.device) != (self.dtype, self.device):
            _DATA.__set__(self, value)
            return
        with torch.no_grad():
            self.copy_(value)

    # Operations that PyTorch refuses for all subclasses.
    def tolist(self) -> Any:
        """All values, as nested lists."""
        return _full(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """All values, as an array."""
        return _full(self).numpy(force=force)

    def __format__(self, spec: str) -> str:
        return format(_full(self) if spec else self._as_it_is(_one_plain(self)), spec)

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self[index] for index in range(len(self))])

    # Copies and pickled forms have PyTorch's classes.
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = twin = self._as_it_is(_one_plain(self).clone())
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_it_is(_one_plain(self)).__reduce_ex__(protocol)

    def _as_it_is(self, value: Tensor) -> Tensor:
        return nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value


def _one_plain(tensor: DTensor) -> DTensor:
    return compat.with_local(tensor, compat.local_of(tensor))


@contextlib.contextmanager
def _as_dtensors(*arguments: Any) -> Iterator[None]:
    """Returns a context in which `arguments` have PyTorch's class; copies would have other storages."""
    worn: dict[ShardedTensor, type[ShardedTensor]] = {}

    def undress(one: Any) -> Any:
        if isinstance(one, ShardedTensor):
            worn[one] = type(one)
        return one

    fx.node.map_aggregate(arguments, undress)
    for one in worn:
        one.__class__ = DTensor  # type: ignore[assignment] # a class above its own
    try:
        yield
    finally:
        for one, kind in worn.items():
            one.__class__ = kind


def _full(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    return compat.full_tensor(_one_plain(_on_device(value))).to(compat.local_of(value).device)


def _prepare(*arguments: Any) -> bool:
    """Waits for the memory of the tensors among `arguments`; returns whether one is not on the device of its mesh."""
    found: list[DTensor] = []

    def look(one: Any) -> Any:
        if isinstance(one, ShardedTensor):
            for base in _bases(one):
                if (before_use := base.__dict__.get("_dc_before_use")) is not None:
                    before_use()
            if _is_on_host(one):
                found.append(one)
        return one

    fx.node.map_aggregate(arguments, look)
    return bool(found)


def _is_on_host(tensor: DTensor) -> bool:
    return compat.local_of(tensor).device.type != tensor.device_mesh.device_type


def _on_device(value: Any) -> Any:
    """Returns a tensor that is in host memory as a copy on the device of its mesh."""
    if not isinstance(value, DTensor) or not _is_on_host(value):
        return value
    return compat.with_local(value, compat.local_of(value).to(value.device_mesh.device_type))


def _bases(tensor: DTensor) -> Iterator[DTensor]:
    """Yields a tensor, and those whose memory it shares as a view."""
    base: DTensor | None = tensor
    while base is not None:
        yield base
        base = base.__dict__.get("_dc_base")


def _count_write(tensor: Tensor) -> None:
    """Counts a write to the memory of `tensor`: PyTorch does not count writes below autograd."""
    for base in _bases(tensor) if isinstance(tensor, DTensor) else ():
        local = compat.local_of(base)
        if not local.is_inference():
            torch.autograd.graph.increment_version(local)


def _origin(tensor: Any) -> Any:
    """The tensor of whose rows `tensor` is a copy, and how it was made; None if it is no copy, or shares its memory."""
    return tensor.__dict__.get("_dc_origin") if isinstance(tensor, ShardedTensor) else None


def _wrapped(result: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_host: bool) -> Any:
    views = compat.is_view(function) and isinstance(args[0], ShardedTensor)
    copies = views and (on_host or _origin(args[0]) is not None or any(map(_is_sharded, args[0].placements)))

    def wrap(one: Any, place: int | None) -> Any:
        if type(one) is not DTensor:
            return one
        if any(placement.is_partial() for placement in one.placements):
            one = one.redistribute(placements=[Replicate() if p.is_partial() else p for p in one.placements])
        if on_host:
            one = compat.with_local(one, compat.local_of(one).cpu())
        if one.dim() == 0 and not views:
            return compat.local_of(one)  # a plain number, for loggers and ``torch.tensor([...])``
        one = ShardedTensor.of(one)
        if copies and (on_host or not any(map(_is_sharded, one.placements))):
            one.__dict__["_dc_origin"] = (args[0], function, args[1:], kwargs, place)
        elif views:
            one.__dict__["_dc_base"] = args[0]
        return one

    if isinstance(result, list | tuple):
        return type(result)(wrap(one, place) for place, one in enumerate(result))
    return wrap(result, None)


def _is_sharded(placement: Any) -> bool:
    return not placement.is_replicate()


def _all_sharded(*arguments: Any) -> bool:
    """Returns whether all tensors among `arguments` are ours: others may differ between ranks."""
    plain: list[Tensor] = []

    def look(one: Any) -> Any:
        if isinstance(one, Tensor) and not isinstance(one, ShardedTensor):
            plain.append(one)
        return one

    fx.node.map_aggregate(arguments, look)
    return not plain


def _on_whole(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor], on_host: bool
) -> Any:
    """Calls an operator on whole tensors; results of the shape of the first one are divided as it is."""
    if written:
        return _write_whole(function, args, kwargs, written)
    sharded: list[ShardedTensor] = []

    def whole(one: Any) -> Any:
        if isinstance(one, ShardedTensor):
            sharded.append(one)
        return _full(one)

    call, named = fx.node.map_aggregate((args, kwargs), whole)
    first = sharded[0]

    def divide(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        device = first.device_mesh.device_type
        return _divided(result.to(device), first, first.placements if result.shape == first.shape else None)

    return _wrapped(fx.node.map_aggregate(function(*call, **named), divide), function, args, kwargs, on_host)


def _write_whole(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]) -> Any:
    """Writes to the whole tensor, of which this rank keeps its rows."""
    if len(written) > 1:
        raise NotImplementedError(f"{function} writes to several sharded tensors by index.")
    (tensor,) = written
    if not isinstance(tensor, DTensor):
        call, named = fx.node.map_aggregate((args, kwargs), _full)
        return function(*call, **named)
    root, steps = tensor, []
    while (origin := _origin(root)) is not None:
        root, *step = origin
        steps.append(step)
    assert isinstance(root, DTensor)
    whole = _full(root).clone()
    target = whole
    for view, rest, keywords, place in reversed(steps):
        target = view(target, *rest, **keywords)
        target = target if place is None else target[place]
    call, named = fx.node.map_aggregate((args, kwargs), lambda one: target if one is tensor else _full(one))
    function(*call, **named)
    _keep(root, whole)
    if root is not tensor:
        _keep(tensor, target)
    return tensor


def _divided(whole: Tensor, like: DTensor, placements: Any = None) -> DTensor:
    """Makes a DTensor on the ranks of `like` of a tensor that every rank has; None: every rank keeps all of it."""
    everywhere = DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return everywhere if placements is None else everywhere.redistribute(placements=placements)


def _keep(tensor: Any, whole: Tensor) -> None:
    compat.local_of(tensor).copy_(_divided(whole, tensor, tensor.placements).to_local())
    _count_write(tensor)
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
