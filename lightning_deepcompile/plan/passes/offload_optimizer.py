"""Schedules the copies of optimizer states in host memory beside forward and backward, as far as memory allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_deepcompile.plan.choose import MARGINS, fastest_that_fits
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.simulate import memory_bytes
from lightning_deepcompile.plan.state_copies import LEAST_SLOTS, still_there
from lightning_deepcompile.program.schedule import REDUCTIONS, RELEASES, STATE_COPIES, Instruction, Operation, Schedule


def offload_optimizer(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Copies states to the device before the optimizer steps, and back after it, beside compute.

    `plan.fit_measured` decides how many are in host memory; this pass decides when they are copied.

    Looks for: chunks of states that wait in host memory.

    Changes: as many chunks as the device has memory for start to come so late in the last backward pass that they are
    there when it ends, or later, where there is no room before. What is left on the device when the optimizer has
    stepped leaves during the next forward pass, which waits for a chunk where its copy should be over, or where its
    memory is needed, if that is earlier. Placements with more and more margin, and one that fetches nothing early, are
    simulated; of those that fit best, the fastest stays.

    Needs from the profile: times and memory of regions; the speed of copies; the chunks.

    Promises: same values; same communication; predicted memory within the budget where that is possible.

    Returns:
        The schedules; without copies of states where none wait in host memory.
    """
    profile = context.require_profile("offload_optimizer")
    start = [s.with_instructions(i for i in s.instructions if i.op not in STATE_COPIES) for s in schedules]
    forward = next((k for k, s in enumerate(start) if s.kind == "forward"), None)
    backward = next((k for k in reversed(range(len(start))) if start[k].kind == "backward"), None)
    if not profile.states.chunks or forward is None or backward is None:
        return start
    limit = context.whole_budget
    rows = memory_bytes(start, profile)
    trials = []
    for margin in (*MARGINS, None):
        fetched = {} if margin is None else _fetches(start[backward], rows[backward], profile, limit, margin)
        waits = _waits(start[forward], rows[forward], profile, limit, margin or 1.0, len(fetched))
        trial = list(start)
        trial[backward] = _written(trial[backward], "reload_states", fetched, profile)
        trial[forward] = _written(trial[forward], "wait_states", waits, profile)
        trials.append(trial)
    return fastest_that_fits(trials, profile, limit)


def _fetches(schedule: Schedule, memory: Sequence[int], profile: Profile, limit: int, margin: float) -> dict[int, int]:
    """The places before which copies of the first chunks to the device start, by chunk."""
    sizes, clock = profile.states.chunks, profile.clock(schedule)
    fitting = len(sizes) if len(sizes) <= profile.states.slots else max(profile.states.slots - LEAST_SLOTS, 0)
    most = [*memory, *memory[-1:]]  # bytes from each place to the end
    for place in reversed(range(len(memory))):
        most[place] = max(memory[place], most[place + 1])
    frees = {place for place, one in enumerate(schedule.instructions) if one.op in RELEASES | REDUCTIONS}
    places: dict[int, int] = {}
    place, there = 0, 0
    for k in range(fitting):
        there += sizes[k]
        late = clock[-1] - margin * sum(profile.copy_in.copy_seconds(size) for size in sizes[k:fitting])
        while place < len(memory) and (clock[place] < late or most[place] + there > limit or place in frees):
            place += 1
        if most[place] + there > limit:
            break
        places[k] = place
    return places


def _waits(
    schedule: Schedule, memory: Sequence[int], profile: Profile, limit: int, margin: float, fetched: int
) -> dict[int, int]:
    """The places before which forward waits for copies to the host, by chunk, if `fetched` chunks are fetched early."""
    sizes, clock = profile.states.chunks, profile.clock(schedule)
    leaving = still_there(len(sizes), range(fetched), profile.states.slots)
    present = sum(sizes[k] for k in leaving)
    places: dict[int, int] = {}
    done = 0.0
    place = 0
    for k in leaving:
        done += margin * profile.copy_out.copy_seconds(sizes[k])
        while place < len(memory) and clock[place] < done and memory[place] + present <= limit:
            place += 1
        places[k] = place
        present -= sizes[k]
    return places


def _written(schedule: Schedule, op: Operation, places: Mapping[int, int], profile: Profile) -> Schedule:
    at: dict[int, list[int]] = {}
    for k, place in places.items():
        at.setdefault(place, []).append(k)
    result: list[Instruction] = []
    for place in range(len(schedule.instructions) + 1):
        if place in at:
            result.append(Instruction(op, tuple(at[place]), tuple(profile.states.chunks[k] for k in at[place])))
        result.extend(schedule.instructions[place : place + 1])
    return schedule.with_instructions(result)
