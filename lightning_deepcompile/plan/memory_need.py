"""The memory that a training step needs, by use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.schedule import Schedule


@dataclass(frozen=True)
class Standing:
    """Bytes of one rank's device that are allocated all through a step.

    Args:
        shards: Of parameters, without those in host memory; below stage 3 with the whole parameters.
        gradients: Shards of gradients.
        states: Of optimizers, without those that may wait in host memory.
        other: All else that the allocator has handed out: buffers of the module, the batch.
        stepping: What there is besides while the optimizer steps: temporary values of its class.
    """

    shards: int = 0
    gradients: int = 0
    states: int = 0
    other: int = 0
    stepping: int = 0

    @property
    def total(self) -> int:
        """Bytes of all of them, but for those of the optimizer's step."""
        return self.shards + self.gradients + self.states + self.other

    @property
    def at_step(self) -> int:
        """Bytes while the optimizer steps."""
        return self.total + self.stepping


@dataclass(frozen=True)
class MemoryNeed:
    """Memory by its use, at the moment at which a step needs the most.

    Args:
        standing: Memory that is allocated all the time.
        gathered: Bytes of gathered parameters, and of gradients on their way.
        saved: Bytes of values between regions: saved tensors, activations.
        region: Bytes of what the largest region makes while it runs, or of temporary values of the optimizer's step.
        where: That region, by program and name; "" while the optimizer steps.
    """

    standing: Standing
    gathered: int
    saved: int
    region: int
    where: str

    @property
    def total(self) -> int:
        """The peak."""
        return self.standing.total + self.gathered + self.saved + self.region

    def __str__(self) -> str:
        """The need as a table."""
        rows = {
            "shards of parameters": self.standing.shards,
            "shards of gradients": self.standing.gradients,
            "optimizer states": self.standing.states,
            "buffers and batch": self.standing.other,
            "gathered parameters, whole gradients": self.gathered,
            "saved tensors": self.saved,
            f"largest region ({self.where})" if self.where else "temporary values of the optimizer": self.region,
            "in all": self.total,
        }
        return "\n".join(f"  {name:<44}{format_bytes(size):>12}" for name, size in rows.items() if size)


def would_fit(need: MemoryNeed, room: int, ranks: int) -> list[str]:
    """Returns the ways in which a step that does not fit would, in words.

    Args:
        need: With all moves that are allowed.
        room: Bytes that may be allocated.
        ranks: That share the parameters.
    """
    ways = [f"a budget of {need.total} bytes ({format_bytes(need.total)})"]
    batch = need.saved + need.region + need.standing.other
    sharded = need.standing.shards + need.standing.gradients + need.standing.states
    if batch and (left := room - (need.total - batch)) >= batch // 100:
        ways.append(f"{100 * left // batch} % of this batch")
    if sharded and (left := room - (need.total - sharded)) > 0:
        ways.append(f"{-(-sharded * ranks // left)} ranks in place of {ranks}")
    return [*ways, "activation checkpointing"]


def memory_need(
    schedules: Sequence[Schedule], profile: Profile, standing: Standing, arrived: Mapping[str, int] | None = None
) -> MemoryNeed:
    """Returns the memory at the peak of a step.

    Args:
        schedules: The programs of a micro-batch, in order.
        profile: Its regions' memory includes `standing`, of gradients what has `arrived`.
        standing: What is there while the optimizer steps.
        arrived: Gradient shards that are there when each region runs, by its program's and its own name; None: all.
    """
    point = max(simulate(schedules, profile).memory, key=lambda point: point.bytes)
    schedule = schedules[point.schedule]
    if standing.at_step >= point.bytes:  # while the optimizer steps
        return MemoryNeed(standing, 0, 0, standing.stepping, "")
    if arrived is not None:
        regions = [one.region for one in schedule.instructions[: point.instruction + 1] if one.region]
        there = arrived.get(f"{schedule.name}/{regions[-1]}", 0) if regions else 0
        standing = replace(standing, gradients=there)
    name = schedule.instructions[point.instruction].region
    own = 0
    if name:
        cost = profile.cost(schedule, name)
        own = max(cost.peak, cost.after) - cost.before
    moving = point.arena + point.gradients + point.states
    saved = point.bytes - standing.total - moving - own
    return MemoryNeed(standing, moving, max(saved, 0), own, f"{schedule.name}/{name}" if name else schedule.name)
