"""Set-up and planning on a thousand ranks cost no more than on eight, in objects and in requests to the store.

A fake process group of PyTorch's stands for the other ranks: its collectives return at once.
"""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from multiprocess import run_ranks
from test_simulate import compute, gather, profile, reduce, release, schedule, wait
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.assembly import Assembly
from lightning_deepcompile.profile.workload import Workload
from lightning_deepcompile.ranks.exchange import exchange, from_first, maxima, on_any, raise_together
from lightning_deepcompile.ranks.order import Agreement
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.sharding.checks import check_same_model
from lightning_deepcompile.sharding.wire_dtypes import AS_STORED
from lightning_deepcompile.tuning.together import Seen, put_together

BLOCKS = 24
NO_STEPS = Workload.of([], [], varied=False)


def _set_up(world: int) -> dict[str, int]:
    """The most bytes of Python objects at a time, by what makes them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    group = dist.group.WORLD
    assert group is not None and group.size() == world
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(BLOCKS)))
    parts = [(gather(k), wait(k), compute(k, k), release(k)) for k in range(BLOCKS)]
    forward = schedule("forward", *(i for part in parts for i in part))
    backward = schedule("backward", *(i for k, part in enumerate(parts) for i in (*part, reduce(k))))
    seen = Seen(profile([forward, backward]), (forward, backward), True, [[]], NO_STEPS)
    mesh = init_device_mesh("cpu", (world,))
    ranks = Ranks(mesh)
    assembly = Assembly(mesh, ranks, CompileConfig(region_backend="eager"), 3, timedelta(minutes=1), AS_STORED)
    runtime = assembly.runtime(model)

    def nothing_fails() -> None:
        with raise_together("Nothing"):
            pass

    def everybody() -> None:
        assert len(exchange(["something"] * 10, group)) == world

    took = {}
    for name, act in {
        "the model is compared": lambda: check_same_model(model, group),
        "the model is sharded": lambda: assembly.model(model, runtime),
        "nothing fails": nothing_fails,
        "profiles become one": lambda: put_together(seen, "", seen.steps, group),
        "questions": lambda: (on_any(False, group), maxima([1.0, 2.0], group), from_first("text", group)),
        "everybody": everybody,
    }.items():
        took[name] = _peak(act)
    assert put_together(seen, "", seen.steps, group).profile.regions == seen.profile.regions
    return took


def _peak(act: Callable[[], Any]) -> int:
    tracemalloc.start()
    act()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_nothing_is_as_many_objects_as_there_are_ranks() -> None:
    few, many = (run_ranks(_set_up, 1, world)[0] for world in (8, 1000))
    assert many.pop("everybody") > 10 * few.pop("everybody"), "what the others are compared with"
    for name, size in many.items():
        assert size < 1.2 * few[name] + 8192, f"{name}: {few[name]} bytes on 8 ranks, {size} on 1000"


class _Counting:
    """A store that counts what is asked of it, apart from looks whether something has come."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += name != "check"
        return getattr(self._store, name)


def _requests(ranks: int) -> int:
    """The most of any rank, for a program that is new to all."""
    store = dist.HashStore()
    counting = [_Counting(store) for _ in range(ranks)]
    members = [Agreement(one, rank, ranks, timedelta(seconds=60), "test") for rank, one in enumerate(counting)]  # type: ignore[arg-type]
    threads = [threading.Thread(target=one.check, args=("forward program\ngather (1,)",)) for one in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return max(one.requests for one in counting)


def test_a_new_program_is_as_few_requests_on_many_ranks() -> None:
    assert _requests(64) == _requests(4) <= 6


def _one_differs(seen_of: list[Seen]) -> tuple[Any, str]:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    merged = put_together(seen_of[rank], "", seen_of[rank].steps, dist.group.WORLD)  # type: ignore[arg-type]
    dist.barrier()
    return merged, ""


def test_what_ranks_saw_becomes_one_whether_their_programs_are_the_same_or_not() -> None:
    forward = schedule("forward", gather(0), wait(0), compute(0, 0), release(0))
    other = schedule("forward", gather(0), wait(0), compute(0, 0), release(0))
    slow = profile([forward], 3.0, budget=50, step_seconds=2.0)
    fast = profile([forward], 1.0, budget=100, hold_seconds=0.5)
    same = [Seen(fast, (forward,), False, [[]], NO_STEPS), Seen(slow, (forward,), True, [[]], NO_STEPS)]
    apart = [same[0], Seen(slow, (other,), True, [[[]]], NO_STEPS)]
    for both, checkpoints in ((same, [[]]), (apart, [[], [[]]])):
        (one, _), (two, _) = run_ranks(_one_differs, 2, both)
        assert one == two and one.new and one.start == (forward,) and one.checkpoints == checkpoints
        assert one.profile.regions["forward/region_0"].seconds == 3.0 and one.profile.hold_seconds == 0.5
        assert (one.profile.budget, one.profile.step_seconds) == (50, 2.0)
        assert one.unequal == (both is same)  # others had other work
