"""Registers with the tracer the output shapes (fake kernels) and derivatives of the runtime's operators.

AOTAutograd sees nothing of the distribution but ``dc::gather`` and ``dc::reduce``. They are plain functions of tensors:
a gather returns a fresh full parameter, its derivative reduces the full gradient to a fresh shard. Dynamo sees
``dc::parameter``: a gather whose result is a leaf, as parameters are, so that code that asks for ``requires_grad`` or
``is_leaf`` gets the same answer as in one process. Everything that is scheduled (launching early, waiting, releasing)
is added after the graph is partitioned, as operators with side effects that no tracer sees.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_deepcompile import compat
from lightning_deepcompile.compat import mark_effectful


def gather_op() -> compat.OpOverload:
    """The operator ``dc::gather(shard, ds_id, size, dtype)``: a full parameter from its shards."""
    return torch.ops.dc.gather.default


def reduce_op() -> compat.OpOverload:
    """The operator ``dc::reduce(grad, ds_id, shard_size, dtype)``: this rank's shard of the mean gradient."""
    return torch.ops.dc.reduce.default


def gathers_of(gm: torch.fx.GraphModule) -> None:
    """Turns the parameters that a Dynamo graph reads, in its subgraphs too, into gathers."""
    parameter = torch.ops.dc.parameter
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.target in (parameter, parameter.default):
                    node.target = torch.ops.dc.gather


def _parameter(shard: Tensor, ds_id: int, size: list[int], dtype: torch.dtype) -> Tensor:
    if type(shard) is not compat.FakeTensor:  # only Dynamo calls it so
        return torch.ops.dc.gather(shard, ds_id, size, dtype)
    with torch.no_grad():
        return torch.ops.dc.gather(shard, ds_id, size, dtype).requires_grad_(shard.requires_grad)


def _fake_gather(shard: Tensor, ds_id: int, size: list[int], dtype: torch.dtype) -> Tensor:
    return shard.new_empty(size, dtype=dtype)


def _fake_reduce(grad: Tensor, ds_id: int, shard_size: list[int], dtype: torch.dtype) -> Tensor:
    return grad.new_empty(shard_size, dtype=dtype)


def _fake_allgather_param(param: Tensor, graph_id: int, ds_id: int, dtype: torch.dtype | None = None) -> Tensor:
    full = _extension().like_gathered(ds_id, dtype)
    return param.new_empty((), dtype=full.dtype, device=_extension().device_of(graph_id)).expand(full.shape)


def _fake_wait_allgather(v: Tensor, graph_id: int, ds_id: int) -> Tensor:
    full = _extension().like_gathered(ds_id, v.dtype)
    return v.new_empty(full.shape, device=_extension().device_of(graph_id))


def _extension() -> Any:
    return importlib.import_module("lightning_deepcompile._C")


def _fake_same(tensor: Tensor, *ids: int) -> Tensor:
    return torch.empty_like(tensor)


def _fake_reduce_grad(grad: Tensor, graph_id: int, ds_id: int) -> Tensor:
    return grad.new_empty(0)


def _fake_offload(tensor: Tensor, graph_id: int, id: int) -> Tensor:
    return torch.empty_like(tensor, device="cpu")


def _fake_reload(tensor: Tensor, graph_id: int, id: int) -> Tensor:
    return torch.empty_like(tensor, device=_extension().device_of(graph_id))


def _fake_nothing(*args: Any) -> None:
    return None


def _refuse_to_free(tensors: list[Tensor], graph_id: int = 0) -> None:
    raise ValueError(
        f"torch.ops.dc.free_tensors cannot be compiled (got {len(tensors)} tensors): the compiler plans memory as if "
        "freed tensors still had theirs. Call lightning_deepcompile.dc.free_tensors, which runs between two compiled "
        "parts. The compiler itself frees tensors that only compiled code reads."
    )


# Operators per parameter: what a user's own compiled code may contain. The fused ones are written into programs, after
# all tracing.
_FAKES: dict[str, Callable[..., Any]] = {
    "allgather_param": _fake_allgather_param,
    "wait_allgather": _fake_wait_allgather,
    "release_param": _fake_same,
    "prefetch_params_fused": _fake_nothing,
    "reduce_grad": _fake_reduce_grad,
    "end_backward": _fake_nothing,
    "free_tensors": _refuse_to_free,
    "offload_tensor": _fake_offload,
    "wait_offload": _fake_same,
    "reload_tensor": _fake_reload,
    "wait_reload": _fake_same,
    "offload_parameter": _fake_nothing,
    "reload_parameter": _fake_nothing,
    "gather": _fake_gather,
    "reduce": _fake_reduce,
}
_FUNCTIONS = ("gather", "reduce")


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Only what does not depend on the data: the gather must not keep the shard (or the full parameter) alive.
    shard, ds_id, _, _ = inputs
    ctx.ds_id, ctx.shard_size, ctx.shard_dtype = ds_id, list(shard.shape), shard.dtype


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.dc.reduce(grad, ctx.ds_id, ctx.shard_size, ctx.shard_dtype), None, None, None


@functools.cache
def register() -> None:
    """Registers fake kernels and derivatives; the extension must be loaded. Repeated calls do nothing."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"dc::{name}", fake)
    for name in _FAKES.keys() - set(_FUNCTIONS):
        # Otherwise dead code elimination drops them if no result is read, equal calls become one, and nothing keeps
        # their order.
        operator = getattr(torch.ops.dc, name).default
        torch.fx.node.has_side_effect(operator)
        mark_effectful(operator)
    torch.library.define("dc::parameter", "(Tensor shard, int ds_id, SymInt[] size, ScalarType dtype) -> Tensor")
    torch.library.impl("dc::parameter", "CompositeImplicitAutograd", _parameter)
    torch.library.register_autograd("dc::gather", _gather_backward, setup_context=_save_for_backward)
