"""Methods of a schedule with which passes add and drop instructions."""

from __future__ import annotations

import pytest

from lightning_deepcompile.program.schedule import Instruction, Schedule, ScheduleError, check_schedule

GATHER, WAIT, RELEASE = (Instruction(op, (0, 1), (8, 4)) for op in ("gather", "wait", "release"))  # type: ignore[arg-type]
TWICE = Schedule(
    "f",
    "forward",
    0,
    (
        GATHER,
        WAIT,
        Instruction("compute", (0, 1), region="a"),
        RELEASE,
        GATHER,
        WAIT,
        Instruction("compute", (0, 1), region="b"),
        RELEASE,
    ),
)


def texts(schedule: Schedule) -> list[str]:
    return [i.region or i.text for i in schedule.instructions]


def test_a_parameter_stays_gathered_between_two_uses() -> None:
    check_schedule(TWICE)
    once = TWICE.with_instructions(TWICE.instructions[:3] + TWICE.drop("gather", {1}).instructions[3:])
    with pytest.raises(ScheduleError, match=r"parameters \[1\] were not gathered"):
        check_schedule(once)
    first = TWICE.with_instructions(TWICE.instructions[:4]).drop("release", {1})
    whole = once.with_instructions(first.instructions + once.instructions[4:])
    check_schedule(whole)
    assert texts(whole) == [
        "gather (0, 1)", "wait (0, 1)", "a", "release (0,)", "gather (0,)", "wait (0, 1)", "b", "release (0, 1)"
    ]  # fmt: skip
    assert [group.size_of for group in whole.groups()] == [{0: 8, 1: 4}, {0: 8}]


def test_what_names_no_parameter_goes() -> None:
    assert texts(TWICE.drop("release", {0, 1})) == ["gather (0, 1)", "wait (0, 1)", "a"] + [
        "gather (0, 1)", "wait (0, 1)", "b"
    ]  # fmt: skip
    assert TWICE.drop("release", {5}) == TWICE


def test_the_last_release_goes_where_parameters_are_kept() -> None:
    kept = TWICE.keep((1,))
    check_schedule(kept)
    assert kept.kept == (1,) and texts(kept)[3] == "release (0, 1)" and texts(kept)[-1] == "release (0,)"
    check_schedule(kept.keep((0,)))
    assert texts(kept.keep((0,)))[-1] == "b" and kept.keep((0,)).kept == (0, 1)
