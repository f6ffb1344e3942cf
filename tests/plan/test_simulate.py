"""The simulator: schedules whose times and memory a person can work out, and bounds that hold for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_deepcompile.plan.arena import ArenaModel, WindowModel
from lightning_deepcompile.plan.costs import Contention, Link, Profile, ProfileError, RegionCost
from lightning_deepcompile.plan.events import Task, run_tasks
from lightning_deepcompile.plan.least import just_in_time, least_budget
from lightning_deepcompile.plan.reductions import merge_reductions
from lightning_deepcompile.plan.simulate import arena_bytes, gradient_bytes, memory_bytes, simulate, step_seconds
from lightning_deepcompile.plan.step_memory import StepMemory
from lightning_deepcompile.program.schedule import Instruction, Schedule, check_schedule

SIZE = 1024  # a multiple of the arena's alignment; a slot adds 1/64th, rounded up to 512 bytes
SLOT = 1536


def gather(*ids: int) -> Instruction:
    return Instruction("gather", ids, (SIZE,) * len(ids))


def wait(*ids: int) -> Instruction:
    return Instruction("wait", ids, (SIZE,) * len(ids))


def release(*ids: int) -> Instruction:
    return Instruction("release", ids, (SIZE,) * len(ids))


def reduce(*ids: int) -> Instruction:
    return Instruction("reduce", ids, (SIZE,) * len(ids))


def reduce_late(*ids: int) -> Instruction:
    return Instruction("reduce_at_boundary", ids, (SIZE,) * len(ids))


def compute(number: int, *ids: int) -> Instruction:
    return Instruction("compute", ids, region=f"region_{number}")


def schedule(kind: Any, *instructions: Instruction, kept: tuple[int, ...] = ()) -> Schedule:
    return Schedule(kind, kind, 0, instructions, kept)


def profile(schedules: list[Schedule], seconds: float = 1.0, gathers: float = 1.0, **fields: Any) -> Profile:
    """Two ranks; a region takes `seconds`, a gather of one parameter `gathers`, and its reduction twice that."""
    regions = {
        f"{s.name}/{s.instructions[i].region}": RegionCost(seconds, before=10, peak=30, after=20)
        for s in schedules
        for i in s.at("compute")
    }
    bandwidth = SIZE / 2 / gathers
    fields = {"contention": Contention(shared_link=1.0), **fields}
    links = (Link(0.0, bandwidth), Link(0.0, bandwidth / 2))
    return Profile(2, "cuda", tuple(schedules), regions, *links, **fields)


# Worked out by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_gathers_right_before_use_are_all_exposed(device_type: str) -> None:
    forward = schedule(
        "forward",
        *(gather(0), wait(0), compute(0, 0), release(0)),
        *(gather(1), wait(1), compute(1, 1), release(1)),
    )
    result = simulate([forward], replace(profile([forward]), device_type=device_type))
    # On a GPU the host runs ahead, but the second gather's memory may be what the first region still reads.
    assert result.seconds == pytest.approx(4.0)
    assert result.exposed_seconds == pytest.approx(2.0)
    assert (result.compute_seconds, result.gather_seconds) == (pytest.approx(2.0), pytest.approx(2.0))


@pytest.mark.parametrize(("device_type", "seconds"), [("cpu", 8.0), ("cuda", 7.0)])
def test_a_launch_behind_a_region_waits_for_it_only_where_the_host_computes(device_type: str, seconds: float) -> None:
    forward = schedule(
        "forward",
        *(gather(0), gather(1), wait(0), compute(0, 0), release(0)),
        *(wait(1), compute(1, 1), gather(2), release(1)),
        *(wait(2), compute(2, 2), release(2)),
    )
    result = simulate([forward], replace(profile([forward], seconds=2.0, gathers=1.0), device_type=device_type))
    assert result.seconds == pytest.approx(seconds)


def test_a_gather_launched_a_block_ahead_is_hidden() -> None:
    forward = schedule(
        "forward",
        *(gather(0), gather(1), wait(0), compute(0, 0), release(0)),
        *(wait(1), compute(1, 1), release(1)),
    )
    base = profile([forward], seconds=2.0)
    result = simulate([forward], base)
    assert (result.seconds, result.exposed_seconds) == (pytest.approx(5.0), pytest.approx(1.0))
    assert result.peak_bytes == 2 * SLOT + 30
    # With contention compute takes twice as long while the second gather runs: 1 second of it instead of half of one.
    slow = simulate([forward], replace(base, contention=Contention(2.0, 2.0)))
    assert slow.seconds == pytest.approx(5.5)


def test_what_is_kept_is_not_gathered_again() -> None:
    forward = schedule("forward", gather(0), wait(0), compute(0, 0), kept=(0,))
    backward = schedule(
        "backward", gather(0), wait(0), compute(0, 0), release(0), reduce(0), Instruction("end"), kept=(0,)
    )
    both = [forward, backward]
    result = simulate(both, profile(both))
    # gather 0-1, forward 1-2, backward 2-3, reduction 3-5.
    assert (result.seconds, result.exposed_seconds) == (pytest.approx(5.0), pytest.approx(3.0))
    assert result.gather_seconds == pytest.approx(1.0)
    assert result.memory[-1].arena == 0


def test_accumulation_gathers_anew_in_every_micro_batch_and_the_optimizer_comes_last() -> None:
    forward = schedule("forward", gather(0), wait(0), compute(0, 0), release(0))
    backward = schedule("backward", compute(0), reduce(0), Instruction("end"))
    both = [forward, backward]
    result = simulate(both, profile(both, micro_batches=3, optimizer_seconds=4.0))
    assert result.seconds == pytest.approx(3 * (1 + 1 + 1 + 2) + 4)
    assert result.gather_seconds == pytest.approx(3.0)


def test_gradients_that_are_held_travel_once_and_cost_compute() -> None:
    forward = schedule("forward", gather(0), wait(0), compute(0, 0), release(0))
    backward = schedule("backward", compute(0), reduce_late(0), Instruction("end"))
    both = [forward, backward]
    held = profile(both, micro_batches=3, optimizer_seconds=4.0, hold_seconds=0.5 / SIZE)
    result = simulate(both, held)
    # Each time a gather, forward, backward and half a second to add; then one reduction and the optimizer.
    assert result.seconds == pytest.approx(3 * (1 + 1 + 1 + 0.5) + 2 + 4)
    assert result.reduce_seconds == pytest.approx(2.0)
    single = replace(held, micro_batches=1)
    assert simulate(both, single).seconds == simulate(both, replace(single, hold_seconds=None)).seconds


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_whole_gradients_take_memory_until_compute_has_waited_for_them(ratio: float) -> None:
    """Two gradients of a kilobyte, which are among what a region leaves."""
    forward = schedule("forward", compute(0))
    backwards = [
        schedule("backward", compute(0), part(0), compute(1), part(1), compute(2), Instruction("end"))
        for part in (reduce, reduce_late)
    ]
    rows = []
    for backward in backwards:
        both = [forward, backward]
        base = profile(both, micro_batches=2, hold_ratio=ratio, reduce_window=1)
        sizes = {key: replace(cost, after=20 + 2 * SIZE) for key, cost in base.regions.items()}
        memory = simulate(both, replace(base, regions=sizes)).memory
        rows.append([point.gradients for point in memory])
    # One gradient is on its way while the next one is made, and gone before that is sent; nothing is left for the next
    # micro-batch, but the buffer that this rank's half arrives in, as it is added to the one before.
    arriving = ArenaModel().acquire(SIZE // 2).capacity
    every = [0, 0, 0, SIZE, 0, SIZE, SIZE]
    assert rows[0] == [arriving + size for size in every * 2]
    # A sum stays until the last micro-batch, and until its reduction is over; what regions take includes both shards,
    # which come with that. Sums that travel in another dtype are cast into a buffer, and so are results: half as much.
    one, buffer = int(SIZE * ratio), 0 if ratio == 1 else 2 * SIZE
    first = [-one, -one, 0, 0, one, one, one]
    last = [one, one, one + one // 2, one + one // 2, one, one, one]
    assert rows[1] == [buffer + size for size in [*first, *last]]
    assert gradient_bytes([forward, backwards[1]], ratio, 2, 2)[1][1][2] == buffer + one // 2, "compute waits at once"


def test_gradients_of_another_dtype_arrive_in_buffers_that_stay() -> None:
    """A buffer for a group is used again for one that is not much smaller, and another where it is."""
    forward = schedule("forward", compute(0))
    parts = (compute(0), reduce(0, 1, 2), compute(1), reduce(3, 4, 5), compute(2), reduce(6), Instruction("end"))
    size = 4 << 20  # waste of less than a megabyte is allowed
    large = [replace(part, sizes=(size,) * len(part.ids)) if part.op == "reduce" else part for part in parts]
    both = [forward, schedule("backward", *large)]
    base = profile(both, hold_ratio=2.0, reduce_window=0)
    expected = ArenaModel().acquire(3 * size // 2).capacity + ArenaModel().acquire(size // 2).capacity
    assert {point.gradients for point in simulate(both, base).memory} == {expected}
    assert gradient_bytes(both, 2.0, 1, 2) == [[[expected] * len(s.instructions) for s in both]]
    for other in ({"hold_ratio": 1.0}, {"world_size": 1}):  # they go where they belong at once
        assert {point.gradients for point in simulate(both, replace(base, **other)).memory} == {0}


@pytest.mark.parametrize("part", [reduce, reduce_late])
def test_gradients_that_travel_with_later_ones_take_memory_meanwhile(part: Any) -> None:
    """Each is a kilobyte among what its region leaves, and would be gone before the next region."""
    forward = schedule("forward", gather(9), wait(9), compute(9, 9), release(9))
    apart = schedule("backward", *(i for k in range(3) for i in (compute(k), part(k))), Instruction("end"))
    merged = merge_reductions(apart, *apart.at(part().op)[:2])
    assert [i.ids for i in merged.instructions if i.op == part().op] == [(0, 1), (2,)]
    check_schedule(merged)
    base = profile([forward, apart], reduce_window=0)
    left = {f"backward/region_{k}": RegionCost(1.0, before=10, peak=30 + SIZE, after=20 + SIZE) for k in range(3)}
    base = replace(base, regions=base.regions | left, reduce=Link(0.5, SIZE / 4))
    rows, seconds = [], []
    for backward in (apart, merged):
        result = simulate([forward, backward], base)
        rows.append([point.bytes for point in result.memory if point.schedule == 1])
        seconds.append(result.seconds)
    assert rows[0] == [30 + SIZE, 20 + SIZE] * 3 + [20]
    assert rows[1] == [30 + SIZE, 30 + 2 * SIZE, 20 + 2 * SIZE, 30 + SIZE, 20 + SIZE, 20]
    # Gather, forward, and each gradient's two and a half seconds behind its region; one latency less.
    assert seconds == [pytest.approx(2 + 3 * 3.5), pytest.approx(2 + 3 * 3.5 - 0.5)]
    assert just_in_time(merged).instructions[3] == replace(part(1), made=("region_1",))
    assert least_budget([forward, merged], base) == least_budget([forward, apart], base) < max(rows[1])


def test_what_stays_until_the_boundary_is_gathered_once_a_step() -> None:
    forward = schedule("forward", gather(0), wait(0), compute(0, 0), kept=(0,))
    late = Instruction("release_at_boundary", (0,), (SIZE,))
    backward = schedule("backward", gather(0), wait(0), compute(0, 0), late, reduce(0), Instruction("end"), kept=(0,))
    both = [forward, backward]
    check_schedule(backward)
    result = simulate(both, profile(both, micro_batches=3, optimizer_seconds=4.0))
    # One gather; three times forward, backward and a reduction that the end of backward waits for; the optimizer.
    assert result.seconds == pytest.approx(1 + 3 * (1 + 1 + 2) + 4)
    assert result.gather_seconds == pytest.approx(1.0)
    ends = [point.arena for point in result.memory if point.instruction == len(backward.instructions) - 1]
    assert ends == [SLOT, SLOT, 0]
    assert simulate(both, profile(both)).memory[-1].arena == 0  # a single micro-batch is the last one


def test_compute_waits_for_the_oldest_reduction_beyond_the_window() -> None:
    parts = [part for k in range(4) for part in (compute(k), reduce(k))]
    backward = schedule("backward", *parts, Instruction("end"))
    times = {window: simulate([backward], profile([backward], reduce_window=window)).seconds for window in (0, 1, 9)}
    # Reductions take 2: one after another from 1 to 9; with a window of 0 nothing overlaps.
    assert times == {0: pytest.approx(12.0), 1: pytest.approx(9.0), 9: pytest.approx(9.0)}


def test_a_host_that_is_slower_than_the_device_sets_the_pace() -> None:
    forward = schedule("forward", gather(0), wait(0), compute(0, 0), compute(1), release(0))
    base = profile([forward], seconds=0.1, gathers=0.1)
    slow = replace(base, regions={k: replace(c, host=1.0) for k, c in base.regions.items()}, launch_seconds=0.5)
    # gather launched at 0.5, wait at 1.0, regions at 2.0 and 3.0; the second takes 0.1; nobody waits for the release.
    assert simulate([forward], slow).seconds == pytest.approx(3.5)


def test_a_slot_is_reused_behind_its_last_reader() -> None:
    """One slot is shared, so a gather cannot start before the region that reads the slot has ended."""
    forward = schedule(
        "forward",
        *(gather(0), gather(1), wait(0), compute(0, 0), release(0)),
        *(gather(2), wait(1), compute(1, 1), release(1)),
        *(wait(2), compute(2, 2), release(2)),
    )
    result = simulate([forward], profile([forward], seconds=3.0))
    starts = {span.label: span.start for span in result.spans if span.stream == "gather"}
    assert starts["forward/gather (2,)"] == pytest.approx(4.0)  # not 2.0, when the stream is free
    assert max(point.arena for point in result.memory) == 2 * SLOT


def test_windows_are_taken_as_the_runtime_takes_them() -> None:
    """The same cases as in `tests/cpp/test_windows.cpp`."""
    mib = 1 << 20
    model = WindowModel(mib)
    assert model.take(mib - 1) is None and WindowModel(0).take(9 * mib) is None
    taken = [model.take(size * mib) for size in (5, 9, 5)]
    assert [w.capacity // mib for w in taken if w] == [6, 10, 6] and model.bytes == 22 * mib
    assert all(w and model.release(w) for w in taken) and not model.release(ArenaModel().acquire(1))
    again = [model.take(size * mib) for size in (5, 9, 5, 2)]
    assert again[:3] == taken and again[3] not in taken and model.bytes == 24 * mib


def test_windows_are_there_from_one_step_to_the_next() -> None:
    page = 2 << 20
    forward = schedule(
        "forward",
        *(gather(0), gather(1, 2), wait(0), compute(0, 0), release(0)),
        *(wait(1, 2), compute(1, 1, 2), release(1, 2)),
        *(gather(3), wait(3), compute(2, 3), release(3)),
    )
    base = profile([forward], seconds=3.0)
    both = simulate([forward], replace(base, window_from=2 * SIZE))
    slots = simulate([forward], base)
    assert both.window_bytes == page and {point.arena - page for point in both.memory} == {0, SLOT}
    assert both.peak_bytes == page + SLOT + 30 < page + slots.peak_bytes
    # All of them: two are in use at a time, and the third gather takes the first one's, behind its reader.
    every = replace(base, window_from=1)
    result = simulate([forward], every)
    assert {point.arena for point in result.memory} == {result.window_bytes} == {2 * page}
    assert result.peak_bytes == 2 * page + 30 == max(map(max, memory_bytes([forward], every)))
    memory = StepMemory([forward], every)
    assert memory.first_excess([forward], 2 * page + 29, 0) == forward.at("compute")[0]
    assert memory.first_excess([forward], 2 * page + 30, 0) is None
    assert arena_bytes([forward], window_from=1) == [[0] * len(forward.instructions)]
    starts = {span.label: span.start for span in result.spans if span.stream == "gather"}
    assert starts["forward/gather (1, 2)"] == pytest.approx(1.0), "what another step read is not waited for"
    assert starts["forward/gather (3,)"] == pytest.approx(4.0)


def test_tasks_on_one_link_share_it() -> None:
    tasks = [Task("gather", 1.0), Task("reduce", 2.0)]
    timing = run_tasks(tasks, Contention(shared_link=2.0))
    assert timing.end == [pytest.approx(2.0), pytest.approx(3.0)]
    # Copies one way share a link, and both ways together the host's memory.
    timing = run_tasks([Task("out", 1.0), Task("in", 2.0)], Contention(duplex=1.5))
    assert timing.end == [pytest.approx(1.5), pytest.approx(2.5)]
    timing = run_tasks([Task("out", 1.0), Task("states out", 1.0), Task("in", 2.0)], Contention(duplex=1.5))
    assert timing.end == [pytest.approx(3.0), pytest.approx(3.0), pytest.approx(3.0)]
    with pytest.raises(ValueError, match="waits for one that comes later"):
        run_tasks([Task("gather", 1.0, after=[1]), Task("compute", 1.0)], Contention())


def test_more_ranks_and_other_links_change_the_prediction() -> None:
    forward = schedule("forward", gather(0), wait(0), compute(0, 0), release(0))
    base = profile([forward], optimizer_seconds=1.0)
    wide = simulate([forward], base.for_ranks(4))
    assert wide.gather_seconds == pytest.approx(1.5)  # 3/4 of the bytes travel instead of 1/2
    assert wide.seconds == pytest.approx(1.5 + 1 + 0.5)
    assert simulate([forward], base.for_ranks(1)).gather_seconds == 0


def test_the_least_budget_is_that_of_one_group_at_a_time() -> None:
    forward = schedule(
        "forward", gather(0), gather(1), wait(0), compute(0, 0), release(0), wait(1), compute(1, 1), kept=(1,)
    )
    assert least_budget([forward], profile([forward])) == SLOT + 30
    check_schedule(just_in_time(forward))


# A profile is data ----------------------------------------------------------------------------------------------------


def test_profiles_survive_json_and_damaged_ones_are_refused() -> None:
    forward = schedule("forward", gather(0, 1), wait(0, 1), compute(0, 0, 1), kept=(0, 1))
    original = profile([forward], budget=123)
    assert Profile.from_json(original.to_json()) == original
    for broken, message in [
        ("no json", "not a profile"),
        ("[]", "not a profile"),
        (original.to_json().replace('"version": 6', '"version": 5'), "version 5"),
        (original.to_json().replace('"kept"', '"kept2"'), "damaged"),
        (original.to_json().replace('"world_size": 2', '"world_size": 0'), "world_size is 0"),
        (original.to_json().replace('"seconds": 1.0', '"seconds": -1.0'), "cannot be negative"),
        (original.to_json().replace("forward/region_0", "forward/region_7"), "no times of forward/region_0"),
    ]:
        with pytest.raises(ProfileError, match=message):
            Profile.from_json(broken)


# Bounds ---------------------------------------------------------------------------------------------------------------


@st.composite
def steps(draw: Any) -> list[Schedule]:
    """A forward and a backward schedule; gathers as far ahead as drawn, some parameters kept."""
    count = draw(st.integers(1, 5))
    kept = tuple(sorted(draw(st.sets(st.integers(0, count - 1)))))

    def build(kind: Any, order: list[int]) -> Schedule:
        body: list[list[Instruction]] = []
        for number, ds_id in enumerate(order):
            keeps = kind == "forward" and ds_id in kept
            after = [] if keeps else [release(ds_id)]
            gradient = [reduce(ds_id)] if kind == "backward" else []
            body.append([wait(ds_id), compute(number, ds_id), *after, *gradient])
        for number, ds_id in enumerate(order):
            body[draw(st.integers(0, number))].insert(0, gather(ds_id))
        for part in body:  # gathers first, in order of use
            part.sort(key=lambda i: (i.op != "gather", order.index(i.ids[0]) if i.op == "gather" else 0))
        flat = [instruction for part in body for instruction in part]
        return schedule(kind, *flat, *([Instruction("end")] if kind == "backward" else []), kept=kept)

    order = list(range(count))
    return [build("forward", order), build("backward", order[::-1])]


@settings(deadline=None, max_examples=60)
@given(
    step=steps(),
    seconds=st.floats(0.01, 10),
    gathers=st.floats(0.01, 10),
    window=st.integers(0, 3),
    host=st.floats(0, 2),
    device_type=st.sampled_from(["cpu", "cuda"]),
    contention=st.builds(Contention, *[st.floats(1, 3)] * 3),
    windows=st.sampled_from([0, 0, SIZE, 2 * SIZE]),
)
def test_bounds(
    step: list[Schedule],
    seconds: float,
    gathers: float,
    window: int,
    host: float,
    device_type: str,
    contention: Contention,
    windows: int,
) -> None:
    for one in step:
        check_schedule(one)
    base = profile(step, seconds, gathers, reduce_window=window, contention=contention, launch_seconds=host)
    base = replace(base, device_type=device_type, optimizer_seconds=0.5, micro_batches=2)
    base = replace(base, window_from=windows)
    result = simulate(step, base)
    most = contention.beside_gathers + contention.beside_reductions
    regions = 2 * sum(len(s.at("compute")) for s in step)
    assert result.compute_seconds >= regions * seconds + 0.5 - 1e-6
    for busy in (result.compute_seconds, result.gather_seconds, result.reduce_seconds):
        assert result.seconds >= busy - 1e-9
    assert result.seconds <= 2 * sum(len(s.instructions) for s in step) * host + 0.5 * most + (
        regions * seconds * most + 2 * sum(i.bytes for s in step for i in s.instructions) * gathers / SIZE * 2 * 9
    )
    assert 0 <= result.exposed_seconds <= result.seconds
    assert all(point.arena >= 0 and point.bytes >= point.arena for point in result.memory)
    there = result.window_bytes
    assert result.memory[-1].arena == there, "at the end of backward nothing is gathered"
    assert min(point.arena for point in result.memory) >= there and bool(there) <= bool(windows)
    ends = [p.arena for p, q in zip(result.memory, result.memory[1:], strict=False) if p.schedule != q.schedule]
    assert ends[0] >= SIZE * len(step[0].kept)
    assert result.peak_bytes >= least_budget(step, base)

    # Faster wires never make it slower where nothing slows down what runs beside it; nor do wider windows.
    calm = replace(base, contention=Contention(shared_link=1.0))
    faster = replace(calm, gather=Link(0.0, calm.gather.bandwidth * 2), reduce=Link(0.0, calm.reduce.bandwidth * 2))
    assert simulate(step, faster).seconds <= simulate(step, calm).seconds + 1e-9
    assert simulate(step, replace(calm, reduce_window=window + 1)).seconds <= simulate(step, calm).seconds + 1e-9


@settings(deadline=None, max_examples=60)
@given(
    step=steps(),
    gathers=st.floats(0.01, 10),
    device_type=st.sampled_from(["cpu", "cuda"]),
    hosted=st.sets(st.integers(0, 4)),
    ratio=st.sampled_from([1.0, 2.0]),
    windows=st.sampled_from([0, 2 * SIZE]),
    over=st.floats(0, 1),
)
def test_parts_of_a_simulation_agree_with_the_whole(
    step: list[Schedule],
    gathers: float,
    device_type: str,
    hosted: set[int],
    ratio: float,
    windows: int,
    over: float,
) -> None:
    """Memory alone, found with schedules whose gathers are launched elsewhere, and time alone."""
    base = profile(step, 1.0, gathers, reduce_window=1, micro_batches=2, hold_ratio=ratio, window_from=windows)
    base = replace(base, device_type=device_type, hosted={str(i): SIZE // 2 for i in hosted})
    memory = StepMemory([just_in_time(one) for one in step], base)
    whole = simulate(step, base)
    assert memory.peak(step) == whole.peak_bytes and step_seconds(step, base) == whole.seconds
    limit = int(over * whole.peak_bytes)
    for index in range(2):
        excesses = [point.instruction for point in whole.memory if point.schedule == index and point.bytes > limit]
        assert memory.first_excess(step, limit, index) == (excesses[0] if excesses else None)
