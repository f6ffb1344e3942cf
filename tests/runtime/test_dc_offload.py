"""Tensors and shards that wait in host memory: values, memory, reuse, bounds, and what is answered to misuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from multiprocess import run_ranks
from torch import Tensor


def _runtime(**options: Any) -> tuple[Any, int]:
    from lightning_deepcompile.runtime import load_extension

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind = "process_group" if device.type == "cpu" else "nccl"
    runtime = load_extension().Runtime(group, group, device, communicator=kind, **options)
    return runtime, runtime.serial << 32


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _tensors() -> None:
    runtime, graph = _runtime(host_limit=1 << 20)
    runtime.setup.register_graph(graph, [])
    ops = torch.ops.dc
    host_bytes = []
    for step in range(50):
        for id_, shape in ((1, (100, 7)), (2, (3000,)), (3, ())):
            source = torch.randn(shape, device=_device(), requires_grad=id_ == 1)
            source = source.t() if source.dim() == 2 else source  # dense, but not contiguous
            expected = source.detach().clone()
            host = ops.wait_offload(ops.offload_tensor(source, graph, id_), graph, id_)
            with torch.no_grad():
                source.zero_()  # the memory may be used for something else
            back = ops.wait_reload(ops.reload_tensor(host, graph, id_), graph, id_)
            assert host.device.type == "cpu" and host.is_pinned() == torch.cuda.is_available()
            assert back.device.type == _device() and back.stride() == source.stride()
            assert torch.equal(back, expected), (step, id_)
        host_bytes.append(runtime.stats()["host_bytes"])
    assert host_bytes[-1] == host_bytes[1]  # buffers are reused

    # Whoever holds the host tensor keeps its values: its buffer is not given to somebody else.
    first = torch.full((512,), 1.0, device=_device())
    held = ops.wait_offload(ops.offload_tensor(first, graph, 5), graph, 5)
    ops.wait_reload(ops.reload_tensor(held, graph, 5), graph, 5)
    ops.wait_offload(ops.offload_tensor(first + 1, graph, 5), graph, 5)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert held.eq(1).all()
    for error, message, call in (
        (ValueError, "id 5 is offloaded already", lambda: ops.offload_tensor(first, graph, 5)),
        (ValueError, "id 9 is not offloaded", lambda: ops.wait_offload(first, graph, 9)),
        (ValueError, "id 9 is not offloaded", lambda: ops.reload_tensor(held, graph, 9)),
        (ValueError, "the tensor that offload_tensor returned", lambda: ops.reload_tensor(held, graph, 5)),
        (ValueError, "id 5 is not being reloaded", lambda: ops.wait_reload(held, graph, 5)),
        (ValueError, "graph .* is not registered", lambda: ops.offload_tensor(first, graph | 3, 6)),
        (torch.OutOfMemoryError, "at most 1048576 bytes", lambda: ops.offload_tensor(
            torch.zeros(1 << 19, device=_device()), graph, 6)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    runtime.reset()  # forgets what was never reloaded
    held = host = None
    runtime.memory.free_unused()
    assert runtime.stats()["host_bytes"] == 0
    runtime.setup.register_graph(graph, [])
    late = ops.wait_offload(ops.offload_tensor(first, graph, 5), graph, 5)
    runtime.close()
    assert late.eq(1).all()  # outlives the runtime


def test_tensors_come_back_as_they_were() -> None:
    run_ranks(_tensors, 1)


def _group_beyond_the_limit() -> None:
    runtime, graph = _runtime(host_limit=1 << 20)
    runtime.setup.register_graph(graph, [])
    ops = torch.ops.dc
    sources = [torch.randn(1 << 16, device=_device()) for _ in range(8)]  # twice as much as there may be
    for step in range(1, 3):
        hosts = ops.offload_tensors_fused(graph, sources)
        ops.wait_copies_fused(graph, hosts)
        assert runtime.stats()["stayed_tensors"] == 4 * step and runtime.stats()["host_bytes"] == 1 << 20
        back = ops.reload_tensors_fused(graph, hosts)
        ops.wait_copies_fused(graph, hosts)
        assert all(map(torch.equal, back, sources))
        del hosts
        runtime.memory.free_unused()
    runtime.close()


def test_a_group_beyond_the_limit_stays() -> None:
    run_ranks(_group_beyond_the_limit, 1)


def _parameters() -> None:
    runtime, base = _runtime()
    ops, empty = torch.ops.dc, torch.empty(0)
    shards = [torch.randn(64, 8, device=_device()) for _ in range(2)]
    flat = torch.randn(128, device=_device())
    values = [s.clone() for s in shards]
    for i, shard in enumerate([*shards, flat[:64], flat[64:]]):
        runtime.setup.register_param(base | i, f"p{i}", list(shard.shape), shard, torch.zeros_like(shard))
    runtime.setup.register_graph(base, [base | i for i in range(4)])

    def gathered(i: int) -> Tensor:
        ops.allgather_param(empty, base, base | i)
        full = ops.wait_allgather(empty, base, base | i).clone()
        ops.release_param(empty, base, base | i, 1)
        return full

    def offload(i: int) -> None:
        ops.allgather_param(empty, base, base | i)  # still reading the shard
        ops.offload_parameter(empty, base, base | i)
        ops.wait_allgather(empty, base, base | i)
        ops.release_param(empty, base, base | i, 1)
        runtime.passes.start_backward(True)
        ops.end_backward(base)  # by then at the latest its memory is gone
        assert shards[i].untyped_storage().nbytes() == 0

    offload(0)
    with pytest.raises(RuntimeError, match="'p0's shard was freed.*reload_parameter"):
        gathered(0)
    ops.offload_parameter(empty, base, base | 0)  # again: nothing to do
    ops.reload_parameter(empty, base, base | 0)
    ops.reload_parameter(empty, base, base | 0)
    assert torch.equal(gathered(0), values[0])
    assert runtime.stats()["offloaded_bytes"] == runtime.stats()["reloaded_bytes"] == 64 * 8 * 4
    offload(0)  # unchanged: not copied out again
    assert runtime.stats()["offloaded_bytes"] == 64 * 8 * 4
    ops.reload_parameter(empty, base, base | 0)
    runtime.gradients.finish_backward()
    shards[0].add_(1)  # as an optimizer does, and without telling the runtime
    offload(0)
    assert runtime.stats()["offloaded_bytes"] == 2 * 64 * 8 * 4
    ops.reload_parameter(empty, base, base | 0)
    assert torch.equal(gathered(0), values[0] + 1) and torch.equal(gathered(1), values[1])
    with pytest.raises(ValueError, match="'p2' shares its memory"):
        ops.offload_parameter(empty, base, base | 2)
    with pytest.raises(ValueError, match="does not belong to graph"):
        ops.offload_parameter(empty, base, base | 7)
    offload(1)
    runtime.reset()  # brings shards back
    assert torch.equal(shards[1], values[1])
    runtime.close()


def test_shards_leave_and_come_back() -> None:
    run_ranks(_parameters, 1)


def _asynchronous() -> float:
    """Share of the copies' time during which the device computed."""
    runtime, graph = _runtime()
    runtime.setup.register_graph(graph, [])
    ops = torch.ops.dc
    source, a = torch.randn(64 << 20, device="cuda"), torch.randn(4096, 4096, device="cuda")

    def timed(work: Any) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def copies() -> Tensor:
        return ops.offload_tensor(source, graph, 1)

    def compute() -> None:
        for _ in range(200):
            a @ a

    def back(host: Tensor) -> None:
        ops.wait_offload(host, graph, 1)
        ops.wait_reload(ops.reload_tensor(host, graph, 1), graph, 1)

    for _ in range(2):  # the first round pins memory
        back(copies())
        alone, computing = timed(lambda: back(copies())), timed(compute)
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        together = timed(lambda: (host := copies(), compute(), back(host)))
        torch.cuda.set_sync_debug_mode("default")
    return (alone + computing - together) / min(alone / 2, computing)


@pytest.mark.gpu
def test_copies_run_beside_compute() -> None:
    (overlap,) = run_ranks(_asynchronous, 1)
    assert overlap > 0.5, overlap
