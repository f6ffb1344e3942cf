"""Keeps optimizer states of all optimizers where `plan.fit` and `plan.fit_measured` decide that they live."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.offload.leaving_states import StateSizes, probe_states
from lightning_deepcompile.offload.reserve import reserve
from lightning_deepcompile.offload.states import StateOffload
from lightning_deepcompile.offload.temporaries import probe_temporaries, step_bytes
from lightning_deepcompile.plan.budget import MemoryBudgetError
from lightning_deepcompile.plan.fit import MemoryPlan, Move, Need, fit, move_all
from lightning_deepcompile.plan.fit_measured import MeasuredPlan
from lightning_deepcompile.plan.offload import OffloadMode, StatePlaces, check_host, chunk_bytes, leaving_order
from lightning_deepcompile.plan.state_copies import LEAST_SLOTS
from lightning_deepcompile.plan.state_memory import StateMemory
from lightning_deepcompile.profile.peak_memory import PeakMemory
from lightning_deepcompile.ranks.exchange import maxima
from lightning_deepcompile.sharding.shards import ShardedModel

_log = logging.getLogger(__name__)


class _Seen(NamedTuple):
    """Bytes that the step before the decision took, of the rank that took the most.

    Args:
        peak: The most of forward and backward passes, without optimizer states.
        stepping: While the optimizer steps, without its states: parameters, gradients, temporary values of a chunk.
        states: Of all optimizers, those that can leave.
        buffers: The most that states need on the device to come and go.
        budget: Bytes that may be used.
    """

    peak: int
    stepping: int
    states: int
    buffers: int
    budget: int


class Residency:
    """Keeps as many optimizer states in host memory as the settings and the memory budget ask for.

    The decision falls in the first optimizer step: by then forward and backward passes have shown what they take, and
    there are no states yet, or only loaded ones, which wait in host memory for it. So no step ever holds more than the
    plan allows, the first included.

    Args:
        config: What memory may be used.
        mode: How states are offloaded: ``"auto"`` or ``"all"``.
        model: How parameters are sharded.
        runtime: ``_C.Runtime`` that copies.
        group: The ranks.
        device: Where states are stepped.
        memory: Of that device.
        limit: Bytes of host memory that this rank may use; the same on all ranks.

    Attributes:
        plan: The decision; None before the first optimizer step.
        expected: Where a plan that was read has states: they go there if the step that was seen fits with it.
    """

    def __init__(
        self,
        config: CompileConfig,
        mode: OffloadMode,
        model: ShardedModel,
        runtime: Any,
        group: dist.ProcessGroup,
        device: torch.device,
        memory: PeakMemory,
        limit: int,
    ) -> None:
        self._config, self._mode, self._model, self._runtime = config, mode, model, runtime
        self._group, self._device, self._memory, self._limit = group, device, memory, limit
        self._chunk_bytes = chunk_bytes(
            2 * sum(flat.nbytes for flat in model.flat_layouts if flat.is_trained)
        )  # Adam's
        self._attached: list[tuple[weakref.ref[Optimizer], StateOffload]] = []
        self._observing = False
        self._seen: _Seen | None = None  # what the decision fell by
        self._away = 0  # bytes that leave
        self._coming = 0  # bytes in host memory before some come back
        self._last = 0, 0  # bytes in host memory and bytes moved, of optimizers that are retired
        self._slots = LEAST_SLOTS
        self._before: tuple[StatePlaces, MemoryPlan] | None = None  # what `undo` goes back to
        self.plan: MemoryPlan | None = None
        self.expected: StatePlaces | None = None

    def attach(self, optimizer: Optimizer, *, elementwise: bool, has_stepped: bool) -> StateOffload | None:
        """Takes charge of an optimizer's states.

        Args:
            optimizer: Before its first step, and before states are loaded into it.
            elementwise: Whether it is one of PyTorch's own classes, which step alike on all parameters and on a chunk.
            has_stepped: Whether it has stepped before the module was sharded.

        Returns:
            What lets it step chunk by chunk; None if it cannot, and its states need not leave: then they stay.

        Raises:
            ValueError: If it cannot step chunk by chunk, where all shall leave.
            MemoryBudgetError: If all its states shall leave, and host memory does not hold them.
        """
        try:
            sizes = self._probed(optimizer, has_stepped)
        except ValueError as error:
            if self._mode == "all":
                raise
            if self._group.rank() == 0:
                _log.info("All states of %s stay on the device. %s", type(optimizer).__name__, error)
            return None
        offload = StateOffload(
            optimizer,
            self._runtime,
            sizes,
            probe_temporaries(optimizer, self._device) if elementwise else (),
            self._chunk_bytes,
            before_step=self._decide,
            local_of=self._local_of,
            host_of=self._host_of,
        )
        offload.leaving = lambda local: True  # until it is decided: loaded states do not come to the device first
        offload.optional = self._mode == "auto"
        self._attached.append((weakref.ref(optimizer), offload))
        for _, one in self._attached:
            one.alone = len(self._attached) == 1
        self.plan = None
        self._observing = False
        if self._mode == "all":
            check_host(sum(size for *_, size in self._sizes()), self._limit, self._config.host_memory_budget)
            self._take_host_memory(list(self._sizes()))
        return offload

    def _probed(self, optimizer: Optimizer, has_stepped: bool) -> StateSizes:
        name, setting = type(optimizer).__name__, f"CompileConfig(offload={self._config.offload!r})"
        if has_stepped:
            raise ValueError(
                f"{name} has stepped before the module was sharded, so its states cannot be offloaded ({setting}). "
                "Build it in `configure_optimizers`, or use offload='none'."
            )
        if "closure" not in inspect.signature(type(optimizer).step).parameters:
            raise ValueError(
                f"{setting}: `{name}.step` takes no closure, as PyTorch's optimizers do. Add the argument, or use "
                "offload='none'."
            )
        return probe_states(optimizer, self._device)

    def begin_step(self, waits: bool) -> None:
        """Call before a training step's forward pass: it uses the memory of the optimizer's buffers as they empty.

        Args:
            waits: Whether its program waits for that itself.
        """
        self._runtime.states.forget_fetched()  # of a step that was skipped
        if not waits:
            self._runtime.states.release()
        if self._coming > self.host_bytes:  # the optimizer has stepped since
            self._coming = 0
            self._runtime.states.synchronize()  # what nobody uses any more is freed
        undecided = self._mode == "auto" and self.plan is None
        if undecided and not self._observing:
            self._memory.restart()
        self._observing = True

    def set_slots(self, slots: int) -> None:
        """Sets how many chunks of states may be on the device while an optimizer steps."""
        self._slots = slots
        for _, offload in self._attached:
            offload.slots = slots

    def retire(self) -> None:
        """Stops managing all optimizers: their states move to ordinary host memory, pinned memory is freed."""
        self._last = self.host_bytes, self.moved_bytes
        for _, offload in self._attached:
            offload.retire()
        self._attached.clear()

    @property
    def places(self) -> StatePlaces | None:
        """The location of the states; None before the first decision, and if there are no states."""
        memory = self.memory()
        return None if memory is None else StatePlaces(memory.away, self._slots)

    @property
    def host_bytes(self) -> int:
        """Bytes of states in host memory; after the end of training, as many as there were."""
        return sum(offload.host_bytes for _, offload in self._attached) if self._attached else self._last[0]

    @property
    def moved_bytes(self) -> int:
        """Bytes that the last steps of all optimizers copied, out and in."""
        return sum(offload.moved for _, offload in self._attached) if self._attached else self._last[1]

    def describe(self) -> str:
        """Describes what is in host memory and why; "" if nothing is."""
        return "" if self.plan is None else self.plan.describe("states")

    def _decide(self) -> None:
        """Decides, in the first optimizer step after `attach`; then a collective."""
        if self.plan is not None:
            return
        sizes = list(self._sizes())
        mine = self._need(sizes)
        whole, divided = self.temporaries()
        told = (mine.peak, mine.stepping, mine.states, mine.buffers, -mine.budget, whole, divided)
        peak, stepping, states, buffers, least, whole, divided = map(int, maxima(told, self._group))
        for _, offload in self._attached:
            offload.divided = stepping + states + whole > -least
        stepping += divided
        self._seen = seen = _Seen(peak, stepping, states, buffers, -least)
        # What many parameters' states go through is as large as a chunk; larger ones go last.
        units = tuple(size for *_, size in sizes if size > 0)
        chunks = Move("states", units, slots=LEAST_SLOTS, least=self._chunk_bytes, most=buffers, at="stepping")
        need = Need({"passes": peak + states, "stepping": stepping + states}, (chunks,))
        if self._mode == "all":
            plan = move_all(need, seen.budget, f"offload={self._config.offload!r}")
        else:
            plan = fit(need, seen.budget, "same")
            if states:
                plan.check(self._config.memory_budget)
        check_host(plan.bytes("states"), self._limit, self._config.host_memory_budget)
        self.plan = plan  # `memory` asks for it
        self.plan = plan = self._as_planned(plan)
        if self._mode == "auto":
            self._choose(sizes, plan.bytes("states"))
        if self._group.rank() == 0:
            _log.info("%s", self.describe() or f"All optimizer states stay on the device: {plan.why}")

    def _as_planned(self, plan: MemoryPlan) -> MemoryPlan:
        """Returns `plan`, or that of the loaded plan if its programs leave enough memory; they have run by then."""
        places, memory, need = self.expected, self.memory(), self._seen
        if places is None or memory is None or need is None:
            return plan
        away = places.away if memory.movable else memory.away
        most = max(need.peak + memory.total - away, memory.while_stepping(away, places.slots))
        if most > need.budget or away > min(memory.host, memory.total):
            return plan
        self.set_slots(places.slots)
        if not memory.movable:
            return plan
        return replace(plan, peak=most, moved=memory.moved(away), reason="as in the plan that was read")

    def _choose(self, sizes: list[tuple[int, Tensor, int]], least: int) -> None:
        """Offloads the states of the first shards, at least `least` bytes of them. A collective."""
        chosen: dict[int, set[Tensor]] = {}
        leaving = []
        for number, local, size in sizes:
            if least > 0 and size > 0:
                chosen.setdefault(number, set()).add(local)
                leaving.append((number, local, size))
                least -= size
        self._take_host_memory(leaving)
        self._away = sum(size for *_, size in leaving)
        for number, (_, offload) in enumerate(self._attached):
            offload.leaving = chosen.get(number, set()).__contains__

    def memory(self) -> StateMemory | None:
        """Returns what planning needs to move states or to schedule their copies; None before the first decision."""
        seen, sizes = self._seen, tuple(size for *_, size in self._sizes() if size > 0)
        if seen is None or self.plan is None or not sizes:
            return None
        movable = self._mode == "auto"
        away = self._away if movable else sum(sizes)
        fetched = len(self._attached) == 1 and not any(self._hosted_bytes(local) for _, local, _ in self._sizes())
        chunk = self._chunk_bytes if fetched else 0
        return StateMemory(sizes, away, seen.stepping, seen.buffers, self._limit, chunk, movable)

    def follow(self, decided: MeasuredPlan) -> bool:
        """Moves states as a decision with a measured step says. A collective if they move, between steps.

        Returns:
            Whether they are where it says; else nothing has moved.
        """
        places, plan, self._before = self.places, self.plan, None
        self.set_slots(decided.now.slots)
        if decided.moves_states:
            if not self.place(decided.best.away, decided.reason):
                return False
            assert places is not None and plan is not None
            self._before = replace(places, slots=decided.now.slots), plan
            self.set_slots(decided.best.slots)
        return True

    def undo(self) -> bool:
        """Moves states back that the last `follow` has moved; returns whether they did. A collective if so."""
        before, self._before = self._before, None
        if before is None or not self.place(before[0].away, before[1].reason):
            return False
        self.set_slots(before[0].slots)
        return True

    def place(self, away: int, reason: str) -> bool:
        """Moves states between device and host: to the host now, to the device with the optimizer's next step.

        A collective, between steps.

        Args:
            away: Bytes that shall be in host memory, of whole shards' states.
            reason: Why, in words.

        Returns:
            Whether all ranks could take so much; else nothing changed, and a warning says so.
        """
        memory = self.memory()
        assert self.plan is not None and memory is not None
        before = self._away
        try:
            self._choose(list(self._sizes()), away)
        except MemoryBudgetError as error:
            if self._group.rank() == 0:
                _log.warning("Optimizer states stay where they are. %s", error)
            return False
        for _, offload in self._attached:
            offload.depart()
        self._coming = self.host_bytes if self._away < before else 0
        self.plan = replace(self.plan, moved=memory.moved(self._away), reason=reason)
        return True

    def _take_host_memory(self, leaving: list[tuple[int, Tensor, int]]) -> None:
        """Takes host memory before anything relies on it; raises on all ranks if one of them did not get it."""
        coming = [(local, size) for number, local, size in leaving if not self._attached[number][1].holds(local)]
        reason = reserve(self._runtime, coming, self._group)
        if reason:
            raise MemoryBudgetError(reason)

    def _need(self, sizes: list[tuple[int, Tensor, int]]) -> _Seen:
        states = sum(size for *_, size in sizes)
        hosted = [self._hosted_bytes(local) for _, local, _ in sizes]  # shards that come and go with their states
        largest = max((size + shard for (*_, size), shard in zip(sizes, hosted, strict=True)), default=0)
        if self._device.type == "cuda":
            peak, stepping = self._memory.latest, self._memory.current
        else:
            grads = sum(buffer.flat.numel() * buffer.flat.itemsize for buffer in self._model.grad_buffers)
            peak = stepping = self._model.device_bytes + grads
        buffers = min(LEAST_SLOTS * max(self._chunk_bytes, largest), states + sum(hosted))
        if any(hosted):  # which need the buffers in any case
            stepping, buffers = stepping + buffers, 0
        budget = self._memory.limit(self._config.memory_budget)
        return _Seen(peak, stepping, states, buffers, budget)

    def temporaries(self) -> tuple[int, int]:
        """Returns the bytes that optimizers' steps take besides states: on all shards together, and chunk by chunk."""
        pairs = []
        for reference, offload in self._attached:
            optimizer = reference()
            groups = [] if optimizer is None else optimizer.param_groups
            elements = [[self._elements(p) for p in group["params"] if p.requires_grad] for group in groups]
            pairs.append(step_bytes(offload.temporaries, elements, self._chunk_bytes))
        return max((whole for whole, _ in pairs), default=0), max((divided for _, divided in pairs), default=0)

    def _elements(self, parameter: Tensor) -> int:
        sharded = self._sharded(parameter)
        return parameter.numel() if sharded is None else sharded.layout.shard_numel

    def _sizes(self) -> Iterator[tuple[int, Tensor, int]]:
        """Each optimizer's number, its shards in the order in which their states leave, and what those take.

        Bytes are padded, so equal on all ranks.
        """
        yield from sorted(self._all_sizes(), key=lambda one: leaving_order(one[2], self._chunk_bytes))

    def _all_sizes(self) -> Iterator[tuple[int, Tensor, int]]:
        for number, (reference, offload) in enumerate(self._attached):
            optimizer = reference()
            for index, group in enumerate(optimizer.param_groups if optimizer is not None else []):
                for parameter in group["params"]:
                    sharded = self._sharded(parameter)
                    local = parameter if sharded is None else sharded.local
                    if parameter.requires_grad:
                        size = offload.sizes.of(index, local.dtype, self._elements(parameter))
                        yield number, local, size

    def _sharded(self, parameter: Tensor) -> Any:
        return self._model.by_parameter.get(parameter) or self._by_local.get(parameter)

    @cached_property
    def _by_local(self) -> dict[Tensor, Any]:
        return {sharded.local: sharded for sharded in self._model.parameters}

    def _host_of(self, local: Tensor) -> Tensor | None:
        sharded = self._by_local.get(local)
        return None if sharded is None else sharded.host

    def _hosted_bytes(self, local: Tensor) -> int:
        sharded = self._by_local.get(local)
        if sharded is None or sharded.host is None:
            return 0
        return sharded.layout.shard_numel * local.dtype.itemsize

    def _local_of(self, parameter: Tensor) -> Tensor:
        sharded = self._model.by_parameter.get(parameter)
        return parameter if sharded is None else sharded.local
