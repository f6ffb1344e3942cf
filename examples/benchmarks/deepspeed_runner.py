"""Trains with DeepSpeed: ZeRO-3 in the plain loop its users write; eager, with compiled blocks, or with DeepCompile."""

from __future__ import annotations

import os
from collections.abc import Iterable

import deepspeed
import torch
import torch.distributed as dist
from deepspeed_setup import compiles_blocks, configuration, offloads_optimizer
from jobs import Job
from meter import Recorder, StepMeter
from models import LEARNING_RATE, Batches, adamw, block_class, build_model
from runners import start_process_group
from transformers import PreTrainedModel


def run_deepspeed(job: Job, rank: int, recorder: Recorder) -> None:
    """Trains the one case of a job."""
    (case,) = job.cases
    device = start_process_group(job, rank)
    engine = make_engine(job, build_model(job.shape, device))
    if not recorder.out_of_time(device):
        meter = StepMeter(job, case, device, rank)
        batches = iter(Batches(job.shape, case, meter.total * case.accumulation, rank, device))
        recorder.start(case)
        meter.begin()
        for _ in range(meter.total):
            for _ in range(case.accumulation):
                tokens = next(batches)
                loss = engine(input_ids=tokens, labels=tokens).loss
                engine.backward(loss)  # divides by the number of micro-batches
                engine.step()  # does nothing before the last of them
                meter.add_loss(loss / case.accumulation)
            meter.end_step()
        record = meter.record()
        record["dynamo_graphs"] = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
        recorder.save(case, record)
    engine.destroy()
    dist.destroy_process_group()


def make_engine(job: Job, model: PreTrainedModel) -> deepspeed.DeepSpeedEngine:
    """Shards the model, and compiles what is to be compiled."""
    if compiles_blocks(job.system):
        deepspeed.utils.set_z3_leaf_modules(model, [block_class(job.shape)])
    optimizer = cpu_adamw(model.parameters()) if offloads_optimizer(job.system) else adamw(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(job))
    if compiles_blocks(job.system):
        for block in model.model.layers:
            block.forward = torch.compile(block.forward, dynamic=False)  # block.compile() would compile the hooks too
    if job.system.kind == "deepspeed-deepcompile":
        engine.compile()
    return engine


def cpu_adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every system, as DeepSpeed has it for states in host memory."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return deepspeed.ops.adam.DeepSpeedCPUAdam(parameters, lr=LEARNING_RATE, weight_decay=0.0, adamw_mode=True)
