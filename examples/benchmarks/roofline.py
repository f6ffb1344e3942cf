"""The bound that the systems are held against, measured on the same machine in the same call.

An optimizer step of fully sharded training must compute, must move every parameter to every rank and every gradient
back to its shard at least once, and must then step the optimizer. Computing and moving can overlap, the optimizer
cannot:

    roofline = max(accumulation x forward_backward, gather + reduce) + optimizer

where

- ``forward_backward`` is a micro-batch through the same model in the compute dtype without any process group in use:
  every block compiled, head and loss compiled together. A GPU computes for some seconds before it is timed: under load
  its clock falls, and a step that trains never has the clock of a burst;
- ``gather`` and ``reduce`` are one all-gather and one reduce-scatter of all parameters in the compute dtype, one flat
  collective per block, nothing else running;
- ``optimizer`` is fused AdamW over this rank's share of the parameters in fp32; with ``--optimizer muon``, Muon on its
  share of the blocks' matrices, each of them on one rank alone, and AdamW on the rest; nothing is sent.

Of a mixture of experts ``forward_backward`` computes what the router sends to experts, so a token's own experts alone;
``gather``, ``reduce`` and ``optimizer`` are of the parameters of all experts, as sharded training moves and updates all
of them, also those that no token was sent to: in a step the optimizer reads a weight, its gradient and two states, and
writes the weight and the states, 28 bytes for each of a rank's parameters.

Each is the median of the measured steps on the slowest rank, since the ranks of a step wait for one another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from jobs import Case, Job
from meter import Recorder, StepMeter
from models import COMPUTE_DTYPE, Batches, build_model, make_optimizer
from runners import start_process_group
from transformers import PreTrainedModel

LOAD_S = 5.0
"""Seconds for which a GPU computes before it is timed."""


def run_roofline(job: Job, rank: int, recorder: Recorder) -> None:
    """Measures the parts that all cases share once, then forward and backward for every batch shape."""
    device = start_process_group(job, rank)
    shared = measure_communication(job, device) | {"optimizer_ms": measure_optimizer(job, device)}
    model = build_model(job.shape, device).to(COMPUTE_DTYPE[job.precision])
    step = compile_by_block(model)
    known: dict[tuple[int, int], dict[str, Any]] = {}
    for case in job.cases:
        if recorder.out_of_time(device):
            break
        recorder.start(case)
        shape = (case.seq, case.batch)
        if shape not in known:
            known[shape] = measure_compute(job, Case(*shape, 1), model, step, rank, device)
        recorder.save(case, known[shape] | shared)
    dist.destroy_process_group()


def compile_by_block(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compiles every block, and head with loss; returns tokens -> loss."""
    for block in model.model.layers:
        block.compile(dynamic=False)

    def head(hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return model.loss_function(model.lm_head(hidden), tokens, vocab_size=model.config.vocab_size)

    compiled = torch.compile(head, dynamic=False)
    return lambda tokens: compiled(model.model(input_ids=tokens).last_hidden_state, tokens)


def measure_compute(
    job: Job,
    case: Case,
    model: PreTrainedModel,
    step: Callable[[torch.Tensor], torch.Tensor],
    rank: int,
    device: torch.device,
) -> dict[str, Any]:
    """Times forward and backward of one micro-batch, on GPUs under sustained load."""
    (first,) = Batches(job.shape, case, 1, rank, device)
    until = math.inf  # not before it is compiled
    while device.type == "cuda" and time.perf_counter() < until:
        step(first).backward()
        model.zero_grad()
        torch.cuda.synchronize(device)
        until = min(until, time.perf_counter() + LOAD_S)
    meter = StepMeter(job, case, device, rank)
    meter.begin()
    for tokens in Batches(job.shape, case, meter.total, rank, device):
        loss = step(tokens)
        loss.backward()
        meter.add_loss(loss)
        model.zero_grad()
        meter.end_step()
    record = meter.record()
    return record | {"forward_backward_ms": median(record.pop("ms"))}


def measure_communication(job: Job, device: torch.device) -> dict[str, float]:
    """Times one pass of gathers and one of reductions over all blocks, with nothing beside them."""
    dtype = COMPUTE_DTYPE[job.precision]
    shards = [math.ceil(size / job.world) for size in block_sizes(job)]
    full = torch.randn(max(shards) * job.world, device=device, dtype=dtype)
    shard = torch.randn(max(shards), device=device, dtype=dtype)
    mean = dist.ReduceOp.AVG if job.device == "cuda" else dist.ReduceOp.SUM

    def gather() -> None:
        for size in shards:
            dist.all_gather_into_tensor(full[: size * job.world], shard[:size])

    def reduce() -> None:
        for size in shards:
            dist.reduce_scatter_tensor(shard[:size], full[: size * job.world], op=mean)

    times = {"gather_ms": _median_ms(gather, job, device), "reduce_ms": _median_ms(reduce, job, device)}
    moved = sum(shards) * (job.world - 1) * full.element_size()
    return times | {f"{name}_busbw_gbs": moved / times[f"{name}_ms"] / 1e6 for name in ("gather", "reduce")}


def block_sizes(job: Job) -> list[int]:
    """Parameters of the embedding, of each block, and of what follows the blocks."""
    model = build_model(job.shape, "meta")
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    embedding = model.model.embed_tokens.weight.numel()
    rest = sum(p.numel() for p in model.parameters()) - embedding - sum(blocks)
    return [embedding, *blocks, rest]


def measure_optimizer(job: Job, device: torch.device) -> float:
    """Times the optimizer on this rank's rows of every parameter, and on its share of those that need to be whole."""
    optimizer = make_optimizer(build_model(job.shape, "meta"), job.shape, job.optimizer)
    for group in optimizer.param_groups:
        shapes = [parameter.shape for parameter in group["params"]]
        if group.get("muon"):
            shapes = _share(shapes, job.world, dist.get_rank())
        else:
            shapes = [(math.ceil(rows / job.world), *rest) for rows, *rest in shapes]
        group["params"] = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    return _median_ms(optimizer.step, job, device)


def _share(shapes: Sequence[Sequence[int]], world: int, rank: int) -> list[Sequence[int]]:
    """The matrices of one rank, if the dearest are given out first, each to the rank that has least to multiply."""
    costs = [0] * world
    mine = []
    for shape in sorted(shapes, key=_products, reverse=True):
        owner = costs.index(min(costs))
        costs[owner] += _products(shape)
        if owner == rank:
            mine.append(shape)
    return mine


def _products(shape: Sequence[int]) -> int:
    return min(shape) ** 2 * max(shape)


def _median_ms(work: Callable[[], object], job: Job, device: torch.device) -> float:
    meter = StepMeter(job, Case(1, 1, 1), device, rank=-1)
    meter.begin()
    for _ in range(meter.total):
        work()
        meter.end_step()
    return median(meter.record()["ms"])
