"""Builds the parts of an `Engine`, in the order in which they need each other."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_deepcompile import compat
from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.capture.fallback import Fallbacks
from lightning_deepcompile.capture.lookups import exchange_lookups
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.timeline import Timeline
from lightning_deepcompile.offload.activations import ActivationOffload
from lightning_deepcompile.offload.host_memory import host_limit
from lightning_deepcompile.offload.parameters import HostedShards, decide_hosted
from lightning_deepcompile.offload.residency import Residency
from lightning_deepcompile.plan.costs import REDUCE_WINDOW
from lightning_deepcompile.plan.offload import Offloading
from lightning_deepcompile.profile.memory import memory_limit
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.program.replay import Replays
from lightning_deepcompile.ranks.exchange import alike, from_first, on_any
from lightning_deepcompile.ranks.failures import Failures
from lightning_deepcompile.ranks.meetings import Meetings, Where
from lightning_deepcompile.ranks.order import Agreement
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.ranks.watch import Watch
from lightning_deepcompile.runtime import load_extension
from lightning_deepcompile.sharding.gradients import GradientSession
from lightning_deepcompile.sharding.participation import Participation
from lightning_deepcompile.sharding.shards import ReadRows, ShardedModel, shard_module
from lightning_deepcompile.sharding.uncompiled import Uncompiled
from lightning_deepcompile.sharding.whole_blocks import WholeBlocks
from lightning_deepcompile.sharding.wire_dtypes import WireDtypes
from lightning_deepcompile.step.evaluation import Evaluation
from lightning_deepcompile.step.freshness import Freshness
from lightning_deepcompile.tuning.shortages import MemoryRetry
from lightning_deepcompile.tuning.tuner import Tuner

_LARGE = 10**9
"""Parameters of a module from which on copy engines gather, and programs are no CUDA graphs: these gather by kernels,
begin at a place of a step that differs between ranks, and gain nothing where the device is late anyway."""


class Assembly:
    """The common inputs of an engine's parts. Call its methods once each, in the order in which they are written.

    Args:
        mesh: Device mesh of the ranks.
        ranks: The ranks.
        config: Settings.
        stage: ZeRO stage.
        timeout: How long to wait for other ranks.
        dtypes: The dtypes in which parameters and gradients travel.

    Attributes:
        device: Where the programs run.
        memory: Of that device.
        host_group: Of the ranks' CPUs.
        hosted: The shards that live in host memory.
        fallbacks: Records functions that are left uncompiled.
    """

    def __init__(
        self, mesh: DeviceMesh, ranks: Ranks, config: CompileConfig, stage: int, timeout: timedelta, dtypes: WireDtypes
    ) -> None:
        self._mesh, self._ranks, self._config, self._stage, self._timeout = mesh, ranks, config, stage, timeout
        self._dtypes = dtypes
        own = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []
        self.device = torch.device(mesh.device_type, *own)
        self.memory = PeakMemory(self.device)
        self.host_group = ranks.new_host_group(timeout=timeout)
        self.fallbacks = Fallbacks(config.fallback, dist.get_rank(ranks.group))
        self._shares = False
        self.hosted: HostedShards
        self._offloading = Offloading()
        self._host_bytes = 0
        self._graphs = False

    def runtime(self, module: nn.Module) -> Any:
        """Makes the ``_C.Runtime``, and decides which shards of `module` live in host memory."""
        config, ranks, device = self._config, self._ranks, self.device
        extension = load_extension()
        gather_group = reduce_group = ranks.shard_group
        if device.type == "cpu" and self._mesh.size() > 1:
            # Separate groups, so that gathers and reductions need not wait for each other.
            gather_group, reduce_group = ranks.new_shard_groups(2, timeout=self._timeout)
        if config.region_backend == "inductor" and device.type == "cuda":
            compat.start_compile_workers()  # they are there when the step is traced
        may_offload = config.offloading.any
        limit = host_limit(config.host_memory_budget, ranks.group) if may_offload else 0
        self.hosted = decide_hosted(
            config, module, ranks, self.memory, stage=self._stage, dtypes=self._dtypes, host_bytes=limit
        )
        offloading = self._offloading = self.hosted.offloading
        tight = offloading.states != "none" or offloading.parameters != "none"
        # Without a budget nobody counts on the memory of gathers: where nothing moves, shards are used as they are.
        self._shares = config.memory_budget is None and not tight and offloading.activations != "all"
        self._host_bytes = max(limit - self.hosted.bytes, 1) if may_offload else 0
        large = sum(parameter.numel() for parameter in module.parameters()) >= _LARGE
        threshold = config.symmetric_threshold(large and self._on_one_host(), tight)
        self._graphs = device.type == "cuda" and threshold == 0  # ranks record at different times: see `_LARGE`
        runtime = extension.Runtime(
            gather_group,
            reduce_group,
            device,
            replica_group=ranks.replica_group,
            reduce_window=REDUCE_WINDOW,
            symmetric_threshold=threshold,
            timeout=self._timeout.total_seconds(),
            host_limit=limit,
        )
        if self._shares:
            runtime.setup.share_shards()
        known = weakref.ref(runtime)  # programs being measured hold `memory`, and outlive an engine
        self.memory.beside = lambda: 0 if (one := known()) is None else one.memory.windows()[0]
        return runtime

    def _on_one_host(self) -> bool:
        """Returns whether all GPUs that share parameters are on one host, and NCCL can gather by copy engines."""
        if self.device.type != "cuda" or self._ranks.shards == 1 or torch.cuda.nccl.version() < (2, 28):
            return False
        host = os.environ.get("NCCL_HOSTID") or socket.gethostname()  # as NCCL tells hosts apart
        return not on_any(not alike(host, self._ranks.shard_group), self._ranks.group)

    def model(
        self, module: nn.Module, runtime: Any, stored: Mapping[nn.Parameter, ReadRows] | None = None
    ) -> ShardedModel:
        """Makes the sharded `module`; `stored` reads the values of parameters that have no memory yet."""
        hosted = self.hosted.flat_layouts
        return shard_module(module, runtime, self._ranks, dtypes=self._dtypes, hosted=hosted, stored=stored)

    def gradients(self, runtime: Any, model: ShardedModel) -> GradientSession:
        """Makes the object that has the gradients."""
        holds_back = self._config.reduction(self._stage) != "every"
        return GradientSession(runtime, model, self._ranks.group, holds_back=holds_back)

    def timeline(self, runtime: Any, model: ShardedModel, gradients: GradientSession) -> tuple[Timeline, Failures]:
        """Makes all parts of a step, and the object that tells other ranks of a failure of this one."""
        config, device, stage, group = self._config, self.device, self._stage, self._ranks.group
        rank = dist.get_rank(group)
        store = compat.store()
        # A number of its own separates one engine's keys from another's. The first rank's counts for all: if another
        # rank failed half-way and all try again, that rank has started less often.
        count = store.add("lightning_deepcompile/engines", 1) if rank == 0 else 0
        number = from_first(count, group)
        meeting = (store, rank, self._ranks.world_size, self._timeout, f"lightning_deepcompile/engine{number}")
        order = Agreement(*meeting, self.host_group, model.names)
        leaving = ActivationOffload(self._offloading, model, device, stage, self._host_bytes)
        replays = None
        if config.replays and self._graphs:
            limit = None if config.memory_budget is None else memory_limit(device, config.memory_budget)
            replays = Replays(runtime, device, config.replays, limit)
        retry = MemoryRetry(runtime, device, rank, replays)
        capture = Capture(
            config,
            model,
            runtime,
            gradients,
            order,
            stage,
            choose_activations=leaving.choose,
            lookups=exchange_lookups(model, stage, self._dtypes.reduce, self.host_group),
            guard=compat.held_weakly(retry.guard),
            replays=replays,
            nothing_moves=self._shares and self._mesh.size() == 1 and config.schedule in (None, "auto"),
        )
        residency = None
        if (mode := self._offloading.states) != "none":
            residency = Residency(config, mode, model, runtime, group, device, self.memory, self._host_bytes)
        leaving.free_host_bytes = self._room_for_activations(residency)
        leaving.plans = leaving.mode == "all" or bool(config.memory_budget)
        hosted = self.hosted.describe()
        tuner = Tuner(capture, runtime, group, device, self.memory, retry, residency, leaving, hosted)
        freshness = Freshness(model, runtime, stage)
        watch = Watch(store, rank, self._ranks.world_size, meeting[-1])
        meetings = Meetings(self._ranks.new_host_group(alone=True, timeout=self._timeout), watch)
        blocks = WholeBlocks(
            model.parameters,
            stays=stage < 3,
            compare=compat.held_weakly(order.check_uncompiled),
            written=freshness.forget,
            noticed=self.fallbacks.noticed,
        )
        uncompiled = Uncompiled(model.parameters, blocks, outside=lambda: meetings.meet(Where.OUTSIDE)())
        model.state.path = uncompiled
        order.take_part = Participation(
            model, runtime, stage, compat.held_weakly(capture.new_graph_id), compat.held_weakly(gradients.begin)
        )
        timeline = Timeline(
            runtime=runtime,
            meetings=meetings,
            evaluation=Evaluation(meetings, order, freshness, uncompiled, rank),
            order=order,
            tuner=tuner,
            residency=residency,
            leaving=leaving,
            freshness=freshness,
            capture=capture,
            uncompiled=uncompiled,
            gradients=gradients,
        )
        gradients.around_hooks = compat.held_weakly(uncompiled.outside)
        gradients.after_hooks = compat.held_weakly(timeline.written)
        return timeline, Failures(store, rank, self._ranks.world_size, meeting[-1])

    def _room_for_activations(self, residency: Residency | None) -> Callable[[], int] | None:
        if self._offloading.activations == "none":
            return None
        host_bytes = self._host_bytes
        return lambda: host_bytes - (0 if residency is None else residency.host_bytes)
