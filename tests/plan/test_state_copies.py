"""Optimizer states that travel beside compute: steps that a person can work out, and where the pass puts copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_passes import Net
from test_simulate import compute, profile, schedule
from tracing import capture

from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.costs import Link, Profile, ProfileError, StatesInHost
from lightning_deepcompile.plan.least import just_in_time
from lightning_deepcompile.plan.optimize import apply_passes
from lightning_deepcompile.plan.passes.offload_optimizer import offload_optimizer
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.plan.state_memory import StateMemory, with_away
from lightning_deepcompile.program.printer import format_program
from lightning_deepcompile.program.program import collective_sequence
from lightning_deepcompile.program.reschedule import reschedule
from lightning_deepcompile.program.schedule import Instruction, Schedule, ScheduleError, check_schedule

CHUNKS = (10, 10, 10, 10)


def reload(*chunks: int) -> Instruction:
    return Instruction("reload_states", chunks, (10,) * len(chunks))


def left(*chunks: int) -> Instruction:
    return Instruction("wait_states", chunks, (10,) * len(chunks))


def step(forward: dict[int, Instruction], backward: dict[int, Instruction]) -> list[Schedule]:
    """Four regions each way, with instructions in front of some."""
    return [
        schedule(kind, *(i for k in range(4) for i in (*filter(None, [extra.get(k)]), compute(k))))
        for kind, extra in (("forward", forward), ("backward", backward))
    ]


def measured(chunks: tuple[int, ...] = CHUNKS, share: float = 0.5, slots: int = 3, **fields: Any) -> Profile:
    """Regions take 1 s and 30 bytes; the optimizer 2 s, half of it for chunks that come in 1 s and leave in 0.5 s."""
    links = {"copy_in": Link(0.0, 10.0), "copy_out": Link(0.0, 20.0)}
    states = StatesInHost(chunks, share, slots)
    return profile(step({}, {}), optimizer_seconds=2.0, states=states, **{**links, **fields})


@pytest.mark.parametrize(
    ("forward", "backward", "fields", "seconds"),
    [
        # From 8 s on, one arrives a second, and is stepped in a quarter.
        ({}, {}, {}, 12.25),
        # They leave more slowly than they come, so that the last waits for the slot of the first, from 9.25 to 11.25 s.
        # Those of the step before leave until 6 s.
        ({}, {}, {"copy_out": Link(0.0, 5.0)}, 12.5),
        # Half of them come while backward runs; the third arrives at 9 s, and the fourth at 10 s.
        ({}, {0: reload(0, 1)}, {"slots": 5}, 10.25),
        # All of them do.
        ({}, {0: reload(0, 1, 2, 3)}, {"slots": 4}, 10.0),
        # They may come a second later, as the optimizer steps on the others first; then the last is late.
        ({}, {1: reload(0, 1, 2, 3)}, {"slots": 4}, 10.0),
        ({}, {2: reload(0, 1, 2, 3)}, {"slots": 4}, 10.25),
        # Only in the last of two micro-batches: 16 s and the optimizer.
        ({}, {0: reload(0, 1, 2, 3)}, {"slots": 4, "micro_batches": 2}, 18.0),
        # Compute waits half a second for the first, and finds the second gone.
        ({0: left(0), 1: left(1)}, {0: reload(0, 1, 2, 3)}, {"slots": 4}, 10.5),
    ],
)
def test_steps_worked_out_by_hand(
    forward: dict[int, Instruction], backward: dict[int, Instruction], fields: dict[str, Any], seconds: float
) -> None:
    schedules = step(forward, backward)
    for one in schedules:
        check_schedule(one)
    assert simulate(schedules, measured(**fields)).seconds == pytest.approx(seconds)


def test_states_take_memory_until_forward_has_waited_and_from_when_they_come() -> None:
    schedules = step({1: left(0), 2: left(1, 2, 3)}, {3: reload(0), 1: reload(1)})
    points = simulate(schedules, measured(slots=4)).memory
    computes = [p for p in points if schedules[p.schedule].instructions[p.instruction].op == "compute"]
    assert [p.bytes for p in computes] == [70, 60, 30, 30, 30, 40, 40, 50]
    # What no program waits for is given back by torch's allocator, as it leaves.
    assert simulate(step({}, {}), measured()).peak_bytes == 30


def test_copies_of_states_stand_where_they_can() -> None:
    with pytest.raises(ScheduleError, match="fetched in backward programs"):
        check_schedule(step({0: reload(0)}, {})[0])
    with pytest.raises(ScheduleError, match="waited for in forward programs"):
        check_schedule(step({}, {2: left(0)})[1])
    # A step in which everything is seen by itself has none.
    assert [just_in_time(s) for s in step({0: left(0)}, {2: reload(0)})] == step({}, {})


def test_programs_say_when_states_travel() -> None:
    captured = capture(Net(), torch.arange(6).view(2, 3))
    for kind, copies in (("forward", left(0, 1)), ("backward", reload(2))):
        program = apply_passes(captured.lower(kind), PlanSettings())
        start = program.schedule
        wanted = start.with_instructions([*start.instructions[:3], copies, *start.instructions[3:]])
        travels = reschedule(program, wanted, "test")
        assert travels.schedule == wanted and travels.schedule.waits_for_states == (kind == "forward")
        text = "wait     optimizer states 0, 1 (20 B)" if kind == "forward" else "reload   optimizer states 2 (10 B)"
        assert [line.strip() for line in format_program(travels).splitlines() if "states" in line] == [text]
        assert reschedule(travels, start, "back").schedule == start
        assert collective_sequence(travels) == collective_sequence(program)  # other ranks are not concerned


def places(schedule: Schedule, op: Any) -> dict[int, int]:
    """Returns the number of regions before each chunk's copy."""
    found, region = {}, 0
    for instruction in schedule.instructions:
        region += instruction.op == "compute"
        found |= {k: region for k in instruction.ids if instruction.op == op}
    return found


def planned(start: list[Schedule], **fields: Any) -> tuple[list[Schedule], float, int]:
    result = offload_optimizer(start, PlanContext(profile=measured(**fields)))
    prediction = simulate(result, measured(**fields))
    return result, prediction.seconds, prediction.peak_bytes


def test_states_come_just_in_time_and_are_waited_for_when_they_have_left() -> None:
    (forward, backward), seconds, peak = planned(step({}, {}), slots=4)
    assert seconds == pytest.approx(10.0) and peak == 70
    assert places(backward, "reload_states") == {0: 0, 1: 1, 2: 2, 3: 3}
    assert places(forward, "wait_states") == {0: 1, 1: 1, 2: 2, 3: 2}
    # What an earlier plan did is forgotten.
    assert planned([forward, backward], slots=4)[0] == [forward, backward]
    # The device holds four while the optimizer steps: three of them go round.
    (_, backward), seconds, _ = planned(step({}, {}), slots=4, chunks=(10,) * 5)
    assert places(backward, "reload_states") == {0: 3}
    # Nothing waits in host memory.
    assert planned([forward, backward], chunks=())[0] == step({}, {})


def test_states_come_later_and_are_waited_for_sooner_where_memory_is_short() -> None:
    (forward, backward), seconds, peak = planned(step({}, {}), slots=4, budget=50)
    assert peak <= 50
    assert places(backward, "reload_states") == {0: 0, 1: 1}  # two fit beside backward
    assert places(forward, "wait_states") == {0: 0, 1: 0, 2: 2, 3: 2}
    # 1 s for the first two to leave, 8 s to the end of backward, and the fourth arrives 2 s later.
    assert seconds == pytest.approx(1 + 8 + 2 + 0.25)


def test_chunks_and_slots_of_states() -> None:
    states = StateMemory(sizes=(6, 4, 3, 3, 9, 12), away=0, stepping=10, buffers=5, host=99, chunk=10)
    assert states.chunks(0) == () and states.chunks(16) == (10, 10)  # the buffer of the second is as large
    assert states.chunks(37) == (10, 10, 10, 12)  # a shard may be larger than a chunk
    assert states.slots(37, 0) == 3 and states.slots(37, 41) == 3 and states.slots(37, 42) == 4
    assert states.slots(25, 480) == 3 and states.slots(10, 480) == 1 and states.slots(0, 0) == 3
    even = replace(states, sizes=(10,) * 6)
    assert [even.fewer_slots(60, 6, less) for less in (1, 10, 20, 21, 999)] == [5, 5, 4, 3, 3]
    assert states.while_stepping(0) == 47 and states.while_stepping(37) == 10 + 32
    assert states.while_stepping(37, 4) == 10 + 42 and replace(states, chunk=0).while_stepping(37) == 15
    before = measured(chunks=(), share=1.0)
    after = with_away(before, states, 25, slots=4)
    assert (after.states.chunks, after.states.slots, after.optimizer_seconds) == ((10, 10, 10), 4, 2.0)
    assert after.states.share == pytest.approx(25 / 37)
    assert after.for_ranks(4).states.chunks == (5, 5, 5) and Profile.from_json(after.to_json()) == after
    with pytest.raises(ProfileError, match="a slot at least"):
        replace(after, states=replace(after.states, slots=0)).check()
    # A host that computes copies in between.
    host = with_away(replace(before, device_type="cpu"), states, 25)
    assert host.states.chunks == () and host.optimizer_seconds == pytest.approx(2 + 25 / 10 + 25 / 20)
