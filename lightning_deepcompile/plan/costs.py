"""The measurements that planning uses: times, sizes and memory of the machine and the program, as data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, replace
from typing import Any

from lightning_deepcompile.plan.records import RecordError, kind_of, parse, read_record
from lightning_deepcompile.plan.topology import Topology, TopologyError
from lightning_deepcompile.program.schedule import Instruction, Schedule, ScheduleError, check_schedule

PROFILE_VERSION = 6

REDUCE_WINDOW = 2
"""Groups of full gradients that may be on their way to their shards before compute waits for the oldest: one travels
while the next one is computed. Each costs the memory of one block's gradients."""


WORST = "worst"
"""Metadata of a field: the sign with which the largest of the ranks' numbers counts, and the number's type."""


def _most(default: Any = MISSING, kind: type | None = None) -> Any:
    """A field of which the largest of the ranks' numbers counts; an object's own fields say it of its numbers."""
    return field(default=default, metadata={WORST: (1, kind or type(default))})


def _least(default: Any = MISSING, kind: type | None = None) -> Any:
    """A field of which the smallest of the ranks' numbers counts; an object's numbers count the other way round."""
    return field(default=default, metadata={WORST: (-1, kind or type(default))})


class ProfileError(ValueError):
    """A profile that cannot be read, or does not cover the program that is planned."""


@dataclass(frozen=True)
class Link:
    """A model of the time that a group of collectives takes.

    Args:
        latency: Seconds for a group of no bytes.
        bandwidth: Bytes per second and rank that a ring moves (NCCL's bus bandwidth).
    """

    latency: float = _most(kind=float)
    bandwidth: float = _least(kind=float)

    def seconds(self, size: int, world_size: int) -> float:
        """Seconds to gather, or to reduce, `size` bytes (of the whole tensors) over `world_size` ranks."""
        return self.latency + size * (world_size - 1) / world_size / self.bandwidth

    def __str__(self) -> str:
        speed, microseconds = self.bandwidth / 1e9, f"{self.latency * 1e6:.0f}"
        latency = "" if microseconds == "0" else f"{microseconds} us + "
        return f"{latency}{f'{speed:.2f}' if speed >= 0.1 else f'{speed:.2g}'} GB/s"

    def copy_seconds(self, size: int) -> float:
        """Seconds to copy `size` bytes from one place to another."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Contention:
    """Factors by which work slows down while other work runs.

    Args:
        beside_gathers: Factor on compute while a gather runs: it takes memory bandwidth, and multiprocessors if kernels
            gather.
        beside_reductions: Factor on compute while a reduction runs, which kernels do. With both, the slow-downs add up.
        shared_link: Factor on gathers and reductions while the other of the two runs; 2 means that they share a link.
        duplex: Factor on copies to host memory while others come from there, and on those.
    """

    beside_gathers: float = _most(1.0)
    beside_reductions: float = _most(1.0)
    shared_link: float = 2.0
    duplex: float = _most(1.0)


@dataclass(frozen=True)
class RegionCost:
    """The cost of a region each time it runs.

    Args:
        seconds: Time on the device, without communication beside it.
        host: Time that the host needs to launch it; 0 where the host computes itself.
        before: Bytes allocated when it starts, gathered parameters excluded.
        peak: The most bytes while it runs, likewise.
        after: Bytes when it is over, likewise.
    """

    seconds: float = _most(kind=float)
    host: float = _most(0.0)
    before: int = _most(0)
    peak: int = _most(0)
    after: int = _most(0)

    def with_less(self, size: int) -> RegionCost:
        """Returns the cost with `size` bytes less allocated around it."""
        memory = (max(known - size, 0) for known in (self.before, self.peak, self.after))
        return RegionCost(self.seconds, self.host, *memory)

    def of_part(self, part: float, fixed: int) -> RegionCost:
        """Returns the cost for `part` of the batch, where `fixed` bytes do not depend on the batch."""
        memory = (
            min(known, fixed) + int(part * max(known - fixed, 0)) for known in (self.before, self.peak, self.after)
        )
        return RegionCost(part * self.seconds, self.host, *memory)


@dataclass(frozen=True)
class Labels:
    """Readable names for the numbers in a profile.

    Args:
        parameters: The block of each parameter, by its id as text (keys of JSON are texts).
        regions: The blocks that a region works for, separated by commas, by ``"<program name>/<region name>"``.
    """

    parameters: dict[str, str] = field(default_factory=dict)
    regions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resident:
    """Bytes that one rank's device holds from step to step.

    Args:
        shards: Of parameters, without those in host memory.
        states: Of optimizers, likewise.
    """

    shards: int = 0
    states: int = 0

    @property
    def total(self) -> int:
        """Bytes of both."""
        return self.shards + self.states


@dataclass(frozen=True)
class StatesInHost:
    """Optimizer states that wait in host memory.

    Args:
        chunks: Bytes of each chunk of them, which steps by itself. Then `Profile.optimizer_seconds` is without their
            copies, which are simulated.
        share: The share of that time that the chunks take.
        slots: Chunks that may be on the device while the optimizer steps.
        away: Bytes of them that `Profile.regions` and `Profile.host_budget` expect there; None as measured: those that
            were there, but a host that computes has counted activations alone.
    """

    chunks: tuple[int, ...] = ()
    share: float = 1.0
    slots: int = 3
    away: int | None = None


@dataclass(frozen=True)
class Profile:
    """A measured training step.

    Args:
        world_size: Ranks that share the parameters.
        device_type: ``"cuda"`` or ``"cpu"``.
        schedules: The programs of one micro-batch, in the order in which they ran.
        regions: Costs by ``"<program name>/<region name>"``.
        gather: Model of gathers.
        reduce: Model of reductions.
        contention: The slow-down of work that runs at the same time.
        micro_batches: Forward and backward passes per optimizer step.
        accumulates: Whether all but the last of them know that the optimizer does not step yet. Under manual
            optimization none does: what waits for the boundary then happens every time.
        optimizer_seconds: From the end of the last backward pass to the end of the optimizer's step.
        launch_seconds: Time that the host needs for an instruction that is not a region.
        hold_seconds: The time in which compute adds a byte of a whole gradient to a sum that is reduced with the last
            micro-batch; None if that is not known.
        hold_ratio: Bytes of such a sum per byte of the gradient: a sum has the parameter's dtype.
        reduce_window: Groups of gradients that may be on their way before compute waits for the oldest.
        budget: Bytes that may be allocated; None if there is no limit.
        room: Bytes that were taken off the budget for larger batches; they are no reason to offload anything.
        host_budget: Bytes of host memory for saved tensors; None if there is no limit.
        states: Optimizer states that wait in host memory.
        copy_out: Model of copies to host memory.
        copy_in: Model of copies from host memory.
        step_seconds: Duration of ordinary steps before this profile was taken; 0 if unknown.
        exposed_seconds: The time that compute waited for communication in such a step; 0 if unknown.
        unexplained_seconds: The time by which such a step was longer than what its programs and the optimizer are
            expected to take (or shorter, if negative). Predictions include it.
        labels: Names for reports; planning does not look at them.
        resident: Memory besides that of programs, also for reports.
        rows: The rows of each parameter, by its id as text: on other numbers of ranks they are padded to another one.
        hosted: Bytes of each rank's shard of parameters whose shards are in host memory, by id as text.
        window_from: Bytes of the smallest group that is gathered to memory which stays from step to step; 0: none is.
        topology: Nodes that ranks are in; None if all of them are connected as those that were measured.
        replicated: Whether other ranks hold the same shards, and gradients are averaged over them, too.
    """

    world_size: int
    device_type: str
    schedules: tuple[Schedule, ...]
    regions: dict[str, RegionCost] = _most()
    gather: Link = _least()  # a rank that comes late makes all others wait: the shortest time is the transfer's own
    reduce: Link = _least()
    contention: Contention = _most(Contention())
    micro_batches: int = _most(1)
    accumulates: bool = _least(True)
    optimizer_seconds: float = _most(0.0)
    launch_seconds: float = _most(0.0)
    hold_seconds: float | None = _most(None, float)
    hold_ratio: float = _most(1.0)
    reduce_window: int = REDUCE_WINDOW
    budget: int | None = _least(None, int)
    room: int = _most(0)
    host_budget: int | None = _least(None, int)
    states: StatesInHost = StatesInHost()
    copy_out: Link = _most(Link(0.0, 1e12))
    copy_in: Link = _most(Link(0.0, 1e12))
    step_seconds: float = _most(0.0)
    exposed_seconds: float = _most(0.0)
    unexplained_seconds: float = 0.0
    labels: Labels = field(default_factory=Labels)
    resident: Resident = field(default_factory=Resident)
    rows: dict[str, int] = field(default_factory=dict)
    hosted: dict[str, int] = field(default_factory=dict)
    window_from: int = 0
    topology: Topology | None = None
    replicated: bool = False

    @property
    def host_computes(self) -> bool:
        """True if the host is the device: it issues an instruction only when the one before has ended."""
        return self.device_type == "cpu"

    def at_boundary(self, micro_batch: int) -> bool:
        """Returns whether the optimizer is known to step behind the micro-batch of that number."""
        return not self.accumulates or micro_batch + 1 == self.micro_batches

    def cost(self, schedule: Schedule, region: str) -> RegionCost:
        """Returns the cost of `region` of `schedule`.

        Raises:
            ProfileError: If it was not measured.
        """
        key = f"{schedule.name}/{region}"
        if key not in self.regions:
            raise ProfileError(f"The profile has no times of {key}: it was taken of other programs. Take a new one.")
        return self.regions[key]

    def covers(self, schedule: Schedule) -> bool:
        """Returns whether all regions of `schedule` were measured."""
        regions = (call.region for call in schedule.groups("compute"))
        return all(f"{schedule.name}/{region}" in self.regions for region in regions)

    def clock(self, schedule: Schedule) -> list[float]:
        """Seconds after which compute, if it never waits, gets to each instruction of `schedule`, and to its end."""
        moments = [0.0]
        for instruction in schedule.instructions:
            seconds = self.cost(schedule, instruction.region).seconds if instruction.region else 0.0
            moments.append(moments[-1] + seconds)
        return moments

    def gather_seconds(self, sizes: Sequence[int]) -> float:
        """Seconds to gather a group of parameters of `sizes` bytes each."""
        size = sum(sizes)
        if self.topology is None:
            return self.gather.seconds(size, self.world_size)
        moving = self.topology.gather_seconds(size, self.world_size, self.gather.bandwidth, len(sizes))
        return self.gather.latency + moving

    def reduce_seconds(self, sizes: Sequence[int]) -> float:
        """Seconds to reduce a group of gradients of `sizes` bytes each, over replicas, too."""
        size = sum(sizes)
        if self.topology is None:
            return self.reduce.seconds(size, self.world_size)
        launches = 1 if self.topology.replicas == 1 else 2
        moving = self.topology.reduce_seconds(
            size, self.world_size, self.reduce.bandwidth, all_reduces=self.host_computes, operations=len(sizes)
        )
        return launches * self.reduce.latency + moving

    def for_ranks(self, world_size: int, topology: Topology | None = None) -> Profile:
        """Returns the cost of the same program on other ranks: smaller shards with other padding, other collectives.

        Shards of gradients are left in the memory of regions as they were measured.

        Args:
            world_size: Ranks that share the parameters; with replicas, there are as many times more.
            topology: Nodes that they are in; None if all are connected as those that were measured.

        Raises:
            TopologyError: If they do not fill the nodes evenly.
        """
        if topology is not None:
            topology.check(world_size)
        optimizer = self.optimizer_seconds * self.world_size / world_size

        def shrunk(size: int) -> int:
            return size * self.world_size // world_size

        resident = Resident(shrunk(self.resident.shards), shrunk(self.resident.states))
        # Allocators count what is resident; where the host computes, regions are estimates without it.
        less = 0 if self.host_computes else self.resident.total - resident.total
        changes: dict[str, Any] = {
            "optimizer_seconds": optimizer,
            "states": replace(self.states, chunks=tuple(map(shrunk, self.states.chunks))),
            "resident": resident,
            "hosted": {ds_id: shrunk(size) for ds_id, size in self.hosted.items()},
            "regions": {key: cost.with_less(less) for key, cost in self.regions.items()},
            "schedules": tuple(self._padded_for(world_size, schedule) for schedule in self.schedules),
        }
        replicated = self.replicated if topology is None else topology.replicas > 1
        return replace(self, world_size=world_size, topology=topology, replicated=replicated, **changes)

    def with_compute(self, factor: float) -> Profile:
        """Returns the cost of a step whose regions take `factor` times as long, with the same memory."""
        regions = {key: replace(cost, seconds=factor * cost.seconds) for key, cost in self.regions.items()}
        return replace(self, regions=regions)

    def for_share(self, share: float) -> Profile:
        """Returns the cost of the step with `share` of its batch: fewer or smaller micro-batches.

        Compute and activations of a smaller micro-batch count in proportion, the time to launch it as measured: small
        kernels take longer than that.

        Args:
            share: The part of the batch, such as 1/8.
        """
        batches = max(int(self.micro_batches * share), 1)
        part = self.micro_batches * share / batches
        fixed = 0 if self.host_computes else self.resident.total
        regions = {key: cost.of_part(part, fixed) for key, cost in self.regions.items()}
        return replace(self, micro_batches=batches, regions=regions)

    def _padded_for(self, world_size: int, schedule: Schedule) -> Schedule:
        def padded(ds_id: int, size: int, gathered: bool) -> int:
            rows = self.rows.get(str(ds_id), 0)
            if rows == 0:
                return size
            measured = -(-rows // self.world_size) * self.world_size if gathered else rows
            return size * (-(-rows // world_size) * world_size) // measured

        def changed(instruction: Instruction) -> Instruction:
            of = instruction.traits.effect[1]
            if of not in ("parameters", "gradients"):
                return instruction
            pairs = zip(instruction.ids, instruction.sizes, strict=False)
            return replace(instruction, sizes=tuple(padded(i, size, of == "parameters") for i, size in pairs))

        return schedule.with_instructions(map(changed, schedule.instructions))

    def to_json(self) -> str:
        """Returns the profile as text that `from_json` reads."""
        return json.dumps({"version": PROFILE_VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads the text that `to_json` wrote.

        Raises:
            ProfileError: If the text is no profile, is of another version, or holds values that cannot be.
        """
        try:
            data = parse(text)
            if kind_of(data) == "a plan":
                raise ProfileError("This is a plan, not a profile. `python -m lightning_deepcompile plan` shows it.")
            version = data.pop("version")
        except (RecordError, KeyError, AttributeError, TypeError) as error:
            raise ProfileError(
                f"This is not a profile ({type(error).__name__}: {error}). Write one by `strategy.profile().to_json()`."
            ) from error
        if version != PROFILE_VERSION:
            raise ProfileError(
                f"The profile has version {version!r}; this release reads version {PROFILE_VERSION}. Take a new one."
            )
        try:
            profile = read_record(cls, data, "profile")
            profile.check()
            for schedule in profile.schedules:
                check_schedule(schedule)
        except (RecordError, KeyError, ScheduleError, TopologyError) as error:
            raise ProfileError(f"The profile is damaged ({error}). Take a new one.") from error
        return profile

    def check(self) -> None:
        """Raises for values that no measurement gives.

        Raises:
            ProfileError: Names the value.
        """
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ProfileError(f"The profile's world_size is {self.world_size!r}; expected a positive integer.")
        if not isinstance(self.micro_batches, int) or self.micro_batches < 1:
            raise ProfileError(f"The profile's micro_batches is {self.micro_batches!r}; expected a positive integer.")
        names = ("optimizer_seconds", "launch_seconds", "step_seconds", "exposed_seconds")
        seconds = {name: getattr(self, name) for name in names}
        for name, value in seconds.items():
            if not 0 <= value < math.inf:
                raise ProfileError(f"The profile's {name} is {value!r}; expected seconds, at least 0.")
        for name in ("gather", "reduce", "copy_out", "copy_in"):
            link = getattr(self, name)
            if not (link.bandwidth > 0 and 0 <= link.latency < math.inf):
                raise ProfileError(f"The profile's model of {name} is {link}: bandwidth must be positive.")
        if min(asdict(self.contention).values()) < 1:
            raise ProfileError(f"The profile's {self.contention} has a factor below 1.")
        states = self.states
        if min(states.chunks, default=0) < 0 or states.slots < 1 or not 0 <= states.share <= 1:
            raise ProfileError(
                f"The profile's states are {states.chunks}, in {states.slots} slots, for {states.share} of "
                "the optimizer's time: none can be negative, and there is a slot at least."
            )
        for key, cost in self.regions.items():
            if min(asdict(cost).values()) < 0 or not math.isfinite(cost.seconds + cost.host):
                raise ProfileError(f"The profile's {key} has {cost}: times and sizes cannot be negative.")
        for schedule in self.schedules:
            for position in schedule.at("compute"):
                self.cost(schedule, schedule.instructions[position].region)
