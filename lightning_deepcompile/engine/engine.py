"""Runs one module sharded: runtime, shards, gradients, compiled steps. Knows nothing of Lightning."""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.capture.graph_checks import unsupported_step_error
from lightning_deepcompile.capture.steps import CompiledSteps, code_of
from lightning_deepcompile.capture.sync_batchnorm import trace_sync_batchnorm
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.assembly import Assembly
from lightning_deepcompile.engine.facts import facts_of, peak_rate
from lightning_deepcompile.engine.timeline import TRAINING
from lightning_deepcompile.offload.chunks import Parts
from lightning_deepcompile.offload.states import StateOffload
from lightning_deepcompile.offload.temporaries import probe_temporaries, step_bytes
from lightning_deepcompile.plan.costs import Profile, Resident
from lightning_deepcompile.plan.report import Round
from lightning_deepcompile.profile.labels import labels_of
from lightning_deepcompile.program.printer import format_program
from lightning_deepcompile.program.program import LOCAL_ID
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.ranks.exchange import raise_together
from lightning_deepcompile.ranks.flight_record import write_flight_record
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.report.record import StepRecord
from lightning_deepcompile.sharding.access import uninstall_access
from lightning_deepcompile.sharding.checks import check_module, check_same_model
from lightning_deepcompile.sharding.shards import ReadRows, ShardedModel
from lightning_deepcompile.sharding.successors import Successors
from lightning_deepcompile.sharding.wire_dtypes import AS_STORED, WireDtypes
from lightning_deepcompile.step.batch_sizes import sizes_of
from lightning_deepcompile.step.clipping import Clipping
from lightning_deepcompile.step.direct import DirectStep
from lightning_deepcompile.step.input_sizes import InputSizes
from lightning_deepcompile.step.optimizers import LocalShards, check_optimizer, share_states, state_bytes, take_over
from lightning_deepcompile.step.owner_step import OwnerStep
from lightning_deepcompile.step.state_sizes import makes_composites, predict_state_bytes
from lightning_deepcompile.step.ways import OptimizerWays, Way, couples_tensors, is_elementwise
from lightning_deepcompile.summary import Summary
from lightning_deepcompile.tuning.foresight import StepRetracedError

_EXIT_SECONDS = 5.0
"""How long a process that exits waits for others to end what they communicated with."""


class Engine:
    """Shards `module` and compiles its steps.

    Args:
        module: The model; sharded in place.
        mesh: Device mesh of the ranks: 1-D, or ``(replicas, shards)``; see `Ranks`.
        config: Settings.
        dtypes: The dtypes in which parameters and gradients travel.
        stage: ZeRO stage: at 1 and 2 parameters stay whole between uses, at 1 also gradients while they accumulate.
        timeout: How long to wait for other ranks.
        previous: Engines that have sharded the module, or parts of it, which is sharded again. Parts that cannot be
            sharded stay with these engines.
        stored: Parameters on the meta device of which each rank reads its rows; see `shard_module`.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        config: CompileConfig,
        *,
        dtypes: WireDtypes = AS_STORED,
        stage: int = 3,
        timeout: timedelta = timedelta(minutes=30),
        previous: Sequence[Engine] = (),
        stored: Mapping[nn.Parameter, ReadRows] | None = None,
    ) -> None:
        sharded_before = {parameter for engine in previous for parameter in engine.model.by_parameter}
        check_module(module, sharded_before, world_size=mesh.size())
        ranks = Ranks(mesh)
        check_same_model(module, ranks.group)
        self.module, self.config, self.stage = module, config, stage
        parts = Assembly(mesh, ranks, config, stage, timeout, dtypes)
        self.device, self.host_group, self.fallbacks = parts.device, parts.host_group, parts.fallbacks
        self._memory = parts.memory
        self.runtime = parts.runtime(module)
        # Garbage is collected at different times on the ranks, so this must not wait for other ranks; at exit it may.
        at_exit = functools.partial(self.runtime.close, _EXIT_SECONDS)
        atexit.register(at_exit)
        self._retire = weakref.finalize(self, _retire, self.runtime, ranks, at_exit)
        self._retire.atexit = False
        self._hosted = parts.hosted
        for child in module.modules():  # nothing is refused any more
            uninstall_access(child)
        trace_sync_batchnorm(module)
        self.successors = Successors(module)
        self.model: ShardedModel = parts.model(module, self.runtime, stored)
        self.successors.settle(engine.successors for engine in previous)
        self.gradients = parts.gradients(self.runtime, self.model)
        self.timeline, self.failures = parts.timeline(self.runtime, self.model, self.gradients)
        self.capture, self.tuner = self.timeline.capture, self.timeline.tuner
        self.residency, self.uncompiled = self.timeline.residency, self.timeline.uncompiled
        self.clipping = Clipping(self.model, self.device, self.capture.replays)
        self.steps = CompiledSteps(module, config, self.capture, self.fallbacks)
        self._inputs = InputSizes()
        self._local_shards: weakref.WeakKeyDictionary[Optimizer, LocalShards] = weakref.WeakKeyDictionary()
        self.ended = False

    def run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's method `name` compiled, with sharded parameters.

        Args:
            name: ``training_step``, ``validation_step`` and so on.
            *args: The method's arguments.
            **kwargs: The method's keyword arguments.

        Raises:
            RuntimeError: If a part of it cannot be compiled, and the settings make that an error.
            UnsupportedStepError: If the step uses parameters in a way that is not possible with shards.
        """
        if not self.model.state.whole:
            self.model.check_installed()
        method = getattr(self.module, name)
        self._inputs.begin(name, method, args, kwargs)
        while True:
            if self.timeline.begin(name, sizes_of((args, kwargs))):
                self.steps.forget(name)
            self.uncompiled.hands_out_plain = self.steps.mentions(name).transforms
            uneven = self.timeline.evaluation.behind is not None
            self.capture.entry.step_code = code_of(method)
            if (first := not self.steps.has_run(name)) and name == TRAINING:
                self._inputs.compare(name, self.host_group)
            self._inputs.mark(method, args, kwargs, first=first)
            captured = self.capture.frames.captured
            try:
                with (
                    self.steps.running(name, compiled=not uneven) as step,
                    self.uncompiled.in_step(),
                    self.capture.entry.preparing(self.uncompiled.blocks.settle),
                ):
                    return step(*args, **kwargs)
            except StepRetracedError:  # on all ranks
                self.steps.forget(name)
            except RuntimeError as error:
                if (explained := unsupported_step_error(error)) is None:
                    raise
                raise explained from error
            finally:
                if not first:
                    self._inputs.captured(self.capture.frames.captured - captured)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Returns a context for backward passes before the last one of an optimizer step: stage 1 reduces nothing."""
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
            ValueError: For LBFGS, for steps that communicate or that no way serves, and for parameters that are not the
                module's; with ``offload="all"``, for those that cannot step on a part of their parameters at a time, or
                have states already.
            MemoryBudgetError: If their states shall live in host memory, which does not hold them.
        """
        if optimizer not in self._local_shards:
            with raise_together(f"Attaching {type(optimizer).__name__}", self.host_group):
                taken = take_over(optimizer, self.model, self.successors)
                check_optimizer(optimizer, self.model)
            ways = OptimizerWays(optimizer, self.model)
            parts = self._parts_of(optimizer, ways, has_stepped=bool(taken))
            owner_of = parts.owner_of if isinstance(parts, OwnerStep) else None
            share_states(optimizer, self.model, taken, owner_of)
            direct = None
            if not isinstance(parts, StateOffload):
                direct = DirectStep.of(optimizer, self.model, self.capture.replays)
            self._local_shards[optimizer] = LocalShards(
                optimizer,
                self.model,
                self.gradients,
                ways,
                self.timeline.optimizer_stepped,
                self.timeline.written,
                self.uncompiled.inside,
                parts,
                direct,
            )
            self._expect_states()
            if taken:
                self.states_loaded(optimizer)

    def _expect_states(self) -> None:
        """Predicts the states that the optimizers make in their first step."""
        sizes = []
        for optimizer, shards in self._local_shards.items():
            own = self.model.ranks.shard_rank
            held = [p for group in optimizer.param_groups for p in group["params"] if p in self.model.by_parameter]
            shapes = {p: tuple(self.model.by_parameter[p].local.shape) for p in held}
            if shards.owner_step is not None:
                owners = {p: shards.owner_step.owner_of(p) for p in held}
                shapes |= {p: tuple(p.shape) for p, owner in owners.items() if owner == own}
                shapes = {p: shape for p, shape in shapes.items() if owners[p] in (None, own)}
            sizes.append(predict_state_bytes(optimizer, shapes))
        known = [size for size in sizes if size is not None]
        leaving = self.timeline.leaving
        leaving.states = sum(known) if len(known) == len(sizes) else None
        divided = 0 if self.residency is None else self.residency.temporaries()[1]
        whole = [self._temporaries(one) for one, shards in self._local_shards.items() if shards.offload is None]
        leaving.stepping = max([divided, *whole])

    def _temporaries(self, optimizer: Optimizer) -> int:
        """Returns the bytes that a step takes besides states; 0 where that is not known, and where nobody counts it."""
        if self.device.type != "cuda" or not is_elementwise(optimizer):
            return 0
        known = self.model.by_parameter
        groups = [[known[p].local.numel() for p in g["params"] if p in known] for g in optimizer.param_groups]
        return step_bytes(probe_temporaries(optimizer, self.device), groups, 0)[0]

    def _parts_of(self, optimizer: Optimizer, ways: OptimizerWays, *, has_stepped: bool) -> Parts | None:
        """Returns the object that divides the steps of `optimizer`, if they are divided."""
        staying, elementwise = self._staying(optimizer, ways), is_elementwise(optimizer)
        if staying and self.config.offloading.states == "all":
            raise ValueError(
                f"CompileConfig(offload={self.config.offload!r}): states of {staying} stay on the device. Use "
                "offload='auto', 'none' or a list without 'states', or an element-wise optimizer."
            )
        if self.residency is not None and not staying:
            offload = self.residency.attach(optimizer, elementwise=elementwise, has_stepped=has_stepped)
            if offload is not None:
                return offload
        if elementwise or self.model.ranks.shards == 1:
            return None
        return OwnerStep(
            optimizer, self.model, self.gradients, self.host_group, ways, self.timeline.order.check_exchange
        )

    def _staying(self, optimizer: Optimizer, ways: OptimizerWays) -> str:
        """Names an optimizer whose states cannot be offloaded, with the reason; "" for others."""
        if set(ways.ways()) != {Way.SHARDS}:
            return ways.describe()
        reason = ""
        if self.residency is not None and makes_composites(optimizer):
            reason = "it keeps quantised states"
        elif self.residency is not None and self.model.ranks.shards == 1 and couples_tensors(optimizer):
            reason = "it steps on all tensors together"
        return f"{type(optimizer).__name__} ({reason})" if reason else ""

    def owner_of(self, optimizer: Optimizer, parameter: Tensor) -> int | None:
        """Returns the shard rank that has all states of a parameter of `optimizer`; None: each rank has its rows'."""
        shards = self._local_shards.get(optimizer)
        owners = None if shards is None else shards.owner_step
        return None if owners is None else owners.owner_of(parameter)

    def offload_of(self, optimizer: Optimizer) -> StateOffload | None:
        """The object that keeps states of `optimizer` in host memory, if it is attached and the settings ask for it."""
        shards = self._local_shards.get(optimizer)
        return None if shards is None else shards.offload

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Returns a context for a step of `optimizer`: it holds the parameters again afterwards, whatever happens.

        Args:
            optimizer: One that was attached, or any other.
        """
        self.timeline.before_optimizer()
        try:
            with self.uncompiled.outside():
                yield
        finally:
            if optimizer in self._local_shards:
                self._local_shards[optimizer].restore()

    @contextlib.contextmanager
    def calling(self, optimizer: Optimizer, *, may_step: bool) -> Iterator[None]:
        """Returns a context for a method of an optimizer's class other than ``step``.

        Args:
            optimizer: One that was attached, or any other.
            may_step: Whether the method may be a step, or a part of one.
        """
        shards = self._local_shards.get(optimizer)
        after = self.timeline.optimizer_stepped if may_step else self.timeline.optimizer_called
        with self.stepping(optimizer), contextlib.nullcontext() if shards is None else shards.calling(after):
            yield

    def states_loaded(self, optimizer: Optimizer) -> None:
        """Call when states were loaded into `optimizer`: users see DTensors of them."""
        if optimizer in self._local_shards:
            self._local_shards[optimizer].show_states()

    def local_shards(self, optimizer: Optimizer) -> LocalShards:
        """The context in which `optimizer`, which must be attached, holds plain shards."""
        return self._local_shards[optimizer]

    def backward(self, run: Callable[[], Any]) -> Any:
        """Runs a backward pass; afterwards every ``.grad`` is set."""
        self.timeline.backward()
        try:
            # Code under activation checkpointing runs, and gathers, again.
            with self.uncompiled.in_step(), self.capture.entry.preparing(self.uncompiled.blocks.settle):
                result = run()
        except BaseException as error:
            self.timeline.abort()
            if (explained := unsupported_step_error(error) or self.uncompiled.anomalies.error(error)) is None:
                raise
            raise explained from error
        self.timeline.backward_done()
        return result

    @contextlib.contextmanager
    def full_parameters(self, module: nn.Module | None = None, *, writeback: bool = True) -> Iterator[None]:
        """Returns a context in which parameters are whole, plain tensors on every rank; all ranks must enter it.

        Args:
            module: Whose parameters; by default the whole model's, which must then fit into memory.
            writeback: Keep what was written to them, each rank's own rows; otherwise it is dropped.
        """
        if self.ended:
            raise RuntimeError(
                "This Trainer's communication has ended: the module's parameters no longer belong to it."
            )
        with self.model.whole(module or self.module, writeback=writeback):
            yield

    def parameters_changed(self) -> None:
        """Call when parameters were written to: gathered copies are out of date, and gradients may be dropped."""
        self.timeline.stepped()

    def report(self) -> list[Round]:
        """The rounds of profiling and planning."""
        return list(self.tuner.rounds)

    def profile(self) -> Profile | None:
        """The profile of the last round, with names and sizes for reports; None if no step was measured."""
        profile = self.tuner.profile
        if profile is None:
            return None
        labels = labels_of(executable.program for executable in self.capture.frames.executables)
        states = sum(state_bytes(optimizer, self.device) for optimizer in self._local_shards)
        rows = {str(p.ds_id & LOCAL_ID): p.layout.spec.shape[0] for p in self.model.parameters}
        return replace(profile, labels=labels, rows=rows, resident=Resident(self.model.device_bytes, states))

    def record(self) -> StepRecord:
        """Returns the contents of a report of the training step."""
        profile = self.profile()
        schedules: tuple[Schedule, ...] = ()
        if profile is not None:
            current = {e.program.name: e.program.schedule for e in self.capture.frames.executables}
            # If the step was retraced since, it has other programs: then the measured ones are shown.
            schedules = tuple(current.get(schedule.name, schedule) for schedule in profile.schedules)
            if not all(map(profile.covers, schedules)):
                schedules = profile.schedules
        programs = [executable.base for executable in self.capture.frames.executables]
        return StepRecord(
            profile,
            schedules,
            tuple(self.report()),
            self.summary(),
            self.programs(),
            facts=facts_of(self.module, self.model, self.config, self.stage, self.device),
            measured=self.tuner.measured,
            times=tuple(self.timeline.times.latest),
            operations={f"{p.name}/{name}": one.info.operations for p in programs for name, one in p.regions.items()},
            peak=peak_rate(self.model, self.device),
            graphs=tuple(self.capture.frames.reasons()),
        )

    def programs(self) -> dict[str, str]:
        """The current programs, printed, by name."""
        return {e.program.name: format_program(e.program) for e in self.capture.frames.executables}

    def summary(self) -> Summary:
        """Counters; see `Summary`."""
        last = self.timeline.communicated
        states = None if self.residency is None else self.residency.plan
        shards = self._hosted.plan
        return Summary(
            world_size=self.model.ranks.shards,
            replicas=self.model.ranks.replicas,
            communicator=self.runtime.communicator,
            graphs=len(self.capture.frames.all),
            programs=len(self.capture.frames.executables),
            regions_compiled=self.capture.regions.compiled,
            regions_total=self.capture.regions.requested,
            gathers_per_step=last.get("gathers", 0),
            gather_groups_per_step=last.get("gather_groups", 0),
            symmetric_gathers_per_step=last.get("symmetric_gathers", 0),
            symmetric_bytes=self.runtime.memory.windows()[0],
            reductions_per_step=last.get("reductions", 0),
            reduce_groups_per_step=last.get("reduce_groups", 0),
            sharded_bytes_per_rank=self.model.shard_bytes,
            saved_parameters=self.capture.saved_parameters,
            causal_masks=self.capture.causal_masks,
            derived_parameters=self.model.derived.count,
            exchanged_lookups=self.capture.exchanged,
            chunked_losses=self.capture.frames.chunked("losses"),
            chunked_mlps=self.capture.frames.chunked("mlps"),
            size_graphs=tuple(self._inputs.describe()),
            compile_seconds=self.capture.seconds,
            region_compile_seconds=self.capture.regions.seconds,
            offloaded_bytes=0 if self.residency is None else self.residency.host_bytes,
            offload_moved_bytes=0 if self.residency is None else self.residency.moved_bytes,
            offload_reason="" if states is None else states.why,
            offloaded_activation_bytes=last.get("offloaded_bytes", 0),
            offloaded_parameter_bytes=self._hosted.bytes,
            fetched_parameter_bytes=last.get("fetched_bytes", 0),
            offload_parameters_reason="" if shards is None else shards.why,
            memory_plan=self.timeline.tuner.memory_plan,
            peak_bytes=self._memory.highest,
            rank_skew_seconds=self.tuner.skew_seconds,
            replayed=0 if (replays := self.capture.replays) is None else len(replays.replayed),
            not_replayed=() if replays is None else tuple(f"{name}: {why}" for name, why in replays.reasons.items()),
            optimizers=tuple(shards.ways.describe() for shards in self._local_shards.values()),
            uncompiled=tuple(f"{function}: {reason}" for function, reason in self.fallbacks.reasons.items()),
            uncompiled_share=self.timeline.uncompiled_share if self.fallbacks.reasons else 0.0,
        )

    def release_memory(self) -> None:
        """Releases resources that only steps need."""
        self.timeline.rest()
        if not self.ended:
            self.timeline.release_memory()

    def abort(self) -> None:
        """Ends communication at once: pending collectives of this rank will not complete.

        Its last operations are written to a file if the environment asks for it (`write_flight_record`).
        """
        if not self.ended:
            write_flight_record(self.runtime.history(), self.model.ranks, self.runtime.communicator)
        self.ended = self.timeline.meetings.over = True
        self.timeline.meetings.watch.rest()
        self.model.ranks.forget()
        self.runtime.abort()

    def close(self) -> None:
        """Frees communicators and buffers, on all ranks together; the module cannot run afterwards."""
        if self.capture.replays is not None:
            self.capture.replays.forget()  # before the communicators that graphs use
        if not self.ended:  # else there are no peers to wait for
            self.runtime.close()
        self.ended = self.timeline.meetings.over = True
        self.timeline.order.rest()
        self.timeline.meetings.watch.rest()
        for shards in self._local_shards.values():
            shards.detach()
        self._retire()


def _retire(runtime: Any, ranks: Ranks, at_exit: Callable[[], None]) -> None:
    atexit.unregister(at_exit)
    runtime.close(0.0)
    ranks.close()


compat.never_frames("lightning_deepcompile")  # the rooms below are imported by now
