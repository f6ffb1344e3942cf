"""What makes one module run sharded: runtime, shards, gradients, compiled steps. Knows nothing of Lightning."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import logging
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.capture.fallback import BROKEN_TEXT, Fallbacks, why_not
from lightning_deepcompile.capture.graph_checks import explain
from lightning_deepcompile.capture.lookups import exchange_lookups
from lightning_deepcompile.capture.sync_batchnorm import trace_sync_batchnorm
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.offload.activations import ActivationOffload
from lightning_deepcompile.offload.host_memory import host_limit, host_options
from lightning_deepcompile.offload.parameters import decide_hosted
from lightning_deepcompile.offload.residency import Residency
from lightning_deepcompile.offload.states import StateOffload
from lightning_deepcompile.offload.trade import StateTrade
from lightning_deepcompile.plan.costs import Profile, Resident
from lightning_deepcompile.plan.report import Round
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.profile.labels import labels_of
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.program.printer import format_program
from lightning_deepcompile.program.rewrite import read_schedule
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.ranks.exchange import AnyRank
from lightning_deepcompile.ranks.failures import Failures
from lightning_deepcompile.ranks.order import Agreement
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.report.record import StepRecord
from lightning_deepcompile.runtime import load_extension
from lightning_deepcompile.runtime.multiprocessors import PAIR, Multiprocessors
from lightning_deepcompile.sharding.access import uninstall_access
from lightning_deepcompile.sharding.checks import check_module, check_same_model
from lightning_deepcompile.sharding.gradients import GradientSession
from lightning_deepcompile.sharding.mentions import Mentions, mentions_of
from lightning_deepcompile.sharding.shards import ShardedModel, shard_module
from lightning_deepcompile.sharding.successors import Successors
from lightning_deepcompile.sharding.uncompiled import Uncompiled
from lightning_deepcompile.step.clipping import Clipping
from lightning_deepcompile.step.head_start import HeadStart
from lightning_deepcompile.step.optimizers import LocalShards, check_optimizer, state_bytes, take_over
from lightning_deepcompile.step.prefetch import StepPrefetch
from lightning_deepcompile.step.timeline import Timeline
from lightning_deepcompile.summary import Summary
from lightning_deepcompile.tuning.shortages import MemoryRetry, Shortages, ShortageWatch
from lightning_deepcompile.tuning.tuner import Tuner

__all__ = ["Engine"]

_log = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0
"""How long a process that exits waits for others to end what they communicated with."""


class Engine:
    """Shards `module` and compiles its steps.

    Args:
        module: The model; sharded in place.
        mesh: Device mesh of the ranks: 1-D, or ``(replicas, shards)``; see `Ranks`.
        config: Settings.
        gather_dtype: Dtype in which floating-point parameters are gathered; None keeps their own.
        reduce_dtype: Dtype in which gradients are reduced; None keeps the one they are computed in.
        stage: ZeRO stage: what stays whole between uses (1, 2: parameters; 1: also gradients while they accumulate).
        timeout: How long to wait for other ranks.
        previous: Engines that have sharded the module, or parts of it, which is sharded anew. What cannot be sharded
            stays as it is with them.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        config: CompileConfig,
        *,
        gather_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        stage: int = 3,
        timeout: timedelta = timedelta(minutes=30),
        previous: Sequence[Engine] = (),
    ) -> None:
        extension = load_extension()
        sharded_before = {parameter for engine in previous for parameter in engine.model.by_parameter}
        check_module(module, sharded_before, world_size=mesh.size())
        ranks = Ranks(mesh)
        group = ranks.group
        check_same_model(module, group)
        self.module, self.config, self.stage = module, config, stage
        self.device = device = torch.device(
            mesh.device_type, *([torch.cuda.current_device()] if mesh.device_type == "cuda" else [])
        )
        self._memory = PeakMemory(device)
        self.host_group = ranks.new_host_group(timeout=timeout)
        gather_group = reduce_group = ranks.shard_group
        if mesh.device_type == "cpu" and mesh.size() > 1:
            # Separate groups, so that gathers and reductions need not wait for each other.
            gather_group, reduce_group = ranks.new_shard_groups(2, timeout=timeout)
        if config.region_backend == "inductor" and device.type == "cuda":
            compat.start_compile_workers()  # they are there when the step is traced
        limit = host_limit(config.host_memory_budget, group) if config.offloads else 0
        self._hosted = decide_hosted(
            config, module, ranks, device, stage=stage, gather_dtype=gather_dtype, host_bytes=limit
        )
        host_bytes = max(limit - self._hosted.bytes, 1) if config.offloads else 0
        self.runtime = extension.Runtime(
            gather_group,
            reduce_group,
            device,
            replica_group=ranks.replica_group,
            reduce_window=config.reduce_window,
            max_ctas=config.communication_sms or config.max_ctas,
            cta_cluster=PAIR if config.communication_sms else 0,
            symmetric_threshold=config.symmetric_threshold,
            timeout=timeout.total_seconds(),
            **host_options(limit, device, group),
        )
        shares = config.memory_budget is None and not config.offloads  # else plans count on the memory of gathers
        if shares:
            self.runtime.share_shards()
        # Garbage is collected at another time on every rank, which must not wait for the others then; at exit it may.
        at_exit = functools.partial(self.runtime.retire, _EXIT_SECONDS)
        atexit.register(at_exit)
        self._retire = weakref.finalize(self, _retire, self.runtime, at_exit)
        self._retire.atexit = False
        for child in module.modules():  # nothing is refused any more
            uninstall_access(child)
        trace_sync_batchnorm(module)
        dtypes = {"gather_dtype": gather_dtype, "reduce_dtype": reduce_dtype}
        self.successors = Successors(module)
        self.model: ShardedModel = shard_module(module, self.runtime, ranks, hosted=self._hosted.chunks, **dtypes)
        self.successors.settle(engine.successors for engine in previous)
        holds_back = config.reduction(stage) != "every"
        self.gradients = GradientSession(self.runtime, self.model, group, holds_back=holds_back)
        store = compat.store()
        # Engines are made in the same order on all ranks; a number of its own keeps one's keys from another's.
        number = store.add(f"lightning_deepcompile/engines/{dist.get_rank()}", 1)
        meeting = (store, dist.get_rank(group), ranks.world_size, timeout, f"lightning_deepcompile/engine{number}")
        self.failures = Failures(store, dist.get_rank(group), meeting[-1])
        agreement = Agreement(*meeting, self.host_group, self.model.names)
        self.fallbacks = Fallbacks(config.fallback, dist.get_rank(group))
        leaving = ActivationOffload(config, self.model, device, stage, host_bytes)
        retry = MemoryRetry(self.runtime, device, dist.get_rank(group))
        divides = config.communication_sms and device.type == "cuda"
        divider = Multiprocessors(device, config.communication_sms, self.runtime) if divides else None
        self.capture = Capture(
            config,
            self.model,
            self.runtime,
            self.gradients,
            agreement,
            stage,
            choose_activations=leaving.choose,
            lookups=exchange_lookups(config, self.model, stage, reduce_dtype, self.host_group),
            guard=compat.held_weakly(retry.guard),
            divider=divider,
            nothing_moves=shares and mesh.size() == 1 and config.schedule in (None, "auto"),
        )
        self._backend = compat.held_weakly(self.capture.__call__)
        self.residency: Residency | None = None
        if config.offload != "none":
            self.residency = Residency(config, self.model, self.runtime, group, device, self._memory, host_bytes)
        states = self.residency
        trade = StateTrade(states, self._hosted.describe)
        room: Callable[[], int] | None = None
        if config.offload_activations != "none":

            def room() -> int:
                return host_bytes - (0 if states is None else states.host_bytes)

        shortages = Shortages(retry, ShortageWatch(*meeting))
        self.tuner = Tuner(self.capture, self.runtime, group, device, self._memory, shortages, trade, room)
        self.clipping = Clipping(self.model, self.gradients, device)
        self._local_shards: weakref.WeakKeyDictionary[Optimizer, LocalShards] = weakref.WeakKeyDictionary()
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._mentions: dict[str, Mentions] = {}
        self._settings: dict[str, contextlib.AbstractContextManager[None]] = {}
        prefetch = StepPrefetch(config, self.capture, self.runtime, self.host_group, device, stage)
        self.uncompiled = uncompiled = self.model.state.path = Uncompiled(
            self.model.parameters,
            stays=stage < 3,
            compare=compat.held_weakly(agreement.check_uncompiled),
            written=prefetch.rewritten,
            noticed=self.fallbacks.noticed,
        )
        hosts = AnyRank(self.host_group, "whether parameters were written to", "whether training is to stop")
        self.timeline = Timeline(
            self.runtime,
            hosts,
            agreement,
            self.tuner,
            states,
            leaving,
            prefetch,
            self.capture,
            uncompiled,
            self.gradients,
        )
        self.ended = False

    def run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's method `name` compiled, with sharded parameters.

        Args:
            name: ``training_step``, ``validation_step`` and so on.
            *args: The method's arguments.
            **kwargs: The method's keyword arguments.

        Returns:
            What the method returns.

        Raises:
            RuntimeError: If a part of it cannot be compiled, and the settings make that an error.
            UnsupportedStepError: If the step does with parameters what cannot be done with shards.
        """
        if not self.model.state.whole:
            self.model.check_installed()
        if self.timeline.begin(name):
            self._compiled.pop(name, None)
        self.uncompiled.hands_out_plain = self.mentions(name).transforms
        if name not in self._compiled:
            self._compiled[name] = self._compile(name)
        try:
            with (
                self._settings[name],
                self.fallbacks.watching(),
                self.timeline.prefetch.watching(),
                self.uncompiled.in_step(),
                self.capture.preparing(self.uncompiled.settle),
            ):
                return self._compiled[name](*args, **kwargs)
        except RuntimeError as error:
            if (explained := explain(error)) is None:
                raise
            raise explained from error

    def mentions(self, name: str) -> Mentions:
        """What the code of the step `name` mentions."""
        if name not in self._mentions:
            self._mentions[name] = mentions_of(self.module, getattr(self.module, name))
        return self._mentions[name]

    def _compile(self, name: str) -> Callable[..., Any]:
        step = getattr(self.module, name)
        falls_back = self.config.fallback == "warn"
        self._settings[name] = compat.step_settings(self.config.recompile_limit, falls_back=falls_back)
        bounded = {n for n, value in vars(self.module).items() if isinstance(value, deque) and value.maxlen is not None}
        found = self.mentions(name)
        code = getattr(inspect.unwrap(step), "__code__", None)
        if (reason := why_not(found, bounded)) is not None:
            self.fallbacks.add(name, _place(code), reason)
            return step
        own = compat.with_own_code(step)
        for broken in found.broken_texts:
            self.fallbacks.add(broken.co_name, _place(broken), BROKEN_TEXT)
            compat.never_code(own.__code__ if broken is code else broken)
        return torch.compile(own, backend=self._backend)

    def finish_step(self) -> None:
        """Call when an optimizer step is over and the next training step uses its parameters; may gather them."""
        self.timeline.end()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, backward passes are not the last ones before the optimizer steps: stage 1 reduces nothing yet."""
        self.gradients.update = False
        try:
            yield
        finally:
            self.gradients.update = True

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Makes `optimizer` step on this rank's shards; see `LocalShards`.

        Args:
            optimizer: Built from the module's parameters, sharded or as they were before.

        Raises:
            ValueError: For optimizers that need whole tensors, and for parameters that are not the module's; with
                offloading, for those that cannot step on a part of their parameters at a time, or have states already.
            MemoryBudgetError: If their states shall live in host memory, which does not hold them.
        """
        if optimizer not in self._local_shards:
            if take_over(optimizer, self.model, self.successors) and self.residency is not None:
                raise ValueError(
                    f"{type(optimizer).__name__} has stepped before the module was sharded, so its states cannot be "
                    f"offloaded (CompileConfig(offload={self.config.offload!r})). Build it in `configure_optimizers`, "
                    "or use offload='none'."
                )
            check_optimizer(optimizer, self.model)
            parts: Any = HeadStart.of(optimizer, self.timeline.prefetch)
            if self.residency is not None:
                parts = self.residency.attach(optimizer, parts)
            self._local_shards[optimizer] = LocalShards(
                optimizer, self.model, self.gradients, self.parameters_changed, self.uncompiled.inside, parts
            )

    def offload_of(self, optimizer: Optimizer) -> StateOffload | None:
        """What keeps states of `optimizer` in host memory, if it was attached and the settings ask for it."""
        shards = self._local_shards.get(optimizer)
        return None if shards is None else shards.offload

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer, *, follows: bool = False) -> Iterator[None]:
        """Around a step of `optimizer`: whatever happens inside, it holds the parameters again afterwards.

        Args:
            optimizer: One that was attached, or any other.
            follows: Whether `finish_step` comes next: then gathers may be launched inside.
        """
        self.timeline.before_optimizer(follows=follows)
        try:
            with self.uncompiled.outside():
                yield
        finally:
            self.timeline.optimizer_left()
            if optimizer in self._local_shards:
                self._local_shards[optimizer].restore()

    def local_shards(self, optimizer: Optimizer) -> LocalShards:
        """The context in which `optimizer`, which was attached, holds plain shards."""
        return self._local_shards[optimizer]

    def backward(self, run: Callable[[], Any]) -> Any:
        """Runs a backward pass; afterwards every ``.grad`` is set.

        Args:
            run: Runs the pass.
        """
        self.timeline.backward()
        try:
            # Code under activation checkpointing runs, and gathers, again.
            with self.uncompiled.in_step(), self.capture.preparing(self.uncompiled.settle):
                result = run()
        except BaseException as error:
            self.timeline.abort()
            if (explained := explain(error)) is None:
                raise
            raise explained from error
        self.timeline.backward_done()
        return result

    @contextlib.contextmanager
    def full_parameters(self, module: nn.Module | None = None, *, writeback: bool = True) -> Iterator[None]:
        """Inside, the parameters are whole, plain tensors on every rank; all ranks must enter and leave together.

        Args:
            module: Whose parameters; by default the whole model's, which must then fit into memory.
            writeback: Keep what was written to them, each rank's own rows; else it is dropped.
        """
        if self.ended:
            raise RuntimeError("The module's parameters are not this Trainer's any more: its communication has ended.")
        with self.model.whole(module or self.module, writeback=writeback):
            yield

    def parameters_changed(self) -> None:
        """Call when parameters were written to: what is gathered is out of date, gradients may be dropped."""
        self.timeline.stepped()

    def drop_stale_gradients(self) -> None:
        """Frees gradients that an optimizer step has consumed, before a forward pass needs the memory."""
        self.timeline.drop_stale_gradients()

    def replan(self, settings: PlanSettings) -> None:
        """Swaps all programs for ones planned with `settings`; call on all ranks, between optimizer steps."""
        self.capture.replan(settings)

    def report(self) -> list[Round]:
        """What each round of profiling and planning did."""
        return list(self.tuner.rounds)

    def profile(self) -> Profile | None:
        """What the last round planned with, with names and sizes for reports; None if no step was measured."""
        profile = self.tuner.profile
        if profile is None:
            return None
        labels = labels_of(executable.program for executable in self.capture.executables)
        states = sum(state_bytes(optimizer, self.device) for optimizer in self._local_shards)
        return replace(profile, labels=labels, resident=Resident(self.model.device_bytes, states))

    def record(self) -> StepRecord:
        """What a report of the training step shows."""
        profile = self.profile()
        schedules: tuple[Schedule, ...] = ()
        if profile is not None:
            current = {e.program.name: read_schedule(e.program) for e in self.capture.executables}
            # A step that was traced anew since has other programs: then those that were measured are shown.
            schedules = tuple(current.get(schedule.name, schedule) for schedule in profile.schedules)
            if not all(map(profile.covers, schedules)):
                schedules = profile.schedules
        return StepRecord(profile, schedules, tuple(self.report()), self.summary(), self.programs())

    def programs(self) -> dict[str, str]:
        """The current programs, printed, by name."""
        return {e.program.name: format_program(e.program) for e in self.capture.executables}

    def summary(self) -> Summary:
        """Counters; see `Summary`."""
        last = self.timeline.communicated
        decision = None if self.residency is None else self.residency.decision
        return Summary(
            world_size=self.model.ranks.shards,
            replicas=self.model.ranks.replicas,
            communicator=self.runtime.communicator,
            graphs=self.capture.frames,
            programs=len(self.capture.executables),
            regions_compiled=self.capture.regions.compiled,
            regions_total=self.capture.regions.requested,
            gathers_per_step=last.get("gathers", 0),
            gather_groups_per_step=last.get("gather_groups", 0),
            symmetric_gathers_per_step=last.get("symmetric_gathers", 0),
            reductions_per_step=last.get("reductions", 0),
            reduce_groups_per_step=last.get("reduce_groups", 0),
            sharded_bytes_per_rank=self.model.shard_bytes,
            saved_parameters=self.capture.saved_parameters,
            causal_masks=self.capture.causal_masks,
            exchanged_lookups=self.capture.exchanged,
            compile_seconds=self.capture.seconds,
            region_compile_seconds=self.capture.regions.seconds,
            offloaded_bytes=0 if self.residency is None else self.residency.host_bytes,
            offload_moved_bytes=0 if self.residency is None else self.residency.moved_bytes,
            offload_reason="" if decision is None else decision.reason,
            offloaded_activation_bytes=last.get("offloaded_bytes", 0),
            host_node=self.runtime.stats()["host_node"],
            offloaded_parameter_bytes=self._hosted.bytes,
            fetched_parameter_bytes=last.get("fetched_bytes", 0),
            offload_parameters_reason=self._hosted.reason,
            peak_bytes=self._memory.highest,
            uncompiled=tuple(f"{function}: {reason}" for function, reason in self.fallbacks.reasons.items()),
            uncompiled_share=self.timeline.uncompiled_share if self.fallbacks.reasons else 0.0,
        )

    def release_memory(self) -> None:
        """Gives back what is only needed while steps run."""
        self.timeline.rest()
        if not self.ended:
            self.timeline.release_memory()

    def abort(self) -> None:
        """Ends communication at once: pending collectives of this rank will not complete."""
        self.ended = True
        self.runtime.abort()

    def close(self) -> None:
        """Frees communicators and buffers, on all ranks together; the module cannot run afterwards."""
        if not self.ended:  # else there are no peers to wait for
            self.runtime.close()
        self.ended = True
        self.timeline.order.rest()
        for shards in self._local_shards.values():
            shards.detach()
        self._retire()


def _place(code: types.CodeType | None) -> str:
    return "?" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _retire(runtime: Any, at_exit: Callable[[], None]) -> None:
    atexit.unregister(at_exit)
    runtime.retire()
