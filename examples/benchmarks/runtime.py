"""Micro-benchmark of the runtime: one layer's communication against flat collectives, host time, offloading.

    python examples/benchmarks/runtime.py                                     # all GPUs, a layer of Llama-3-8B
    python examples/benchmarks/runtime.py --device cpu --world 2 --divide 16  # the same, small, on gloo

Each number is the median over the repetitions on the slowest rank. ``of flat`` compares with one collective of torch's
process group over the same bytes in one tensor; ``of plain`` with a plain copy from and to pinned memory. On GPUs,
tables compare gathers by NCCL's kernels and by copy engines, and copies to and from host memory, alone and beside
matmuls; and ways to widen gradients. ``--only copies`` prints one table alone.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import socket
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import copying
import merging
import symmetric
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from lightning_deepcompile.runtime import load_extension

LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
LAYER += [(4096,), (4096,)]
"""The parameters of one transformer block of Llama-3-8B."""


class Stopwatch:
    """Times calls on the device (CPU: on the host), slowest rank, median of `repeat` after `warmup`."""

    def __init__(self, device: torch.device, warmup: int, repeat: int) -> None:
        self._device, self._warmup, self._repeat = device, warmup, repeat

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """Time from the call until the device has done what it queued."""
        for _ in range(self._warmup):
            call()
        times = [self._once(call) for _ in range(self._repeat)]
        slowest = torch.tensor(times, device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return median(slowest.tolist())

    def _once(self, call: Callable[[], Any]) -> float:
        if self._device.type != "cuda":
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)


class Layer:
    """One block's parameters, registered with a runtime."""

    def __init__(self, runtime: Any, device: torch.device, world: int, divide: int) -> None:
        self.runtime, self.graph = runtime, runtime.serial << 32
        shapes = [tuple(size // divide for size in shape) for shape in LAYER]
        self.ids = [self.graph | i for i in range(len(shapes))]
        self.grads = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
        rows = [(-(-grad.shape[0] // world), *grad.shape[1:]) for grad in self.grads]
        ends = list(itertools.accumulate(-(-math.prod(shape) // 128) * 128 for shape in rows))
        block = self.grads[0].new_zeros(ends[-1])  # one after the other, as the strategy has them
        for id_, grad, shape, start in zip(self.ids, self.grads, rows, [0, *ends], strict=False):
            shard = block[start : start + math.prod(shape)].view(shape)
            runtime.setup.register_param(id_, f"p{id_ - self.graph}", list(grad.shape), shard, torch.zeros_like(shard))
        runtime.setup.register_graph(self.graph, self.ids)
        self.numel = sum(grad.numel() for grad in self.grads)

    def gather(self) -> None:
        """One grouped gather, waited for and released."""
        torch.ops.dc.prefetch_params_fused(self.graph, [], self.ids)
        torch.ops.dc.wait_allgather_fused(self.graph, self.ids)
        torch.ops.dc.release_params_fused(self.graph, self.ids)

    def reduce(self) -> None:
        """One grouped reduction, complete."""
        self.runtime.gradients.start_backward(self.ids)
        torch.ops.dc.reduce_grads_fused(self.graph, self.grads, self.ids)
        self.runtime.gradients.finish_backward()


def measure_wire(layer: Layer, watch: Stopwatch, device: torch.device, world: int) -> list[tuple[str, float, float]]:
    """The layer's collectives, and flat ones of the same bytes."""
    whole = torch.zeros(-(-layer.numel // world) * world, device=device, dtype=torch.bfloat16)
    part = whole.chunk(world)[0].clone()
    gather, flat_gather = (
        watch.milliseconds(call) for call in (layer.gather, lambda: dist.all_gather_into_tensor(whole, part))
    )
    # gloo has no average; the runtime divides afterwards, which is part of its time.
    op = dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM
    reduce, flat_reduce = (
        watch.milliseconds(call) for call in (layer.reduce, lambda: dist.reduce_scatter_tensor(part, whole, op=op))
    )
    return [("gather of a layer", gather, flat_gather), ("reduction of a layer", reduce, flat_reduce)]


def gather_together(whole: list[Tensor], parts: list[Tensor], device: torch.device) -> None:
    """Does the work of `prefetch_params_fused` with torch's process group."""
    with dist._coalescing_manager(device=device):
        for tensor, part in zip(whole, parts, strict=True):
            dist.all_gather_into_tensor(tensor, part)


def measure_host(layer: Layer, device: torch.device, repeat: int) -> dict[str, float]:
    """Microseconds of host time per operator call, with an empty queue before each round."""
    steps: dict[str, Callable[[], Any]] = {
        "prefetch_params_fused": lambda: torch.ops.dc.prefetch_params_fused(layer.graph, [], layer.ids),
        "wait_allgather_fused": lambda: torch.ops.dc.wait_allgather_fused(layer.graph, layer.ids),
        "release_params_fused": lambda: torch.ops.dc.release_params_fused(layer.graph, layer.ids),
    }
    if device.type == "cuda":  # gloo cannot group
        parts = [grad.new_zeros(-(-grad.numel() // dist.get_world_size())) for grad in layer.grads]
        whole = [part.new_empty(part.numel() * dist.get_world_size()) for part in parts]
        steps["torch's grouped all-gather"] = lambda: gather_together(whole, parts, device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeat):
        if device.type == "cuda":
            torch.cuda.synchronize()
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(1e6 * (time.perf_counter() - start))
    return {name: median(values) for name, values in times.items()}


def measure_offload(layer: Layer, watch: Stopwatch, device: torch.device) -> list[tuple[str, float, float]]:
    """Out and in again, against plain copies."""
    source = layer.grads[4]
    plain = torch.empty(source.shape, dtype=source.dtype, pin_memory=device.type == "cuda")
    ops, graph = torch.ops.dc, layer.graph

    def round_trip() -> Tensor:
        host = ops.wait_offload(ops.offload_tensor(source, graph, 1), graph, 1)
        return ops.wait_reload(ops.reload_tensor(host, graph, 1), graph, 1)

    def plain_round_trip() -> None:
        plain.copy_(source, non_blocking=True)
        source.copy_(plain, non_blocking=True)

    return [("offload and reload", watch.milliseconds(round_trip), watch.milliseconds(plain_round_trip))]


def run(rank: int, world: int, port: int, args: argparse.Namespace) -> None:
    """One rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    measure(rank, device, world, args)
    gc.collect()  # whoever holds a group of gloo's keeps its threads, which may drop tensors when Python is gone
    dist.destroy_process_group()


def measure(rank: int, device: torch.device, world: int, args: argparse.Namespace) -> None:
    """Prints what `args` ask for, on the first rank."""
    runtime = load_extension().Runtime(dist.group.WORLD, dist.group.WORLD, device)
    layer, watch = Layer(runtime, device, world, args.divide), Stopwatch(device, 5, args.repeat)
    parts = {"summary": lambda: summary(layer, watch, device, world, args.repeat)}
    if device.type == "cuda":
        parts |= gpu_tables(layer, watch, device, world, args.divide)
    for name in [args.only] if args.only else parts:
        lines = parts[name]()
        if rank == 0:
            print("\n".join([*lines, ""] if device.type == "cuda" else lines), flush=True)
    runtime.close()


def summary(layer: Layer, watch: Stopwatch, device: torch.device, world: int, repeat: int) -> list[str]:
    """Lines on a layer's communication, host time and offloading."""
    wire = measure_wire(layer, watch, device, world)
    host, offload = measure_host(layer, device, repeat), measure_offload(layer, watch, device)
    mib, name = layer.numel * 2 / 2**20, layer.runtime.communicator
    return [
        f"{world} ranks on {device.type}, {name}, {len(LAYER)} parameters, {mib:.1f} MiB bfloat16",
        *(f"{name:24} {ours:9.3f} ms  {flat / ours:5.2f} of flat ({flat:.3f} ms)" for name, ours, flat in wire),
        *(f"{name:24} {ours:9.3f} ms  {flat / ours:5.2f} of plain ({flat:.3f} ms)" for name, ours, flat in offload),
        *(f"{name:26} {microseconds:7.1f} us on the host" for name, microseconds in host.items()),
    ]


def gpu_tables(
    layer: Layer, watch: Stopwatch, device: torch.device, world: int, divide: int
) -> dict[str, Callable[[], list[str]]]:
    """The functions that measure each table, by the name that ``--only`` takes."""
    shapes = [tuple(size // divide for size in shape) for shape in LAYER]
    between = {"gathers": lambda: symmetric.table(shapes, device, watch.milliseconds)}
    return (between if world > 1 else {}) | {
        "copies": lambda: copying.table(layer.graph, device, watch.milliseconds),
        "merges": lambda: merging.table(layer.numel // world, device, watch.milliseconds),
    }


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--world", type=int, default=torch.cuda.device_count() if cuda else 2, help="number of ranks")
    parser.add_argument("--divide", type=int, default=1, help="divide every size of the layer by this")
    parser.add_argument("--repeat", type=int, default=30, help="measured repetitions")
    parser.add_argument("--only", choices=["gathers", "copies", "merges"], help="print one table")
    args = parser.parse_args()
    if args.only and args.device != "cuda":
        parser.error(f"--only {args.only} needs GPUs")
    if args.only == "gathers" and args.world == 1:
        parser.error(f"--only {args.only} needs more than one rank")
    if args.world < 1 or args.divide < 1 or args.repeat < 1 or args.divide > 1024:
        parser.error("--world and --repeat must be positive, --divide between 1 and 1024")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run, (args.world, port, args), args.world)


if __name__ == "__main__":
    main()
