"""Compiles a function once, on import: ranks forked afterwards share what PyTorch sets up at a first compilation.

These are Inductor's modules and its patterns of attention, which it traces. Threads would not survive the fork, so none
may start: there is no backward pass, Inductor compiles in this process, and tqdm has no monitor.
"""

from __future__ import annotations

import os
import threading

import torch
import tqdm


def _threads() -> int:
    """Counts the threads of this process, those of libraries too."""
    return len(os.listdir("/proc/self/task"))


before = _threads(), tqdm.tqdm.monitor_interval
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
torch.set_num_threads(1)
tqdm.tqdm.monitor_interval = 0
# With a build for CUDA, a derivative is taken by threads of autograd, without a GPU too.
for grad in (False,) if torch.backends.cuda.is_built() else (False, True):
    torch.compile(torch.nn.functional.softplus)(torch.ones(3, requires_grad=grad))
torch.compiler.reset()
torch._dynamo.utils.counters.clear()  # tests read them
tqdm.tqdm.monitor_interval = before[1]
if _threads() != before[0]:
    raise RuntimeError(f"Compiling started threads before ranks are forked: {threading.enumerate()}")
