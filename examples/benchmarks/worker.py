"""One rank of one system. Started by the driver, never by hand: ``worker.py JOB.json`` with RANK in the environment."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from jobs import DEEPSPEED, SYSTEMS, Job


def main() -> None:
    """Runs the job as the rank that the environment names."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # what Lightning goes back to; the default would end the process
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    job, rank = Job.load(Path(sys.argv[1])), int(os.environ["RANK"])

    import torch
    from meter import Recorder
    from roofline import run_roofline
    from runners import run_fsdp2, run_lightning

    torch.set_float32_matmul_precision("high")
    if rank == 0:
        Path(job.folder, "environment.json").write_text(json.dumps(_describe()))
    runners = {kind: run_fsdp2 for kind in SYSTEMS if kind.startswith("fsdp2")} | {"roofline": run_roofline}
    if job.system.kind in DEEPSPEED:
        from deepspeed_runner import run_deepspeed  # DeepSpeed may not be installed

        runners[job.system.kind] = run_deepspeed
    # Users train at one shape: a second case in the same process must not turn any system's graphs dynamic. And a
    # system that would silently fall back to eager code is not what its column says.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, fail_on_recompile_limit_hit=True):
        runners.get(job.system.kind, run_lightning)(job, rank, Recorder(job, rank))


def _describe() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else platform.processor(),
    }


def _follow(parent: int) -> None:
    """Ends the worker when the driver is gone, so that no GPU stays taken; until then, it says where it is when asked.

    Lightning resets the handlers of all signals at the end of a trainer.
    """
    while os.getppid() == parent:
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
