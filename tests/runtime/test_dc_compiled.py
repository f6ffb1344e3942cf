"""The `dc` operators in functions that Inductor compiles: what is kept is not overwritten, what is done stays done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from multiprocess import run_ranks
from torch import Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPE = (24, 24)


def _open(device_type: str, count: int, **config: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    """A runtime of one rank, with `count` parameters; their shards and gradients."""
    from lightning_deepcompile import dc

    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    dc.init(dist.group.WORLD, config, 1200, device=device)  # two gradients fit together
    torch.manual_seed(0)
    shards = [torch.randn(SHAPE, device=device) for _ in range(count)]
    grads = [torch.full_like(shard, torch.nan) for shard in shards]
    for i in range(count):
        dc.register_z3_param(i, SHAPE, shards[i], grads[i], persistent=i == 0)
    dc.register_graph_z3(0, range(count))
    return dc, shards, grads


def _compile(function: Any) -> Any:
    return torch.compile(function, backend="inductor", fullgraph=True)


def _reductions(device_type: str) -> None:
    dc, (x, *_), grads = _open(device_type, 4)
    ops = torch.ops.dc

    def step(x: Tensor) -> Tensor:
        for i in range(3):  # each can have the memory of the one before
            ops.reduce_grad(x.sin() * (i + 1), 0, i)
        tied = x.cos() + 1
        ops.reduce_grad(tied, 0, 3)
        ops.reduce_grad(tied, 0, 3)
        return x.tanh() @ x

    step = _compile(step)
    for _ in range(2):
        for micro in range(2):
            dc.start_backward(update=micro == 1)
            step(x)
            dc.end_backward(0)
        for i in range(3):
            torch.testing.assert_close(grads[i], 2 * x.sin() * (i + 1))
        torch.testing.assert_close(grads[3], 4 * (x.cos() + 1))
        dc.start_forward()
    dc.cleanup()


@pytest.mark.parametrize("device_type", DEVICES)
def test_every_gradient_arrives(device_type: str) -> None:
    run_ranks(_reductions, 1, device_type)


def _gathers(device_type: str) -> None:
    dc, shards, _ = _open(device_type, 3)
    ops, empty, runtime = torch.ops.dc, torch.empty(0), dc._front.runtime

    def step(x: Tensor, shards: list[Tensor], empty: Tensor) -> Tensor:
        ops.prefetch_params_fused(0, [], [0, 1, 2])
        for i in (0, 1, 2, 1):
            w = ops.wait_allgather(ops.allgather_param(shards[i], 0, i), 0, i)
            ops.release_param(empty, 0, i, 2 if i == 1 else 1)  # Inductor may compute with it later
            x = (x @ w).sin() + w.tanh()
        return x @ x

    def expected(x: Tensor, shards: list[Tensor]) -> Tensor:
        for i in (0, 1, 2, 1):
            x = (x @ shards[i]).sin() + shards[i].tanh()
        return x @ x

    compiled, x = _compile(step), torch.randn_like(shards[0])
    values = [shard.clone() for shard in shards]
    for _ in range(2):
        for _ in range(2):  # in the second one the first parameter is there
            dc.start_forward()
            torch.testing.assert_close(compiled(x, shards, empty), expected(x, values), rtol=1e-4, atol=1e-4)
            dc.end_forward()
            kept = ops.wait_allgather(ops.allgather_param(shards[0], 0, 0), 0, 0)
            assert torch.equal(kept, values[0]) and all(map(torch.equal, shards, values))
            for i in (1, 2):
                with pytest.raises(RuntimeError, match="is not gathered"):
                    ops.wait_allgather(empty, 0, i)
        dc.clear_all_gathered_params()
    assert runtime.stats()["gathers"] == 2 * (3 + 2)
    dc.cleanup()


@pytest.mark.parametrize("device_type", DEVICES)
def test_gathered_parameters_stay_as_they_are(device_type: str) -> None:
    run_ranks(_gathers, 1, device_type)


def _copies(device_type: str) -> None:
    dc, (x, *_), _ = _open(device_type, 1)
    ops = torch.ops.dc

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        away = x.sin()
        host = ops.offload_tensor(away.t(), 0, 7)
        host = ops.wait_offload(host, 0, 7)
        for _ in range(3):  # takes any memory that there is
            x = (x @ x / 24).tanh()
        back = ops.wait_reload(ops.reload_tensor(host, 0, 7), 0, 7)
        for _ in range(3):
            x = (x @ x / 24).tanh()
        return back, x

    eager = step(x)
    assert torch.equal(eager[0], x.sin().t())
    compiled = _compile(step)
    for _ in range(3):
        for one, other in zip(compiled(x), eager, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    dc.cleanup()


@pytest.mark.parametrize("device_type", DEVICES)
def test_what_leaves_comes_back_as_it_was(device_type: str) -> None:
    run_ranks(_copies, 1, device_type)


class _Gathered(torch.autograd.Function):
    """x @ w.T, with `w` gathered around each use, and its gradient reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, ds_id: int) -> Tensor:
        ctx.ds_id = ds_id
        ctx.save_for_backward(x, shard)
        w = torch.ops.dc.allgather_param(shard, 0, ds_id)
        y = x @ torch.ops.dc.wait_allgather(w, 0, ds_id).T
        torch.ops.dc.release_param(x.new_empty(0), 0, ds_id, 1)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, shard = ctx.saved_tensors
        w = torch.ops.dc.allgather_param(shard, 0, ctx.ds_id)
        x_grad = grad @ torch.ops.dc.wait_allgather(w, 0, ctx.ds_id)
        torch.ops.dc.release_param(x.new_empty(0), 0, ctx.ds_id, 1)
        torch.ops.dc.reduce_grad(grad.T @ x, 0, ctx.ds_id)
        return x_grad, None, None


def _backward(device_type: str) -> None:
    dc, shards, grads = _open(device_type, 3)

    def forward(x: Tensor, shards: list[Tensor]) -> Tensor:
        for i in (0, 1, 2):
            x = _Gathered.apply(x, shards[i], i).tanh()
        return x

    compiled = _compile(forward)
    for _ in range(2):
        x = torch.randn(4, SHAPE[1], device=shards[0].device, requires_grad=True)
        dc.start_forward()
        y = compiled(x, shards)
        dc.end_forward()
        dc.start_backward(update=True)
        y.square().sum().backward()
        dc.end_backward(0)
        leaves = [shard.clone().requires_grad_() for shard in shards]
        (same := x.detach().clone().requires_grad_())
        z = same
        for leaf in leaves:
            z = (z @ leaf.T).tanh()
        z.square().sum().backward()
        torch.testing.assert_close(x.grad, same.grad, rtol=1e-4, atol=1e-4)
        for grad, leaf in zip(grads, leaves, strict=True):
            torch.testing.assert_close(grad, leaf.grad, rtol=1e-4, atol=1e-4)
        assert dc._front.runtime.stats()["reductions"] % 3 == 0
    dc.cleanup()


@pytest.mark.parametrize("device_type", DEVICES)
def test_a_compiled_backward_pass_reduces(device_type: str) -> None:
    run_ranks(_backward, 1, device_type)


def _frees(device_type: str) -> None:
    dc, (x, *_), grads = _open(device_type, 2, free_activation_threshold=1)
    ops = torch.ops.dc

    def step(x: Tensor) -> Tensor:
        ops.free_tensors([x.sin()])
        return x

    with pytest.raises(Exception, match="free_tensors cannot be compiled.*Call lightning_deepcompile.dc.free_tensors"):
        _compile(step)(x)

    @torch.compile
    def documented(x: Tensor) -> Tensor:
        activation = x.sin()
        y = activation + 1
        dc.free_tensors([activation])
        return y * 2

    torch.testing.assert_close(documented(x), 2 * (x.sin() + 1))

    # A gradient that was handed over by itself is a copy; one of a group is in use until it is reduced.
    dc.start_backward(update=True)
    alone, grouped = torch.ones_like(x), torch.full_like(x, 2)
    ops.reduce_grad(alone, 0, 0)
    dc.free_tensors([alone])
    ops.reduce_grads_fused(0, [grouped], [1])
    with pytest.raises(ValueError, match="handed over to be reduced. Call end_backward first"):
        dc.free_tensors([grouped])
    dc.end_backward(0)
    assert grads[0].eq(1).all() and grads[1].eq(2).all()
    dc.free_tensors([grouped])
    assert alone.numel() == 0 and grouped.numel() == 0

    host = ops.offload_tensor(x, 0, 5)
    dc.free_tensors([host])
    host = ops.wait_offload(host, 0, 5)
    with pytest.raises(ValueError, match="offloaded. Call reload_tensor"):
        dc.free_tensors([host])
    back = ops.reload_tensor(host, 0, 5)
    with pytest.raises(ValueError, match="offloaded. Call reload_tensor"):
        dc.free_tensors([back])
    assert torch.equal(ops.wait_reload(back, 0, 5), x)
    dc.free_tensors([host, back])
    assert host.numel() == 0 and back.numel() == 0
    dc.cleanup()


@pytest.mark.parametrize("device_type", DEVICES)
def test_what_is_in_use_is_not_freed(device_type: str) -> None:
    run_ranks(_frees, 1, device_type)
