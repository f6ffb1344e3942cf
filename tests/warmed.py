"""Compiles a function and traces a step, on import: ranks forked afterwards share what PyTorch sets up at first.

These are Inductor's modules, its patterns of attention, which it traces, and what operators return for fake tensors: a
quarter to a third of a rank's first trace. Threads would not survive the fork, so none may start: Inductor compiles in
this process, and tqdm has no monitor. The step is traced without ranks, as by `DeepCompileStrategy.estimate`.
"""

from __future__ import annotations

import os
import threading

import torch
import tqdm
from cases import CASES, LENGTH, ROWS

from lightning_deepcompile import CompileConfig, DeepCompileStrategy


def _threads() -> int:
    """Counts the threads of this process, those of libraries too."""
    return len(os.listdir("/proc/self/task"))


before = _threads(), tqdm.tqdm.monitor_interval
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
torch.set_num_threads(1)
tqdm.tqdm.monitor_interval = 0
torch.compile(torch.nn.functional.softplus)(torch.ones(3))
# With a build for CUDA, a derivative is taken by threads of autograd, without a GPU too.
if not torch.backends.cuda.is_built():
    torch.compile(torch.nn.functional.softplus)(torch.ones(3, requires_grad=True))
    strategy, batch = DeepCompileStrategy(compile=CompileConfig(region_backend="eager")), torch.ones(ROWS, LENGTH + 1)
    with torch.random.fork_rng():
        strategy.estimate(CASES["gpt"](), batch.long(), ranks=2, device="cpu")
torch.compiler.reset()
torch._dynamo.utils.counters.clear()  # tests read them
tqdm.tqdm.monitor_interval = before[1]
if _threads() != before[0]:
    raise RuntimeError(f"Compiling started threads before ranks are forked: {threading.enumerate()}")
