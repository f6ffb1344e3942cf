"""Ranks compare the order of their programs' collectives before the first run, over the store, without a collective."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from multiprocess import join, run_ranks

from lightning_deepcompile.ranks import order
from lightning_deepcompile.ranks.exchange import Asked, on_any
from lightning_deepcompile.ranks.order import Agreement, ProgramMismatchError


@dataclass
class Program:
    """The members of a program that the comparison reads."""

    name: str
    sequence: list[tuple[str, tuple[int, ...]]]
    kind: str = "forward"

    @property
    def signature(self) -> str:
        lines = [f"{self.kind} program", *(f"{kind} {ids}" for kind, ids in self.sequence)]
        return "\n".join(lines) if self.sequence else ""


def ranks(count: int, timeout: float) -> list[Agreement]:
    store = dist.HashStore()
    return [Agreement(store, rank, count, timedelta(seconds=timeout), "test") for rank in range(count)]


def together(members: list[Agreement], act: Callable[[int, Agreement], None]) -> list[BaseException | None]:
    """Every member acts, given its rank, in a thread of its own; returns what each raised."""
    errors: list[BaseException | None] = [None] * len(members)

    def run(rank: int, member: Agreement) -> None:
        try:
            act(rank, member)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=both) for both in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return errors


def check_together(members: list[Agreement], programs: list[Program]) -> list[BaseException | None]:
    """Every member checks its program."""
    return together(members, lambda rank, member: member.check(programs[rank].signature))


def test_equal_programs_agree_and_need_no_second_round() -> None:
    members = ranks(3, 20)
    program = Program("frame0.forward", [("gather", (1, 2)), ("release", (1, 2))])
    for _ in range(3):
        assert _go(members, [program], [program], [program]) == [None] * 3
    # One rank alone meets a new shape whose program communicates alike: it need not wait for anybody.
    members[1].begin("training_step")
    members[1].check(Program("frame1.forward", program.sequence).signature)


def test_a_different_order_is_an_error_on_every_rank() -> None:
    here = Program("frame0.forward", [("gather", (1,)), ("gather", (2,))])
    there = Program("frame0.forward", [("gather", (2,)), ("gather", (1,))])
    for error in check_together(ranks(2, 20), [here, there]):
        assert isinstance(error, ProgramMismatchError)
        assert "First difference" in str(error)


def test_names_may_differ_and_kinds_may_not() -> None:
    gathers = [("gather", (1,))]
    members = ranks(2, 20)
    assert (
        check_together(members, [Program("frame0.forward", gathers), Program("frame3.forward", gathers)]) == [None] * 2
    )
    others = [Program("frame0.forward", gathers + gathers), Program("frame0", gathers + gathers, kind="inference")]
    for error in check_together(members, others):
        assert "forward program" in str(error) and "inference program" in str(error)


def test_after_a_swap_what_was_agreed_on_before_does_not_count() -> None:
    """One rank runs the new plan, which keeps a parameter, and another one goes on as before."""
    members = ranks(2, 20)
    before = Program("frame0.forward", [("gather", (1,))])
    assert check_together(members, [before, before]) == [None] * 2
    for member in members:
        member.forget()
    for error in check_together(members, [Program("frame0.forward", [("keep", (1,)), *before.sequence]), before]):
        assert isinstance(error, ProgramMismatchError)
        assert "`keep 1`" in str(error) and "`gather 1`" in str(error)


def test_a_rank_that_does_not_come_is_named() -> None:
    (alone, _) = ranks(2, 0.3)
    with pytest.raises(TimeoutError, match=r"rank 1 did not do so within 0:00:00.3"):
        alone.check(Program("frame0.forward", [("gather", (1,))]).signature)


def test_programs_without_collectives_and_single_ranks_do_not_wait() -> None:
    begun = time.monotonic()
    ranks(2, 20)[0].check(Program("frame0.forward", []).signature)
    ranks(1, 20)[0].check(Program("frame0.forward", [("gather", (1,))]).signature)
    assert time.monotonic() - begun < 10


def _go(members: list[Agreement], *paths: list[Program]) -> list[BaseException | None]:
    """Every member runs a step of its own programs."""

    def run(rank: int, member: Agreement) -> None:
        member.begin("training_step")
        for program in paths[rank]:
            member.check(program.signature)
        member.passed()

    return together(members, run)


FIRST, LEFT, RIGHT = (Program(name, [("gather", (number,))]) for number, name in enumerate(("first", "left", "right")))


def test_paths_that_all_have_taken_before_are_compared_where_they_part() -> None:
    members = ranks(2, 60)
    for path in ([FIRST, LEFT], [FIRST, RIGHT], [FIRST, RIGHT], [FIRST, LEFT]):
        assert _go(members, path, path) == [None] * 2
    errors = _go(members, [FIRST, LEFT], [FIRST, RIGHT])
    for rank, error in enumerate(errors):
        assert isinstance(error, ProgramMismatchError)
        assert f"`gather {rank + 1}` on rank {rank}" in str(error)


@pytest.mark.parametrize("paths", [([FIRST, LEFT], [FIRST, RIGHT]), ([FIRST], [FIRST, LEFT]), ([FIRST, LEFT], [FIRST])])
def test_a_rank_learns_that_the_others_have_gone_on_as_usual(paths: tuple[list[Program], list[Program]]) -> None:
    """The others are inside of a collective by then, and wait for this rank."""
    members = ranks(2, 60)
    for _ in range(3):
        assert _go(members, paths[0], paths[0]) == [None] * 2
    started = time.monotonic()
    errors = _go(members, *paths)
    if paths[1] == [FIRST]:  # the one that has come to the end sooner finds out in its next step
        assert errors == [None] * 2
        errors[1] = _go(members[1:], [FIRST])[0]
    assert isinstance(errors[1], ProgramMismatchError) and errors[0] is None
    assert "First difference" in str(errors[1])
    assert time.monotonic() - started < 30, "not when the timeout is over"


def test_paths_that_hardly_ever_come_again_take_no_more_room_with_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are left out at random, alike on all ranks, are an example."""
    monkeypatch.setattr(order, "_MOST_PLACES", 40)
    store = dist.HashStore()
    members = [Agreement(store, rank, 2, timedelta(seconds=20), "test") for rank in range(2)]
    layers = [Program("layer", [("gather", (number,))]) for number in range(8)]
    choose = random.Random(0)
    keys = []
    for _ in range(60):
        path = [layer for layer in layers if choose.random() < 0.5]
        assert _go(members, path, path) == [None] * 2
        keys.append(store.num_keys())
    assert max(keys) < 40, keys
    for member in members:
        assert member._last is not None and len(member._last) <= len(layers) + 1
        assert len(member._steps) == 1
    errors = _go(members, layers[:1], layers[1:2])
    assert all(isinstance(error, ProgramMismatchError) for error in errors)


def test_the_thread_ends_with_its_agreement_and_with_the_interpreter() -> None:
    members = ranks(2, 20)
    members[0].begin("training_step")
    assert members[0]._lookout is not None
    thread = members[0]._lookout.thread
    assert thread.is_alive()
    members.clear()
    gc.collect()
    assert not thread.is_alive()
    code = """
import atexit
threads = []
atexit.register(lambda: print(*(thread.is_alive() for thread in threads)))  # registered first, called last
import datetime
import torch.distributed as dist
from lightning_deepcompile.ranks.order import Agreement
agreement = Agreement(dist.HashStore(), 0, 2, datetime.timedelta(seconds=5), "x")
agreement.begin("training_step")
threads.append(agreement._lookout.thread)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["False"], (run.stdout, run.stderr)


def _turns(steps: list[tuple[tuple[str, list[int]], ...]]) -> list[list[str]]:
    """Ranks run steps, each of a kind of batch and of what is gathered for it; what each takes part in."""
    join("cpu")
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    member = Agreement(store, rank, dist.get_world_size(), timedelta(seconds=15), "test", dist.group.WORLD)
    took: list[list[str]] = []
    member.take_part = lambda text: took[-1].append(text.splitlines()[-1])
    for batches in steps:
        batch, path = batches[rank]
        took.append([])
        member.begin("training_step")
        new = on_any(member.is_new(batch))
        member.compare_all(lambda new=new: new)
        for number in path:
            if (behind := member.check_uncompiled("gather", [(number, "float32")])) is not None:
                behind()
    member.end()
    member.rest()
    return took


def test_ranks_part_where_each_has_met_its_batch_beside_others_of_the_others() -> None:
    """The last two meet for the first time, and only the first rank has not been where both come to."""
    steps = [
        (("a", [1, 2]), ("b", [3, 2])),
        (("c", [1, 4]), ("c", [1, 4])),
        (("a", [1, 2]), ("c", [1, 4])),
        (("a", [1, 2]), ("c", [1, 4])),
    ]
    first, second = run_ranks(_turns, 2, steps, timeout=60)
    assert first == [["gather float32 (3,)"], [], *2 * [["gather float32 (4,)"]]]
    assert second == [["gather float32 (1,)"], [], *2 * [["gather float32 (2,)"]]]


FORWARD, BACKWARD = "forward program\ngather (1,)", "backward program\nreduce (1,)"


def _whole_steps(backward: list[tuple[str, str]], follows: bool) -> list[tuple[int, list[str]]]:
    """Ranks run steps with batches that are always new; how often hosts ask in each, and what the rank takes part in.

    Args:
        backward: Of each step, the signature of each rank's backward program.
        follows: Whether that is known when the forward program runs.
    """
    join("cpu")
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    member = Agreement(store, rank, dist.get_world_size(), timedelta(seconds=15), "test", dist.group.WORLD)
    asked, steps = [0], list[tuple[int, list[str]]]()
    real = order.maxima

    def counted(*args: Any) -> list[float]:
        asked[0] += 1
        return real(*args)

    order.maxima = counted  # type: ignore[attr-defined]
    for step, ranks in enumerate(backward):
        asked[0] = 0
        took: list[str] = []
        member.take_part = took.append
        member.begin("training_step")
        member.is_new((rank, step))
        member.compare_all(lambda: True)
        text = ranks[rank]
        after = [member.check(FORWARD, lambda text=text: text if follows else ""), member.check(text)]
        for behind in filter(None, after):
            behind()
        member.end_backward()
        member.end()
        steps.append((asked[0], took))
    member.rest()
    return steps


@pytest.mark.parametrize("follows, asked", [(True, 1), (False, 4)])
def test_hosts_ask_once_in_a_step_of_one_graph(follows: bool, asked: int) -> None:
    for steps in run_ranks(_whole_steps, 2, 4 * [(BACKWARD, BACKWARD)], follows, timeout=60):
        assert steps[0] == (4, []), "the way is new"
        assert steps[1:] == 3 * [(asked, [])]


def test_ranks_take_turns_where_only_the_backward_programs_differ() -> None:
    other = "backward program\nreduce (2,)"
    steps = [(BACKWARD, BACKWARD), (BACKWARD, other), (BACKWARD, BACKWARD), (other, other)]
    first, second = run_ranks(_whole_steps, 2, steps, True, timeout=60)
    assert [took for _, took in first] == [[], [other], [], []]
    assert [took for _, took in second] == [[], [BACKWARD], [], []]


def test_answers_are_waited_for_until_they_are_there() -> None:
    calls = iter([RuntimeError("another rank has failed"), 3])

    def wait() -> int:
        found = next(calls)
        if isinstance(found, RuntimeError):
            raise found
        return found

    asked = Asked(wait)
    with pytest.raises(RuntimeError, match="another rank"):
        asked()
    assert [asked(), asked()] == [3, 3]
