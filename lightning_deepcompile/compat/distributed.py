"""torch.distributed: names that changed, the rendezvous store, local tensors of DTensors.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "AssignableDTensor",
    "all_gather_into",
    "all_to_all_into",
    "all_to_all_uneven",
    "device_of_objects",
    "dispatches",
    "full_tensor",
    "gather_rows",
    "process_group",
    "reading_attributes",
    "reduce_scatter_mean_into",
    "library_in_flight_records",
    "local_of",
    "store",
    "store_of_one_host",
    "with_local",
]

DTensorT = TypeVar("DTensorT", bound=DTensor)


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """A DTensor like `tensor` with another local tensor, which may be on another device than the mesh.

    ``DTensor.from_local`` would copy it to the mesh's device.
    """
    return DTensor(local, tensor._spec, requires_grad=False)


_CALLS_DISPATCH = torch.__version__ >= "2.12"
_STORED: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__ for name in ("grad", "requires_grad", "is_leaf", "grad_fn", "_version")
)  # attributes whose getters call no operator


def reading_attributes() -> AbstractContextManager[Any]:
    """Returns a context for loops that read and set attributes of many tensors, and call no operators.

    `dispatches` makes PyTorch 2.11 call Python for each of them: some 5 µs, of 148 parameters several times in a step.
    """
    return contextlib.nullcontext() if _CALLS_DISPATCH else torch._C.DisableTorchFunctionSubclass()


def dispatches(kind: type[DTensorT]) -> type[DTensorT]:
    """Decorates a subclass of DTensor with a ``__torch_dispatch__`` of its own, which PyTorch 2.11 does not call."""
    if _CALLS_DISPATCH:
        return kind

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if any(issubclass(one, kind) for one in types):
                return kind.__torch_dispatch__(function, types, args, kwargs)
            return function(*args, **(kwargs or {}))

    def torch_function(
        cls: Any, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _STORED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args)
        with Mode(), torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    kind.__torch_function__ = classmethod(torch_function)  # type: ignore[assignment, method-assign]
    return kind


class AssignableDTensor(DTensor):
    """A DTensor whose ``.data`` can be assigned, as optimizers do: the values are copied to its memory.

    PyTorch would give the DTensor other storage, and leave its local tensor unchanged.
    """

    @classmethod
    def like(cls, tensor: Tensor) -> AssignableDTensor:
        """Returns such a DTensor with the same local tensor, a leaf that requires a gradient."""
        assert isinstance(tensor, DTensor)
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        return cls(tensor._local_tensor, tensor._spec, requires_grad=differentiable)

    @staticmethod
    def __tensor_unflatten__(*parts: Any) -> AssignableDTensor:
        made = DTensor.__tensor_unflatten__(*parts)
        made.__class__ = AssignableDTensor  # a function that is compiled for it expects it again
        return cast(AssignableDTensor, made)

    @property  # type: ignore[override]
    def data(self) -> Tensor:
        """A DTensor of the same memory, outside of autograd."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.detach().copy_(value)


def local_of(tensor: Tensor) -> Tensor:
    """The DTensor's own local tensor; ``to_local`` would make another tensor of it."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def full_tensor(tensor: DTensor) -> Tensor:
    """Returns ``tensor.full_tensor()``, without a crash that PyTorch's has on CPUs if it is called many times in a row.

    Each of gloo's worker threads writes the name of its finished operation into one string, without a lock. Two that do
    so at once free a name that is too long to lie within the string, as the name of ``full_tensor``'s collective is.

    Args:
        tensor: Left to PyTorch unless it is on CPUs, and sharded on dim 0 over one dimension of its mesh.
    """
    sharded = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if tensor.device_mesh.device_type != "cpu" or len(sharded) != 1 or tensor.placements[sharded[0]] != Shard(0):
        return tensor.full_tensor()
    return gather_rows(tensor.to_local().detach(), tensor.shape[0], tensor.device_mesh.get_group(sharded[0]))


def gather_rows(mine: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """Returns all `rows` of a tensor that the ranks of `group` share as DTensors do; a collective.

    Args:
        mine: This rank's rows, on the device of `group`; the last ranks may have fewer, or none.
        rows: Of the whole tensor.
        group: The ranks.

    Returns:
        The tensor, at the beginning of memory that padding follows.
    """
    most = -(-rows // group.size())
    send = mine.contiguous()
    if mine.shape[0] < most:
        send = torch.cat([send, send.new_zeros(most - mine.shape[0], *mine.shape[1:])])
    whole = send.new_empty(most * group.size(), *mine.shape[1:])
    all_gather_into(whole, send, group)
    return whole[:rows]


def device_of_objects(group: dist.ProcessGroup | None) -> str:
    """The type of device of the tensors in which collectives of `group` send objects; None is all ranks."""
    return dist.distributed_c10d._get_object_coll_device(group)


def store() -> dist.Store:
    """The key-value store of the default process group's rendezvous."""
    return dist.distributed_c10d._get_default_store()


def store_of_one_host(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store | None:
    """Returns a store for ranks of one host, which listens on one address alone: PyTorch's own listens on all.

    Args:
        address: The host's, as its ranks know it.
        port: Where it listens.
        rank: This rank; the first one listens.
        world_size: How many there are.
        timeout: How long ranks wait for each other.

    Returns:
        What to pass to ``init_process_group``; None if torchrun's agent has made a store, which is to be used.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return None
    listens = _listener(address, port) if rank == 0 else None
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        multi_tenant=True,  # as PyTorch's own: another one in this process may serve the port already
        master_listen_fd=None if listens is None else listens.detach(),
    )


def _listener(address: str, port: int) -> socket.socket | None:
    """Returns a socket that listens on `address` alone; None where it is no address of this host, or in use."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    listens = socket.socket(family, kind, protocol)
    try:
        listens.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listens.bind(place)
        listens.listen(2048)
    except OSError:
        listens.close()
        return None
    return listens


def library_in_flight_records(name: str) -> str:
    """Returns the name by which a flight record is to call a communication library (``"nccl"`` or ``"gloo"``).

    PyTorch's analyser refuses names that it does not know, and that of 2.11 does not know gloo's.
    """
    return name if torch.__version__ >= "2.13" else "nccl"


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name (``group.group_name``), as the tracer's graphs hold it."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type] # a NewType of str


def all_gather_into(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Gathers `tensor` of every rank, one behind the other, into `output`; a collective of `group`.

    torch 2.13 has another name for ``all_gather_into_tensor``, and warns of that one.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, tensor, group=group)


def all_to_all_into(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sends the n-th of `tensor`'s equal parts to rank n, whose part for this rank comes to the same place."""
    dist.all_to_all_single(output, tensor, group=group)


def all_to_all_uneven(
    output: Tensor, tensor: Tensor, into: list[int], out: list[int], group: dist.ProcessGroup
) -> Callable[[], None]:
    """Begins to send ``out[n]`` elements of `tensor` to rank n, and to receive ``into[n]`` from it, rank by rank.

    Returns:
        A function that waits for it, on a GPU's current stream, and keeps both tensors alive until then.
    """
    work = dist.all_to_all_single(output, tensor, into, out, group=group, async_op=True)

    def wait() -> None:
        nonlocal tensor
        work.wait()
        tensor = output  # may be freed now

    return wait


def reduce_scatter_mean_into(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Returns this rank's part of the mean of every rank's `tensor`; a collective of `group`. Gloo knows no means."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    mean = tensor.is_cuda
    scatter(output, tensor, op=dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM, group=group)
    if not mean:
        output.div_(group.size())
