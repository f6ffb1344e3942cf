"""Decides on one CPU process, before anything is bought or rented, whether a training step fits, and how long it takes.

What decides is what decides in training: sharding by sizes, the trace of the step, the look at its programs before they
run, the passes, and the trade of optimizer states. Only rates come from a table of devices.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_deepcompile.capture.sync_batchnorm import trace_sync_batchnorm
from lightning_deepcompile.compat.fake import fake_ranks
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.estimate.tracing import EstimateError, TracedStep, without_memory
from lightning_deepcompile.estimate.work import seconds_of
from lightning_deepcompile.offload.activations import ActivationOffload
from lightning_deepcompile.offload.leaving_states import probe_states
from lightning_deepcompile.offload.parameters import decide_hosted
from lightning_deepcompile.offload.temporaries import probe_temporaries, step_bytes
from lightning_deepcompile.plan.budget import parse_budget
from lightning_deepcompile.plan.context import NO_LIMIT, PlanContext
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.devices import Device
from lightning_deepcompile.plan.fit_measured import MeasuredPlan, Planned, fit_measured
from lightning_deepcompile.plan.known_passes import DEFAULT_SCHEDULE, resolve_passes
from lightning_deepcompile.plan.memory_need import MemoryNeed, memory_need
from lightning_deepcompile.plan.offload import chunk_bytes, leaving_order
from lightning_deepcompile.plan.optimize import PassEffect, optimize
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.plan.state_copies import LEAST_SLOTS
from lightning_deepcompile.plan.state_memory import StateMemory
from lightning_deepcompile.plan.step_pass import Pass
from lightning_deepcompile.plan.topology import Topology
from lightning_deepcompile.profile.build import leave_room
from lightning_deepcompile.profile.forecast import forecast
from lightning_deepcompile.profile.holds import hold_ratio
from lightning_deepcompile.profile.memory import scattered
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.program.printer import format_bytes, format_program
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.ranks.mesh import make_mesh
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.runtime import load_extension
from lightning_deepcompile.sharding.access import step_states
from lightning_deepcompile.sharding.checks import check_module
from lightning_deepcompile.sharding.shards import ShardedModel
from lightning_deepcompile.sharding.wire_dtypes import WireDtypes
from lightning_deepcompile.step.state_sizes import predict_state_bytes
from lightning_deepcompile.step.ways import is_elementwise
from lightning_deepcompile.tuning.agenda import pass_schedule
from lightning_deepcompile.tuning.foresight import Foresight
from lightning_deepcompile.tuning.retracing import Retracing

_CONTEXT = 600 << 20
"""Bytes of a GPU that its driver, libraries and communicators take beside the allocator."""

PER_NODE = 8
"""Devices of a node."""
_LEAST_MEMORY = 1 << 30
MOST_RANKS = 1 << 16
"""The most ranks that are estimated for."""


@dataclass(frozen=True)
class Request:
    """The settings, ranks and device that a step is estimated for.

    Args:
        config: Settings.
        stage: ZeRO stage.
        ranks: All data-parallel ranks.
        mesh: As of the strategy, but ``"auto"``.
        hybrid: Whether the ranks of a node share the parameters where no mesh says otherwise.
        device: One for each rank.
        memory: Bytes of each device.
        dtypes: The dtypes in which parameters and gradients travel.
        prepare: Converts the module as the strategy does before it shards it.
        around: Gives the context that a training step runs in.
    """

    config: CompileConfig
    stage: int
    ranks: int
    mesh: tuple[int, int] | None
    hybrid: bool
    device: Device
    memory: int
    dtypes: WireDtypes
    prepare: Callable[[pl.LightningModule], pl.LightningModule]
    around: Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class StepEstimate:
    """Predicted memory and time of a training step.

    Args:
        ranks: All data-parallel ranks.
        device: Name of the device.
        parameters: Number of parameters of the module.
        budget: Bytes of a device that may be allocated.
        peak: The most that will be, with the `moves`.
        least: The least that the step could run in.
        need: What takes the memory at its peak.
        traced: The same while the step runs, with all moves that change no bit.
        shared: Of `least`, bytes that more ranks share among them.
        moves: What is offloaded, computed again or chunked so that the step fits, in words; none where all fits.
        seconds: Duration of a step of one micro-batch.
        compute_seconds: Of these, compute, with the optimizer.
        exposed_seconds: Of these, compute stands still for communication.
        operations: Floating-point operations of a rank's step, without what is computed again.
        notes: What the numbers leave out, or what makes them less sure.
        programs: The programs of a micro-batch, printed, by name.
    """

    ranks: int
    device: str
    parameters: int
    budget: int
    peak: int
    least: int
    need: MemoryNeed
    traced: MemoryNeed
    shared: int
    moves: tuple[str, ...]
    seconds: float
    compute_seconds: float
    exposed_seconds: float
    operations: int
    notes: tuple[str, ...]
    programs: dict[str, str]

    @property
    def fits(self) -> bool:
        """True if a device has the memory."""
        return self.least <= self.budget

    @property
    def ranks_needed(self) -> int | None:
        """The least number of ranks, a multiple of those asked for, that is expected to do; None where none does."""
        ranks = self.ranks
        while ranks <= MOST_RANKS:
            if self.least - self.shared + self.shared * self.ranks // ranks <= self.budget:
                return ranks
            ranks *= 2
        return None

    def __str__(self) -> str:
        """The estimate as a text."""
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        lines = [f"{self.parameters / 1e9:.2f} billion parameters on {ranks} of {self.device}"]
        allowed = f"{format_bytes(self.budget)} may be allocated"
        if self.fits:
            how = "with these moves" if self.moves else "as it is"
            lines.append(f"fits {how}: {format_bytes(self.peak)} at the peak; {allowed}")
        else:
            lines.append(f"does not fit: {format_bytes(self.least)} are the least that would do; {allowed}")
        lines += [f"  - {move}" for move in self.moves]
        lines += ["memory at the peak, of a device", str(self.need)]
        if not self.fits:
            ranks_needed = self.ranks_needed
            more = "" if ranks_needed is None else f"{ranks_needed} ranks, "
            lines.append(f"what would do: {more}a smaller batch, or activation checkpointing")
        rate = self.operations / self.seconds / 1e12 if self.seconds else 0.0
        lines.append(
            f"a step takes about {self.seconds * 1e3:.0f} ms ({rate:.0f} TFLOP/s a rank); compute and optimizer "
            f"{self.compute_seconds * 1e3:.0f} ms, waiting for communication {self.exposed_seconds * 1e3:.0f} ms"
        )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def parse_memory(value: int | str) -> int:
    """Returns the bytes of a device.

    Args:
        value: Bytes, or a text such as ``"80GiB"``.

    Raises:
        ValueError: For another value, and for less than 1 GiB.
    """
    number = int(value) if isinstance(value, str) and value.isdigit() else value
    try:
        size = parse_budget(number, total=1, name="device_memory")
    except ValueError:
        size = 0
    if isinstance(number, float) or size < _LEAST_MEMORY:
        raise ValueError(f"device_memory is {value!r}: expected bytes, or a text such as '80GiB', of at least 1 GiB.")
    return size


class _MemoryOfDevice(PeakMemory):
    """Memory of a device that this machine need not have.

    Args:
        total: Bytes of the device.
        beside: Bytes that others than the allocator take.
        current: Bytes that are allocated before the step begins.
    """

    def __init__(self, total: int, beside: int) -> None:
        super().__init__(torch.device("cpu"))
        self._total, self._others = total, beside
        self.allocated = 0

    def limit(self, budget: int | float | str | None) -> int:
        """Bytes that may be allocated."""
        limit = parse_budget(budget, self._total)
        if budget is None or isinstance(budget, float):
            limit -= self._others
        return max(limit - scattered(self.largest, self._total - self._others - limit), 1)

    @property
    def current(self) -> int:
        """Bytes allocated."""
        return self.allocated


def estimate_step(module: pl.LightningModule, batch: Any, request: Request) -> StepEstimate:
    """Estimates a training step; `module` stays as it is.

    Args:
        module: With memory, without, or on the meta device.
        batch: Of one rank: what ``training_step`` gets.
        request: What it is estimated for.

    Raises:
        EstimateError: If the module cannot be built, or its step cannot be traced, without memory.
        ValueError: For a module that cannot be sharded.
    """
    if step_states(module):
        raise EstimateError("The module is sharded already. Call `estimate` before `trainer.fit`, or with a fresh one.")
    if dist.is_initialized():
        raise EstimateError(
            "This process is a rank of a training already. Call `estimate` before `trainer.fit`, or in a process of "
            "its own: python -m lightning_deepcompile estimate."
        )
    load_extension()
    with fake_ranks(request.ranks):
        return _Estimate(module, batch, request).run()


class _Estimate:
    """The parts of one estimate, inside of a group of fake ranks."""

    def __init__(self, module: pl.LightningModule, batch: Any, request: Request) -> None:
        self._request, config, stage = request, request.config, request.stage
        on_gpu = request.device.type == "cuda"
        self._device = torch.device(request.device.type, *([0] if on_gpu else []))  # named, never used
        self._memory = _MemoryOfDevice(request.memory, _CONTEXT if on_gpu else 0)
        module, batch, mode = without_memory(module, batch)
        try:
            with mode:
                module.configure_model()
                module = request.prepare(module)
        except Exception as error:
            raise EstimateError(
                f"{type(module).__name__} cannot be built without memory: {type(error).__name__}: {error}"
            ) from error
        check_module(module, world_size=request.ranks)
        trace_sync_batchnorm(module)
        self._parameters = sum(parameter.numel() for parameter in module.parameters())
        sizes: dict[str, Any] = {"device_type": "cpu", "world_size": request.ranks, "per_node": PER_NODE}
        self._ranks = ranks = Ranks(make_mesh(request.mesh, hybrid=request.hybrid, **sizes))
        self._hosted = decide_hosted(
            config, module, ranks, self._memory, stage=stage, dtypes=request.dtypes, host_bytes=NO_LIMIT
        )
        self._config, offloading = config, self._hosted.offloading
        tight = offloading.states != "none" or offloading.parameters != "none"
        shares = config.memory_budget is None and not tight and offloading.activations != "all"
        self._step = TracedStep(
            module,
            batch,
            mode,
            ranks,
            config,
            stage=stage,
            dtypes=request.dtypes,
            around=request.around,
            hosted=self._hosted.flat_layouts,
            nothing_moves=shares and request.ranks == 1 and config.schedule in (None, "auto"),
        )
        self._buffers = sum(buffer.nbytes for buffer in module.buffers())
        self._notes: list[str] = []
        if not module.automatic_optimization:
            self._notes.append(
                f"{type(module).__name__} steps its optimizers itself: its backward passes count as if they came after "
                "all of its forward passes, and as if no optimizer was toggled."
            )

    def run(self) -> StepEstimate:
        """Traces, decides and predicts."""
        step, request, config = self._step, self._request, self._config
        capture, model = step.capture, step.model
        entries = pass_schedule(config, request.stage, self._ranks.shards)
        capture.scheduling.passes = entries[0][1]
        passes: Sequence[Pass] = entries[-1][1] if len(entries) > 1 else ()
        offloading = self._hosted.offloading
        leaving = ActivationOffload(offloading, model, self._device, request.stage, NO_LIMIT)
        group = model.ranks.group
        retracing = Retracing(capture, group)
        may_leave = offloading.states != "none"
        foresight = Foresight(capture, retracing, leaving, self._memory, group)
        optimizers = self._optimizers(step)
        sizes = self._states(optimizers, model)
        leaving.stepping = max((self._stepping(one, model) for one in optimizers or ()), default=0)
        retraced = []
        while True:
            programs = step.trace()
            if not programs:
                raise EstimateError(
                    "The training step runs no compiled code that trains a parameter: "
                    + ("; ".join(step.fallbacks.reasons.values()) or "its loss depends on none.")
                )
            eager = sum(step.reads.saved.values()) + step.reads.gathered
            self._memory.allocated = model.device_bytes + self._buffers + eager + _inputs(programs)
            again = foresight.look(0, programs, _say, restartable=True)
            if again is None:
                break
            retraced.append(again.reason)
        programs = [executable.program for executable in step.executables()]
        assert foresight.need is not None and foresight.plan is not None
        if leaving.needed and config.schedule == "auto" and request.stage == 3 and not passes:
            passes = resolve_passes(DEFAULT_SCHEDULE[-1]["passes"], profiled=True)
        need = foresight.need
        standing = need.standing if self._device.type == "cpu" else replace(need.standing, states=sum(sizes))
        arrived = foresight.arrived(programs)
        lasting = standing.total - (0 if arrived is None else standing.gradients)
        profile = self._profile(programs, lasting, arrived, sum(sizes), offloads=leaving.needed)
        scheduling = capture.scheduling
        start = [scheduling.start([p.name for p in programs], scheduling.passes)[p.name] for p in programs]
        profile = replace(profile, schedules=tuple(start))
        settings = scheduling.settings
        settings = replace(settings, offload_activations="auto") if leaving.needed else settings

        def plan(profile: Profile) -> Planned:
            if passes:
                return optimize(start, passes, PlanContext(settings, profile))
            return list(start), [PassEffect("", "", simulate(start, profile))]

        states = StateMemory(
            sizes,
            0,
            standing.at_step - standing.states,
            LEAST_SLOTS * max(sizes, default=0),
            NO_LIMIT,
            chunk=chunk_bytes(sum(sizes)),
            movable=may_leave,
        )
        decided = fit_measured(profile, plan, states)
        best = decided.best
        prediction = best.effects[-1].prediction
        shown = replace(standing, states=standing.states - best.away) if standing.states else standing
        table = memory_need(best.schedules, best.profile, shown, arrived)
        notes = self._notes + [
            f"{function} runs uncompiled, and is counted by blocks: {reason}"
            for function, reason in step.fallbacks.reasons.items()
        ]
        return StepEstimate(
            ranks=request.ranks,
            device=request.device.name,
            parameters=self._parameters,
            budget=foresight.plan.room,
            peak=max(decided.peak, table.total),
            least=foresight.plan.least,
            need=table,
            traced=need,
            shared=model.device_bytes + need.standing.gradients + (0 if may_leave else need.standing.states),
            moves=(*retraced, *self._moves(decided)),
            seconds=prediction.seconds,
            compute_seconds=prediction.compute_seconds,
            exposed_seconds=prediction.exposed_seconds,
            operations=capture.frames.flops_done,
            notes=tuple(notes),
            programs={program.name: format_program(program) for program in programs},
        )

    def _moves(self, decided: MeasuredPlan) -> list[str]:
        forwards = [one for one in decided.best.schedules if one.kind == "forward"]
        saved = sum(one.size for each in forwards for one in each.saved if one.number in each.offloaded)
        copied = f"{format_bytes(saved)} of saved tensors in host memory" if saved else ""
        return [text for text in (copied, decided.describe("states"), self._hosted.describe()) if text]

    def _optimizers(self, step: TracedStep) -> list[Optimizer] | None:
        """Returns what the module configures; None where that needs a Trainer."""
        try:
            return step.optimizers()
        except Exception as error:  # whatever a user's code does without a trainer
            self._notes.append(
                f"`configure_optimizers` cannot be called without a Trainer ({type(error).__name__}: {error}): "
                "optimizer states count as Adam's."
            )
            return None

    def _states(self, optimizers: Sequence[Optimizer] | None, model: ShardedModel) -> tuple[int, ...]:
        """Returns the bytes of each shard's optimizer states, in the order in which they leave."""
        if optimizers is None:
            sizes = [2 * p.local.nbytes for p in model.parameters if p.dtensor.requires_grad]
        else:
            sizes = [size for optimizer in optimizers for size in self._states_of(optimizer, model)]
        chunk = chunk_bytes(sum(sizes))
        return tuple(sorted(sizes, key=lambda size: leaving_order(size, chunk)))

    def _stepping(self, optimizer: Optimizer, model: ShardedModel) -> int:
        """Returns the bytes that a step takes besides states; 0 where that is not known."""
        if not is_elementwise(optimizer):
            return 0
        groups = [
            [model.by_parameter[p].layout.shard_numel for p in group["params"] if p in model.by_parameter]
            for group in optimizer.param_groups
        ]
        found = probe_temporaries(optimizer, torch.device("cpu"), lists=self._device.type == "cuda")
        largest = chunk_bytes(2 * sum(flat.nbytes for flat in model.flat_layouts if flat.is_trained))
        whole, divided = step_bytes(found, groups, largest)
        return whole if self._hosted.offloading.states == "none" else divided

    def _states_of(self, optimizer: Optimizer, model: ShardedModel) -> list[int]:
        trained = [
            (index, parameter)
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter in model.by_parameter and parameter.requires_grad
        ]
        layouts = [model.by_parameter[parameter].layout for _, parameter in trained]
        adams = [2 * layout.shard_numel * layout.spec.dtype.itemsize for layout in layouts]
        try:
            if is_elementwise(optimizer):
                known = probe_states(optimizer, torch.device("cpu"))
                pairs = zip(trained, layouts, strict=True)
                return [known.of(index, layout.spec.dtype, layout.shard_numel) for (index, _), layout in pairs]
        except ValueError as error:
            self._notes.append(f"{error} Its states count as Adam's.")
            return adams
        # States may be quantised: they follow whole tensors, which ranks share evenly.
        total = predict_state_bytes(optimizer, {parameter: tuple(parameter.shape) for _, parameter in trained})
        if total is None:
            self._notes.append(f"{type(optimizer).__name__} does not step without values: its states count as Adam's.")
            return adams
        elements = sum(layout.shard_numel for layout in layouts)
        return [math.ceil(total / model.ranks.shards * layout.shard_numel / elements) for layout in layouts]

    def _profile(
        self,
        programs: Sequence[Program],
        standing: int,
        arrived: Mapping[str, int] | None,
        states: int,
        *,
        offloads: bool,
    ) -> Profile:
        """Returns a profile with the memory that sizes tell, and the times that the table of devices tells."""
        request, config, model, device = self._request, self._config, self._step.model, self._request.device
        trained = [p for p in model.parameters if p.dtensor.requires_grad]
        shards = sum(p.local.nbytes for p in trained)
        link, ranks, replicas = device.link, request.ranks, self._ranks.replicas
        in_nodes = replicas > 1 or (ranks > PER_NODE and ranks % PER_NODE == 0)
        profile = forecast(
            programs,
            standing,
            arrived=arrived,
            world_size=self._ranks.shards,
            replicated=replicas > 1,
            device_type=device.type,
            hold_ratio=hold_ratio(model.gradient_dtypes),
            hosted=model.hosted_bytes,
            budget=self._memory.limit(config.memory_budget),
            optimizer_seconds=device.moving_seconds(3 * shards + 2 * states),  # reads gradients; reads, writes the rest
            copy_out=device.host,
            copy_in=device.host,
            host_budget=NO_LIMIT if offloads else None,
            topology=Topology(PER_NODE, device.node_bandwidth, replicas=replicas) if in_nodes else None,
        )
        regions = dict(profile.regions)
        for program in programs:
            for name, seconds in seconds_of(program, device.seconds).items():
                key = f"{program.name}/{name}"
                regions[key] = replace(regions[key], seconds=seconds)
        profile = replace(profile, regions=regions, gather=link, reduce=link)
        return leave_room(profile) if config.memory_budget is None else profile


def _inputs(programs: Sequence[Program]) -> int:
    """Bytes that the first program's values take before it runs: those of the batch."""
    regions = forecast(programs[:1], 0, world_size=1, device_type="cpu").regions
    return next(iter(regions.values())).before if regions else 0


def _say(text: str, level: int) -> None:
    """Logs what is decided: the estimate says it, too."""
    _log.log(logging.DEBUG, "%s", text)


_log = logging.getLogger(__name__)
