"""Processes and their process group: the part of a strategy of several processes that does not concern sharding.

Lightning's DDP and FSDP strategies each contain this code; neither can be a base here, as other parts of Lightning
treat their subclasses as DDP or FSDP.
"""

from __future__ import annotations

import contextlib
import copy
import subprocess
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor

from lightning_deepcompile import compat
from lightning_deepcompile.compat.lightning import (
    SubprocessLauncher,
    default_backend,
    divide_threads,
    init_process_group,
    is_distributed,
    is_interactive,
    reduce_over_ranks,
)
from lightning_deepcompile.console import quieten


class ProcessStrategy(ParallelStrategy):
    """Base of strategies with one process per device, started by Lightning, torchrun, SLURM and the like.

    Args:
        process_group_backend: Backend of torch.distributed; by default NCCL for GPUs and gloo for CPUs.
        timeout: How long a rank waits for the others.
        **parts: Set by the Trainer, as of `ParallelStrategy`.
    """

    # Without it Lightning would neither shard the dataset nor reduce metrics.
    is_distributed = True

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta = timedelta(minutes=30), **parts: Any
    ) -> None:
        super().__init__(**parts)
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._outside_inference = contextlib.ExitStack()
        self._started: list[subprocess.Popen[bytes]] = []  # processes that Lightning's observer no longer watches

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickles and copies: without the processes that it started."""
        launcher = copy.copy(self._launcher)
        if isinstance(launcher, SubprocessLauncher):
            launcher.procs = []
        own: dict[str, Any] = {"_launcher": launcher, "_outside_inference": contextlib.ExitStack(), "_started": []}
        return super().__getstate__() | own

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """Backend of torch.distributed, once set up."""
        return self._process_group_backend

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The sampler's arguments: every rank reads its own part of the data."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            return
        if is_interactive() and self.num_processes * self.num_nodes == 1:
            return  # a launcher would start nothing, and Lightning lets none be used in a notebook
        if is_interactive():
            raise MisconfigurationException(
                f"Trainer(strategy='deepcompile', devices={self.num_processes}) cannot start its processes from a "
                "notebook or an interactive session: each of them runs the whole script again. Use devices=1 here, or "
                "write the cell to a file (`%%writefile train.py`) and run that with `!python train.py`."
            )
        self._launcher = SubprocessLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Sets the device up and joins the process group."""
        self._leave_inference_mode()
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        if isinstance(self.cluster_environment, LightningEnvironment):
            # Lightning's launcher does it only in the process that starts the others.
            divide_threads(self.num_processes)
        device = self.root_device
        self._process_group_backend = self._process_group_backend or default_backend(device)
        environment = self.cluster_environment
        assert environment is not None
        store = None
        if self.num_nodes == 1 and not is_distributed():
            address, port = environment.main_address, environment.main_port
            store = compat.store_of_one_host(address, port, self.global_rank, self.world_size, self._timeout)
        init_process_group(
            environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device if device.type != "cpu" else None,
            store=store,
        )

    def _leave_inference_mode(self) -> None:
        """Leaves inference mode until teardown, as a user may call the Trainer inside of one.

        Tensors made in it, a gathered parameter or a metric's state, could not be used in training.
        """
        self._outside_inference.close()
        if torch.is_inference_mode_enabled():
            self._outside_inference.enter_context(torch.inference_mode(False))

    def set_world_ranks(self) -> None:
        """Sets this rank's number in the environment and in Lightning's loggers."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        quieten(self.global_rank)
        rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @torch.compiler.disable
    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        if is_distributed():
            device_ids = [self.root_device.index] if dist.get_backend() == "nccl" else None
            dist.barrier(device_ids=device_ids)

    @torch.compiler.disable  # called in a step, it breaks the graph: the tracer fails at what sends objects
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Sends an object from rank `src` to all."""
        if not is_distributed():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduces a tensor over the ranks; anything else is returned unchanged."""
        return reduce_over_ranks(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    def take_over_started_processes(self) -> None:
        """Takes the processes that this one started from Lightning's observer; call as soon as this one fails.

        If one of them ends with an error, the observer kills this process, which may not have printed its own error
        yet.
        """
        if isinstance(self._launcher, SubprocessLauncher):
            self._started += self._launcher.procs
            self._launcher.procs.clear()  # the observer's own list

    def end_started_processes(self) -> None:
        """Ends the processes that were taken over; they get a moment to report an error themselves."""
        for process in self._started:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.terminate()
        self._started.clear()
