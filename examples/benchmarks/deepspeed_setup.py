"""DeepSpeed's configuration, the environment of its workers, and a check whether it can run; imports no torch.

The configuration is what the documentation says is fast, or else lets DeepSpeed do what the other systems do, no more:

- bf16 parameters, gradients reduced in bf16, fp32 master weights (which start as the rounded bf16 weights: ZeRO-3 keeps
  no other copy). Gradients of one micro-batch stay in bf16, as is DeepSpeed's default; those of several are added up in
  fp32, as in the other systems.
- ``overlap_comm`` and ``contiguous_gradients``. A bucket of gradients, and what is prefetched, is one block: DeepSpeed
  itself would prefetch 5e7 elements, less than a matrix of Llama-3-8B, and fill a bucket of 5e8, more than two blocks.
- ``stage3_param_persistence_threshold`` is 10 x hidden, as Transformers sets it: norms are not partitioned.
- Nothing is clipped (by default DeepSpeed clips the norm to 1), though ZeRO-3 computes the norm all the same. The
  throughput timer is off: it would wait for the device in every step.
- ``compile=true``: blocks are leaf modules, so that ZeRO-3's hooks run at their boundaries alone and the parameters of
  a block are gathered together, and each block's ``forward`` is compiled, without hooks. ``engine.compile()`` would
  break the graph of the model at every hook. PyTorch's own ``linear`` is kept: ZeRO-3's variant is for eager code, so
  that it keeps no gathered weights for backward, and compiled code keeps none either.
- ZeRO-Offload steps ``DeepSpeedCPUAdam``; memory is pinned, and the ranks share the cores.

Options after ``@`` change it: names of ``zero_optimization`` as they are (``reduce_bucket_size=1e8``), others with
their section (``data_types.grad_accum_dtype=bf16``, ``compile.offload_opt_states=true``). ``offload_optimizer=cpu`` and
``offload_param=cpu`` name a device.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from jobs import Job, System

_IMPORT_LIMIT_S = 120


def unable(system: System, device: str) -> str | None:
    """The reason why a system of DeepSpeed cannot run here; None if it can."""
    if system.kind == "deepspeed-deepcompile" and device == "cpu":
        return "DeepSpeed's DeepCompile needs GPUs"
    problem = _import_problem(device)
    return problem and f"DeepSpeed cannot be imported (pip install deepspeed): {problem}"


@functools.cache
def _import_problem(device: str) -> str | None:
    # In a process of its own, since the driver must not touch a GPU. To find the package would not be enough: it may be
    # installed without what it needs.
    environment = os.environ | {"DS_ACCELERATOR": device}
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import deepspeed"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_IMPORT_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_IMPORT_LIMIT_S} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def environment(job: Job, cache: Path) -> dict[str, str]:
    """Variables of the workers, beside those that every system gets.

    Args:
        job: What they run.
        cache: Where operators that DeepSpeed compiles are kept; PyTorch's lock lets one rank do it.
    """
    variables = {
        "DS_ACCELERATOR": job.device,
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(cache / "extensions")),
    }
    if offloads_optimizer(job.system):
        cores = max(1, (os.cpu_count() or 1) // job.world)
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(cores))
    headers = _nccl_headers()
    if headers:  # DeepCompile's operators include nccl.h, which torch's own pip packages keep in a folder of its own
        variables["CPATH"] = os.pathsep.join(filter(None, [headers, os.environ.get("CPATH")]))
    return variables


def _nccl_headers() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    folders = [Path(root) / "nccl" / "include" for root in roots or ()]
    return next((str(folder) for folder in folders if (folder / "nccl.h").is_file()), None)


def offloads_optimizer(system: System) -> bool:
    """True if the optimizer steps on the CPU."""
    return "offload_optimizer" in system.options


def compiles_blocks(system: System) -> bool:
    """True if the blocks are leaf modules and compiled one by one."""
    return bool(system.options.get("compile", False))


def configuration(job: Job) -> dict[str, Any]:
    """DeepSpeed's configuration for the one case of a job."""
    (case,) = job.cases
    block = job.shape.block_weights
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.accumulation,
        "bf16": {"enabled": job.precision == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": block,
            "stage3_prefetch_bucket_size": block,
            "stage3_param_persistence_threshold": 10 * job.shape.hidden,
            "memory_efficient_linear": not compiles_blocks(job.system),
        },
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
    }
    if job.precision == "bf16" and case.accumulation > 1:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if job.system.kind == "deepspeed-deepcompile":
        config["compile"] = {"deepcompile": True}
    for name, value in job.system.options.items():
        if name == "compile":
            continue
        section, _, key = name.rpartition(".")
        if key in ("offload_optimizer", "offload_param") and isinstance(value, str):
            value = {"device": value, "pin_memory": job.device == "cuda"}
        config.setdefault(section or "zero_optimization", {})[key] = value
    return config
