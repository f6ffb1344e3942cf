"""The runtime as plain functions: ``from lightning_deepcompile import dc``.

The names, arguments and meanings are those of DeepSpeed's DeepCompile runtime; the operators that go with them are
``torch.ops.dc.*``. The functions are a thin front of one `Runtime`, made by `init` and ended by `cleanup`; the ids of
its parameters and graphs are plain small numbers. A strategy has a runtime of its own, so both can be in use together.

A step is::

    dc.start_forward()
    ...                             # allgather_param, wait_allgather, release_param
    dc.end_forward()
    dc.start_backward(update=True)  # False while gradients accumulate
    ...                             # reduce_grad
    dc.end_backward(graph_id=0)     # for every graph; gradients are complete afterwards
    optimizer.step()                # on the shards; the next start_forward() gathers anew

The operators may be used in functions that `torch.compile` compiles, with any backend: every call is made, in the order
of the calls, whether its result is read or not. The caller owns arguments and results. Values come from the operators
that wait: ``allgather_param`` and ``offload_tensor`` return a handle to a tensor, without its values.
``torch.ops.dc.free_tensors`` is refused there.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_deepcompile.runtime.extension import load_extension

__all__ = [
    "cleanup",
    "clear_all_gathered_params",
    "enable_profiling",
    "end_backward",
    "end_forward",
    "free_tensors",
    "init",
    "invalidate_gathered_param",
    "is_profiling",
    "register_graph_z1",
    "register_graph_z2",
    "register_graph_z3",
    "register_param",
    "register_z3_param",
    "reset",
    "set_persistent",
    "start_backward",
    "start_forward",
    "update_param_grad_buffer",
]

SYMMETRIC_THRESHOLD = 32 * 2**20
"""Bytes of a gathered group from which on copy engines move it, where they do; below, little is gained."""

_LARGEST_ID = 2**32 - 1


@dataclass(frozen=True)
class _Config:
    symmetric_memory: bool = False
    double_buffer: bool = True
    free_activation_threshold: int = 10 * 1024 * 1024
    sync_before_reduce: bool = False
    sync_after_reduce: bool = False
    sync_before_allgather: bool = False
    sync_after_allgather: bool = False

    @classmethod
    def read(cls, config: Any) -> _Config:
        settings = dict(config) if isinstance(config, Mapping) else _public_attributes(config)
        known = {field.name: type(field.default) for field in fields(cls)}
        for name, value in settings.items():
            if name not in known:
                raise ValueError(f"dc.init: unknown config field {name!r}. The fields are: {', '.join(known)}.")
            if type(value) is not known[name]:
                raise TypeError(
                    f"dc.init: config field {name!r} must be of type {known[name].__name__}, got {value!r}."
                )
        return cls(**settings)


def _public_attributes(config: Any) -> dict[str, Any]:
    names = {
        *getattr(config, "__dict__", ()),
        *(n for n in dir(type(config)) if not callable(getattr(config, n, None))),
    }
    return {name: getattr(config, name) for name in names if not name.startswith("_")}


class _Front:
    """Holds the runtime between `init` and `cleanup`."""

    def __init__(self) -> None:
        self._runtime: Any = None

    @property
    def present(self) -> Any | None:
        return self._runtime

    @property
    def runtime(self) -> Any:
        if self._runtime is None:
            raise RuntimeError(
                "The dc runtime is not initialised. Call dc.init(pg, config, initial_reduce_bucket_size) first."
            )
        return self._runtime

    def open(self, *args: Any, **kwargs: Any) -> None:
        if self._runtime is not None:
            raise RuntimeError("dc.init: the runtime is initialised already. Call dc.cleanup() first.")
        self._runtime = load_extension().Runtime(*args, **kwargs, serial=0)

    def close(self) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.close()

    def drop(self) -> None:
        """Ends the runtime without its peers, which may have ended: at interpreter exit no rank waits for another."""
        self._runtime = None


_front = _Front()
atexit.register(_front.drop)


def init(
    pg: dist.ProcessGroup,
    config: Any,
    initial_reduce_bucket_size: int,
    *,
    device: torch.device | str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Creates the runtime. Collective over `pg`.

    Args:
        pg: The data-parallel ranks. NCCL communicators of the runtime's own are made from it; on CPU it is used itself.
        config: Mapping or object with any of the fields ``symmetric_memory`` (bool: groups of 32 MiB and more are
            gathered by copy engines between the GPUs of one host; by NCCL's kernels, with a warning that says why,
            where they cannot), ``double_buffer`` (bool: collect gradients while others are reduced),
            ``free_activation_threshold`` (int: fewest elements that `free_tensors` frees), and for debugging
            ``sync_before_reduce``, ``sync_after_reduce``, ``sync_before_allgather``, ``sync_after_allgather`` (bool:
            wait for the device).
        initial_reduce_bucket_size: Elements of gradients that are reduced together. A larger gradient travels alone.
        timeout: How long an operation may take before every rank raises; by default 30 minutes (NCCL), or what `pg`
            says.
        device: Where parameters live; by default this process' CUDA device if `pg` has NCCL, else the CPU.

    Raises:
        RuntimeError: If the runtime exists already.
        ValueError: For an unknown field or a size that is not positive.
        TypeError: For a field of another type.
    """
    settings = _Config.read(config)
    if not isinstance(initial_reduce_bucket_size, int) or initial_reduce_bucket_size <= 0:
        raise ValueError(
            "dc.init: `initial_reduce_bucket_size` must be a positive number of elements, got "
            f"{initial_reduce_bucket_size!r}."
        )
    if device is None:
        nccl = torch.cuda.is_available() and "nccl" in dist.get_backend_config(pg)
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    _front.open(
        pg,
        pg,
        torch.device(device),
        # Two buffers: one is filled while the other one is reduced.
        reduce_window=1 if settings.double_buffer else 0,
        reduce_bucket_size=initial_reduce_bucket_size,
        symmetric_threshold=SYMMETRIC_THRESHOLD if settings.symmetric_memory else 0,
        timeout=timeout.total_seconds() if timeout is not None else 0.0,
        free_activation_threshold=settings.free_activation_threshold,
        sync_before_reduce=settings.sync_before_reduce,
        sync_after_reduce=settings.sync_after_reduce,
        sync_before_allgather=settings.sync_before_allgather,
        sync_after_allgather=settings.sync_after_allgather,
    )


def register_param(
    ds_id: int, ds_shape: Sequence[int], ds_tensor: Tensor, grad_buffer: Tensor | None, persistent: bool = False
) -> None:
    """Registers a parameter, for any stage.

    If the id is registered already, the new tensors replace the old ones; shape and dtype must be the same.

    Args:
        ds_id: The parameter's id, from 0 on.
        ds_shape: Shape of the whole parameter.
        ds_tensor: This rank's shard: ``ceil(numel / world)`` elements as a 1-D tensor, or ``ceil(rows / world)`` whole
            rows. All shards one after the other start with the parameter; the rest is padding.
        grad_buffer: Where the mean gradient's shard goes: like `ds_tensor`, of any floating dtype. None: frozen.
        persistent: Stays gathered from its first use until the weights change.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit, or the id is taken.
    """
    _check_id("ds_id", ds_id)
    _front.runtime.setup.register_param(
        ds_id, f"param{ds_id}", list(ds_shape), ds_tensor, grad_buffer, persistent=persistent
    )


def register_z3_param(
    ds_id: int, ds_shape: Sequence[int], ds_tensor: Tensor, grad_buffer: Tensor | None, persistent: bool = False
) -> None:
    """Registers a parameter; the same as `register_param`."""
    register_param(ds_id, ds_shape, ds_tensor, grad_buffer, persistent)


def register_graph_z1(graph_id: int, ds_ids: Sequence[int]) -> None:
    """Registers a graph whose parameters stay whole and whose gradients are reduced once per optimizer step.

    Args:
        graph_id: The graph's id, from 0 on; the same id again replaces the graph.
        ds_ids: Ids of the parameters that it uses.

    Raises:
        ValueError: If an id is not registered, or ranks registered different parameters or graphs (collective).
    """
    _register_graph(graph_id, ds_ids, 1)


def register_graph_z2(graph_id: int, ds_ids: Sequence[int]) -> None:
    """Registers a graph like `register_graph_z1`, but gradients are reduced with every backward pass."""
    _register_graph(graph_id, ds_ids, 2)


def register_graph_z3(graph_id: int, ds_ids: Sequence[int]) -> None:
    """Registers a graph like `register_graph_z2`, but parameters are sharded between their uses."""
    _register_graph(graph_id, ds_ids, 3)


def _register_graph(graph_id: int, ds_ids: Sequence[int], stage: int) -> None:
    _check_id("graph_id", graph_id)
    _front.runtime.setup.register_graph(graph_id, list(ds_ids), stage=stage)
    _front.runtime.setup.validate()


def set_persistent(ds_id: int) -> None:
    """Keeps a parameter gathered from its next use on, until the weights change."""
    _front.runtime.parameters.set_persistent(ds_id)


def update_param_grad_buffer(ds_id: int, grad_buffer: Tensor) -> None:
    """Replaces a parameter's gradient buffer by one like it; the old one keeps its values."""
    _front.runtime.gradients.replace(ds_id, grad_buffer)


def invalidate_gathered_param(ds_id: int) -> None:
    """Discards the gathered form of one parameter, whose shards changed."""
    _front.runtime.parameters.invalidate(ds_id)


def clear_all_gathered_params() -> None:
    """Discards the gathered form of all parameters."""
    _front.runtime.parameters.invalidate()


def enable_profiling(enable: bool) -> None:
    """Switches the profiling mode: the usual shapes and memory, but no communication and undefined values."""
    _front.runtime.passes.enable_profiling(enable)


def is_profiling() -> bool:
    """Returns whether the profiling mode is on."""
    return _front.present is not None and _front.runtime.passes.profiling


def start_forward() -> None:
    """Opens a forward pass. After an update, parameters are gathered again and gradients accumulate from zero."""
    _front.runtime.passes.start_forward()


def end_forward() -> None:
    """Closes a forward pass.

    Raises:
        RuntimeError: If there is none.
    """
    _front.runtime.passes.end_forward()


def start_backward(update: bool) -> None:
    """Opens a backward pass.

    Args:
        update: Whether the optimizer steps afterwards; False while gradients of several passes add up.
    """
    _front.runtime.passes.start_backward(update)


def end_backward(graph_id: int) -> None:
    """Ends a graph's backward pass: its gradients are complete for all work that is queued afterwards.

    Raises:
        RuntimeError: If there is no backward pass, or a reduction failed.
        ValueError: If the graph is not registered.
    """
    _front.runtime.passes.end_backward(graph_id)


def free_tensors(tensors: Sequence[Tensor]) -> None:
    """Frees tensors of at least ``free_activation_threshold`` elements: each becomes an empty tensor.

    Raises:
        ValueError: If one of them is in use: a gathered or registered tensor, one of a group of gradients that is being
            reduced, or one that is offloaded.
    """
    _front.runtime.memory.free_tensors(list(tensors))


def reset() -> None:
    """Forgets all graphs and the state that a step has left, not parameters and buffers. No effect before `init`."""
    if _front.present is not None:
        _front.runtime.reset()


def cleanup() -> None:
    """Ends the runtime, together with the other ranks. Does nothing if there is none."""
    _front.close()


def _check_id(argument: str, value: int) -> None:
    if not isinstance(value, int) or not 0 <= value <= _LARGEST_ID:
        raise ValueError(f"`{argument}` must be an integer in [0, {_LARGEST_ID}], got {value!r}.")
