"""The documented usage of the `dc` functions, and what they answer to misuse."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from multiprocess import join, run_ranks
from torch import Tensor, nn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _shard(full: Tensor, rank: int, world: int) -> Tensor:
    """A flat shard, zero behind the end of the parameter."""
    size = -(-full.numel() // world)
    padded = torch.cat([full.detach().flatten(), full.new_zeros(size * world - full.numel())])
    return padded[rank * size : (rank + 1) * size].clone()


class _Gathered(torch.autograd.Function):
    """x @ w.T, with `w` gathered around each use, and its gradient reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ds_id: int) -> Tensor:
        ctx.ds_id = ds_id
        ctx.save_for_backward(x)
        w = torch.ops.dc.allgather_param(torch.empty(0), 0, ds_id)
        y = x @ torch.ops.dc.wait_allgather(w, 0, ds_id).T
        torch.ops.dc.release_param(torch.empty(0), 0, ds_id, 1)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        w = torch.ops.dc.allgather_param(torch.empty(0), 0, ctx.ds_id)
        x = grad @ torch.ops.dc.wait_allgather(w, 0, ctx.ds_id)
        torch.ops.dc.release_param(torch.empty(0), 0, ctx.ds_id, 1)
        empty = torch.ops.dc.reduce_grad(grad.T @ ctx.saved_tensors[0], 0, ctx.ds_id)
        assert empty.shape == (0,)
        return x, None


class _Net(nn.Module):
    """Two layers; `sharded` ones take their weights from the runtime."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(5, 7))
        self.second = nn.Parameter(torch.randn(3, 5))
        self.sharded = sharded

    def forward(self, batch: Any) -> Any:
        x = batch.inputs
        if self.sharded:
            return types.SimpleNamespace(value=_Gathered.apply(_Gathered.apply(x, 0).tanh(), 1))
        return types.SimpleNamespace(value=(x @ self.first.T).tanh() @ self.second.T)


def _criterion(outputs: Any, labels: Tensor) -> Tensor:
    return (outputs.value - labels).square().mean()


def _batches(rank: int | None, device: torch.device | None = None) -> Iterator[Any]:
    """This rank's rows of every batch, or all rows."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        inputs, labels = torch.randn(4, 7, generator=generator), torch.randn(4, 3, generator=generator)
        rows = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
        inputs, labels = inputs[rows].to(device), labels[rows].to(device)
        yield types.SimpleNamespace(inputs=inputs.requires_grad_(), labels=labels)


class _Sgd(torch.optim.SGD):
    """Keeps gradient buffers in place."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


def _runtime_document(device_type: str) -> list[Tensor]:
    from lightning_deepcompile import dc
    from lightning_deepcompile.runtime.dc import register_graph_z3, register_z3_param

    num_epochs, criterion = 2, _criterion
    model = _Net(sharded=True)

    # Initialize distributed
    device = join(device_type)

    param_shards = [_shard(p, dist.get_rank(), dist.get_world_size()).to(device) for p in model.parameters()]
    grad_buffers = [torch.zeros_like(s) for s in param_shards]
    optimizer = _Sgd(param_shards, lr=0.1)
    for shard, buffer in zip(param_shards, grad_buffers, strict=True):
        shard.grad = buffer

    # Configure DeepCompile
    config = {
        "symmetric_memory": True,  # Use symmetric memory for allgather
        "double_buffer": True,  # Pipeline reduce communication
        "free_activation_threshold": 10_000_000,  # Free activations > 10M elements
        "sync_before_reduce": False,
        "sync_after_reduce": False,
        "sync_before_allgather": False,
        "sync_after_allgather": False,
    }

    # Initialize runtime with process group
    pg = dist.new_group()
    dc.init(pg, config, initial_reduce_bucket_size=100_000_000)

    # Register model parameters (ZeRO-3 example)
    model_params = []
    for i, (param, grad_buf) in enumerate(zip(model.parameters(), grad_buffers, strict=True)):
        register_z3_param(
            ds_id=i, ds_shape=param.shape, ds_tensor=param_shards[i], grad_buffer=grad_buf, persistent=False
        )
        model_params.append(i)

    # Register compiled graph
    register_graph_z3(graph_id=0, ds_ids=model_params)

    # Training loop with lifecycle management
    for _epoch in range(num_epochs):
        for batch in _batches(dist.get_rank(), device):
            # Forward pass lifecycle
            dc.start_forward()
            outputs = model(batch)
            dc.end_forward()

            # Backward pass lifecycle
            loss = criterion(outputs, batch.labels)
            dc.start_backward(update=True)  # update=True for optimizer step
            loss.backward()
            dc.end_backward(graph_id=0)

            # Optimizer step
            optimizer.step()
            optimizer.zero_grad()

    sample_batch = batch
    before = dc._front.runtime.stats()["gathers"]

    # Profiling mode (dry run without communication)
    dc.enable_profiling(True)
    dc.start_forward()
    outputs = model(sample_batch)  # Profile without actual allgather
    dc.end_forward()
    assert dc.is_profiling() and outputs.value.shape == (2, 3)
    dc.enable_profiling(False)
    assert not dc.is_profiling() and dc._front.runtime.stats()["gathers"] == before

    act1, act2, act3 = (torch.zeros(shape, device=device) for shape in (10_000_000, 9_999_999, (5000, 2001)))
    act3.requires_grad_()

    # Free large activations manually
    activations = [act1, act2, act3]  # Large intermediate tensors
    dc.free_tensors(activations)  # Frees if size > threshold
    assert [t.numel() for t in (act1, act2, act3)] == [0, 9_999_999, 0]

    # Cleanup options
    dc.reset()  # Clear graph executors (e.g., before recompilation)
    dc.cleanup()  # Full teardown (end of training)
    dc.reset()
    dc.cleanup()
    return [shard.cpu() for shard in param_shards]


@pytest.mark.parametrize("device_type", DEVICES)
def test_usage_of_the_runtime_document(device_type: str) -> None:
    results = run_ranks(_runtime_document, 2, device_type)
    model = _Net(sharded=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batch in _batches(None):
            optimizer.zero_grad()
            _criterion(model(batch), batch.labels).backward()
            optimizer.step()
    for rank, shards in enumerate(results):
        for shard, param in zip(shards, model.parameters(), strict=True):
            torch.testing.assert_close(shard, _shard(param, rank, 2), rtol=1e-5, atol=1e-7)


class _WithWeight(torch.autograd.Function):
    """x @ w.T for a weight that is gathered already; reduces its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, w = ctx.saved_tensors
        torch.ops.dc.reduce_grad(grad.T @ x, 0, 0)
        return grad @ w, None


def _executor_document(device_type: str) -> tuple[Tensor, Tensor, dict[str, int]]:
    from lightning_deepcompile import dc

    torch._dynamo.register_backend(lambda gm, _: gm.forward, name="deepspeed")
    device = join(device_type)
    rank, model = dist.get_rank(), _WithWeight.apply
    original_param_shape = torch.Size((5, 7))
    fulls = [torch.randn(original_param_shape, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    param_shards = [_shard(full, rank, 2).to(device) for full in fulls]
    model_params = [(shard, torch.zeros_like(shard)) for shard in param_shards]
    inputs = torch.full((2, 7), 1.0 + rank, dtype=torch.float16, device=device, requires_grad=True)

    # Initialize DeepSpeed DeepCompile
    config = {
        "symmetric_memory": False,
        "double_buffer": True,
        "free_activation_threshold": 1024 * 1024,
        "sync_before_reduce": False,
        "sync_after_reduce": False,
        "sync_before_allgather": False,
        "sync_after_allgather": False,
    }
    process_group = dist.new_group(ranks=list(range(dist.get_world_size())))
    dc.init(process_group, config, initial_reduce_bucket_size=100_000_000)

    # Register ZeRO-3 partitioned parameters
    for param_id, (param_shard, grad_buffer) in enumerate(model_params):
        dc.register_z3_param(
            ds_id=param_id,
            ds_shape=original_param_shape,
            ds_tensor=param_shard,  # Partitioned tensor on this rank
            grad_buffer=grad_buffer,
            persistent=False,  # Set True for frequently used params
        )

    # Register compiled graph
    dc.register_graph_z3(graph_id=0, ds_ids=list(range(len(model_params))))

    # Mark persistent parameters (stays gathered in memory)
    dc.set_persistent(ds_id=0)  # First layer kept resident

    # Compiled forward/backward with DeepCompile ops
    @torch.compile(backend="deepspeed")
    def training_step(inputs: Tensor) -> Tensor:
        dc.start_forward()

        # Prefetch parameters before module execution
        torch.ops.dc.prefetch_params_fused(
            graph_id=0,
            params=[torch.empty(0) for _ in range(3)],
            ids=[0, 1, 2],
            dtypes=[torch.float16, torch.float16, torch.bfloat16],
        )

        # Allgather parameter for computation
        param_0 = torch.ops.dc.allgather_param(param_shards[0], graph_id=0, ds_id=0, dtype=torch.float16)
        param_0 = torch.ops.dc.wait_allgather(param_0, graph_id=0, ds_id=0)

        # Forward computation
        output = model(inputs, param_0)

        # Release parameter memory after use
        dummy = torch.empty(0)
        dummy = torch.ops.dc.release_param(dummy, graph_id=0, ds_id=0, n_users=1)

        dc.end_forward()

        # Backward pass
        dc.start_backward(update=True)
        loss = output.sum()
        loss.backward()

        # Gradient reduce happens automatically via hooks
        torch.ops.dc.end_backward(graph_id=0)

        return loss

    loss = training_step(inputs)
    training_step(inputs)
    stats = dc._front.runtime.stats()
    expected = (inputs.detach() @ fulls[0].half().to(device).T).sum()
    assert loss.item() == expected.item()

    # Optional: Offload activations to CPU
    activation = torch.randn(1024, 1024, device=device)
    kept = activation.clone()
    offloaded = torch.ops.dc.offload_tensor(activation, graph_id=0, id=100)
    offloaded = torch.ops.dc.wait_offload(offloaded, graph_id=0, id=100)

    # Reload when needed
    reloaded = torch.ops.dc.reload_tensor(offloaded, graph_id=0, id=100)
    reloaded = torch.ops.dc.wait_reload(reloaded, graph_id=0, id=100)
    assert torch.equal(reloaded, kept) and reloaded.data_ptr() != activation.data_ptr()

    # Cleanup
    dc.cleanup()
    return model_params[0][1].cpu(), torch.zeros(0), stats


@pytest.mark.parametrize("device_type", DEVICES)
def test_usage_of_the_executor_document(device_type: str) -> None:
    results = run_ranks(_executor_document, 2, device_type)
    mean = torch.full((5, 7), 3.0)  # two rows of 1 and two rows of 2, over two ranks
    for rank, (grad, _, stats) in enumerate(results):
        assert torch.equal(grad, _shard(mean, rank, 2))
        # Both steps: one fused group for three parameters in the first; all anew in the second, after the update.
        assert stats["gathers"] == 6 and stats["reductions"] == 2


def _traced() -> None:
    from lightning_deepcompile import dc

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dc.init(dist.group.WORLD, {"free_activation_threshold": 1}, 1000)
    ops = torch.ops.dc
    weights = [torch.randn(4, 6), torch.randn(5, 4)]
    for i, weight in enumerate(weights):
        dc.register_z3_param(i, weight.shape, weight, torch.zeros_like(weight))
    dc.register_graph_z3(0, [0, 1])

    def step(x: Tensor, shards: list[Tensor], empty: Tensor) -> tuple[Tensor, ...]:
        ops.prefetch_params_fused(0, [], [0, 1], [torch.float64, torch.float64])
        dones = []
        for i in range(2):
            w = ops.wait_allgather(ops.allgather_param(shards[i], 0, i, torch.float64), 0, i)
            x = torch.sin(x @ w.T)
            dones.append(ops.release_param(empty, 0, i, 1))
        host = ops.wait_offload(ops.offload_tensor(x, 0, 7), 0, 7)
        y = ops.wait_reload(ops.reload_tensor(host, 0, 7), 0, 7)
        grads = [ops.reduce_grad(torch.ones_like(w), 0, i) for i, w in enumerate(shards)]
        ops.offload_parameter(shards[0], 0, 0)
        ops.reload_parameter(shards[0], 0, 0)
        ops.end_backward(0)
        return (y, *dones, *grads)

    x = torch.randn(3, 6, dtype=torch.float64)
    results = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        dc._front.runtime.reset_stats()
        dc.start_forward()
        dc.start_backward(update=True)
        results.append(run(x, weights, torch.empty(0)))
        stats = dc._front.runtime.stats()
        # The prefetch gathers both at once; nothing without a result was dropped.
        assert (stats["gather_groups"], stats["gather_hits"], stats["reductions"]) == (1, 2, 2), stats
        assert stats["reloaded_bytes"] == 3 * 5 * 8 + 4 * 6 * 4
        dc.clear_all_gathered_params()
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled) and eager.shape == compiled.shape
    dc.cleanup()


def test_operators_trace_and_keep_their_effects() -> None:
    run_ranks(_traced, 1)


def test_importing_costs_nothing_and_exit_is_clean_without_cleanup() -> None:
    code = """
import sys, torch, torch.distributed as dist
import lightning_deepcompile
assert "lightning_deepcompile.runtime" not in sys.modules
from lightning_deepcompile import dc
assert "lightning_deepcompile._C" not in sys.modules
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dc.init(dist.group.WORLD, {}, 1000)
dc.register_z3_param(0, [4], torch.ones(4), torch.zeros(4))
dc.register_graph_z3(0, [0])
dc.start_forward()
torch.ops.dc.allgather_param(torch.empty(0), 0, 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
