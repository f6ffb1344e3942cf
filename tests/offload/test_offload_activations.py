"""Activations in host memory between forward and backward: programs, planning, and training to the last bit."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, ONLY, Record, llama, train
from hypothesis import given, settings
from hypothesis import strategies as st
from multiprocess import run_ranks
from test_engine import make_engine, one_step, sgd
from test_passes import Net
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tracing import Simulator, capture

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.plan.budget import MemoryBudgetError
from lightning_deepcompile.plan.copy_placement import CopyPlacement, offload_all
from lightning_deepcompile.plan.optimize import apply_passes
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.program.printer import format_program
from lightning_deepcompile.program.reschedule import reschedule
from lightning_deepcompile.program.schedule import check_schedule

# Programs -------------------------------------------------------------------------------------------------------------


@functools.cache
def _programs() -> tuple[Any, Any, Any]:
    captured = capture(Net(), torch.arange(6).view(2, 3))
    forward = apply_passes(captured.lower("forward"), PlanSettings(1))
    backward = apply_passes(captured.lower("backward"), PlanSettings(1))
    return captured, forward, backward


def _run(captured: Any, forward: Any, backward: Any) -> tuple[Any, Simulator]:
    simulator = Simulator(captured.full)
    outputs = simulator.generate(forward)(list(captured.args))
    tangents = [torch.ones_like(out) for out in outputs[: captured.num_outputs] if isinstance(out, torch.Tensor)]
    grads = simulator.generate(backward)([*outputs[captured.num_outputs :], *tangents])
    return (outputs[0], grads), simulator


def test_a_program_prints_its_copies() -> None:
    _, forward, backward = _programs()
    printed = []
    schedules = offload_all([p.schedule for p in (forward, backward)])
    for program, one in zip((forward, backward), schedules, strict=True):
        lines = format_program(reschedule(program, one, "offload")).splitlines()[1:]
        printed += [line.strip() for line in lines if not line.strip().startswith(("gather", "wait  ", "release"))]
    # How many operators an embedding takes differs between releases of PyTorch.
    assert re.sub(r"\d+ ops", "N ops", "\n".join(printed)) == _COPIES


_COPIES = """\
compute  region_0 = r0 (embed; N ops)
compute  region_1 = r1 (layers.0; N ops)
offload  saved 6 (192 B)
compute  region_2 = r2 (layers.1; N ops)
offload  saved 7 (192 B)
wait copy saved 6 (192 B)
compute  region_3 = r2 (layers.2; N ops)
offload  saved 8 (192 B)
wait copy saved 7 (192 B)
compute  region_4 = r3 (head; N ops)
offload  saved 9 (192 B)
wait copy saved 8, 9 (384 B)
reload   saved 9, 8 (384 B)
reload   saved 7 (192 B)
wait copy saved 9 (192 B)
compute  region_0 = r0 (head; N ops)
reduce   head (2 params, 432 B float32)
reload   saved 6 (192 B)
wait copy saved 8 (192 B)
compute  region_1 = r1 (layers.2; N ops)
reduce   layers.2 (2 params, 288 B float32)
wait copy saved 7 (192 B)
compute  region_2 = r1 (layers.1; N ops)
reduce   layers.1 (2 params, 288 B float32)
wait copy saved 6 (192 B)
compute  region_3 = r2 (layers.0; N ops)
reduce   layers.0 (2 params, 288 B float32)
compute  region_4 = r3 (embed; N ops)
reduce   embed (1 param, 384 B float32)
end of backward"""


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_copies_anywhere_never_change_results(data: st.DataObject) -> None:
    captured, *programs = _programs()
    expected, reference = _run(captured, *programs)
    placements = [CopyPlacement.of(p.schedule) for p in programs]
    away = data.draw(st.sets(st.sampled_from(sorted(placements[1].saved))))
    changed = []
    for program, placement in zip(programs, placements, strict=True):
        schedule = placement.at({n: data.draw(st.integers(0, len(placement.body))) for n in sorted(away)})
        check_schedule(schedule)
        changed.append(reschedule(program, schedule, "copies"))
        assert changed[-1].schedule.instructions == schedule.instructions
        assert changed[-1].schedule.offloaded == tuple(sorted(away))
        back = reschedule(changed[-1], program.schedule, "back")
        assert format_program(back).splitlines()[1:] == format_program(program).splitlines()[1:]
    (value, grads), simulator = _run(captured, *changed)
    assert torch.equal(value, expected[0]) and simulator.copies == []
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(grads, expected[1], strict=True))
    assert all(torch.equal(simulator.grads[k], reference.grads[k]) for k in reference.grads)


# Training -------------------------------------------------------------------------------------------------------------

MODES = {
    "all": {"offload": ["activations"], "schedule": None},
    "planned": {"offload": ["activations"]},
}


def _train(world: int) -> dict[str, str]:
    wrong = {}
    short = llama(checkpointing=True, layers=1)
    cases = {"graph_break": (CASES["graph_break"], 3), "checkpointing": (short, 1)}
    for name, (build, accumulate) in cases.items() if world == 2 else {"gpt": (CASES["gpt"], 3)}.items():
        records: dict[str, Record] = {}
        chosen = MODES if name == "graph_break" else {"planned": MODES["planned"]}
        for mode, options in {"plain": {"schedule": None}, **chosen}.items():
            records[mode] = train(
                build,
                DeepCompileStrategy(compile=CompileConfig(region_backend="eager", **{**ONLY, **options})),
                world_size=world,
                rank=int(os.environ["RANK"]),
                steps=3 if mode == "all" else 7,
                accumulate=accumulate,
                gradient_clip_val=0.5,
                inspect=lambda trainer: trainer.strategy.engine.runtime.stats(),
            )
        plain = records["plain"]
        for mode, record in records.items():
            moved = record.extra["offloaded_bytes"]
            if record.losses != plain.losses[: len(record.losses)]:
                wrong[f"{name}, {mode}"] = f"{record.losses} instead of {plain.losses}"
            elif (moved > 0) != (mode != "plain") or moved != record.extra["reloaded_bytes"]:
                wrong[f"{name}, {mode}"] = f"{moved} bytes left, {record.extra['reloaded_bytes']} came back"
            elif mode != "all" and any(not torch.equal(plain.params[k], record.params[k]) for k in plain.params):
                wrong[f"{name}, {mode}"] = "other parameters"
    return wrong


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.extensive)])
def test_training_is_the_same_to_the_last_bit(world: int) -> None:
    assert run_ranks(_train, world, world, timeout=380) == [{}] * world


BATCH = torch.arange(64 * 128).reshape(64, 128) % 16
"""Tensors of 256 KiB are saved."""


def test_a_budget_is_kept_and_said(mesh: DeviceMesh) -> None:
    """Sizes say which tensors leave at first; planning knows times, too, and takes back what fits."""
    plain = make_engine(mesh, schedule=None)
    expected = [one_step(plain, BATCH, optimizer) for optimizer in [sgd(plain)] for _ in range(12)]
    roomy = make_engine(mesh, offload="auto", memory_budget=1 << 40)
    assert [one_step(roomy, BATCH, optimizer) for optimizer in [sgd(roomy)] for _ in range(7)] == expected[:7]
    (nothing,) = roomy.report()
    assert roomy.runtime.stats()["offloaded_bytes"] == 0
    needed = nothing.passes[0].peak_bytes
    engine = make_engine(mesh, offload="auto", memory_budget=f"{int(0.8 * needed)}B")
    engine.tuner._fastest = lambda *_: 0.001  # type: ignore[method-assign] # however busy the machine is
    optimizer = sgd(engine)
    losses, moved = [], []
    for _ in range(12):
        before = engine.runtime.stats()["offloaded_bytes"]
        losses.append(one_step(engine, BATCH, optimizer))
        moved.append(engine.runtime.stats()["offloaded_bytes"] - before)
    assert losses == expected
    (done,) = engine.report()
    assert done.outcome == "kept" and "activations in host memory" in str(done)
    assert done.passes[-1].peak_bytes <= 0.8 * needed
    assert 0 < moved[-1] < moved[0], "some of it fits"
    assert engine.summary().offloaded_activation_bytes == moved[-1] and "offloaded activations" in str(engine.summary())
    for one in (plain, roomy, engine):
        one.close()


def test_a_plan_file_remembers_what_leaves(mesh: DeviceMesh, tmp_path: Path) -> None:
    budget, path = 2_200_000, str(tmp_path / "plan.json")
    moved = {}
    for mode, steps in (("auto", 11), ("auto", 2), ("none", 2)):
        torch._dynamo.reset()
        engine = make_engine(mesh, offload=mode, memory_budget=f"{budget}B", plan=path)
        engine.tuner._fastest = lambda *_: 0.001  # type: ignore[method-assign] # however busy the machine is
        optimizer = sgd(engine)
        for _ in range(steps):
            before = engine.runtime.stats()["offloaded_bytes"]
            one_step(engine, BATCH, optimizer)
            moved.setdefault((mode, steps), []).append(engine.runtime.stats()["offloaded_bytes"] - before)
        engine.close()
    assert 0 < moved["auto", 11][-1] < moved["auto", 11][0]
    assert moved["auto", 2] == [moved["auto", 11][-1]] * 2, "from the first step on"
    assert moved["none", 2] == [0, 0], "a plan is no reason to let them leave"


def _with_one_rank_short() -> list[str]:
    """Rank 1 has no room for activations, and passes that find no reason for that let them stay."""
    mesh = init_device_mesh("cpu", (2,))
    schedule = [
        {"step": step, "passes": ["zero3", "prefetch", *more]} for step, more in ((0, []), (3, ["offload_activation"]))
    ]
    engine = make_engine(mesh, offload="auto", schedule=schedule)
    if dist.get_rank() == 1:
        engine.capture.scheduling.choose_activations = lambda forward: frozenset(one.number for one in forward.saved)
    optimizer = sgd(engine)
    for _ in range(12):
        one_step(engine, torch.arange(12).view(2, 6), optimizer)
    return [done.outcome for done in engine.report()]


def test_a_plan_may_change_nothing_on_some_ranks() -> None:
    first, second = run_ranks(_with_one_rank_short, 2, timeout=90)
    assert first == second and first[0] in ("kept", "reverted")


@pytest.mark.parametrize("schedule", [None, "auto"])
def test_a_larger_batch_than_planned_for_goes_to_the_host(mesh: DeviceMesh, schedule: str | None) -> None:
    """Small batches stay on the device, planned or not; activations of one that may not fit leave at once."""
    batches = [BATCH[:4]] * 8 + [BATCH] * 2 + [BATCH[:4]]
    losses, moved = [], []
    for mode in ("none", "auto"):
        torch._dynamo.reset()
        engine = make_engine(mesh, schedule=schedule, offload=mode, memory_budget="1MB")
        optimizer = sgd(engine)
        losses.append([one_step(engine, batch, optimizer) for batch in batches[:8]])
        moved.append([engine.runtime.stats()["offloaded_bytes"]])
        losses[-1] += [one_step(engine, batch, optimizer) for batch in batches[8:]]
        moved[-1].append(engine.runtime.stats()["offloaded_bytes"])
        engine.close()
    assert losses[0] == losses[1]
    assert moved[0] == [0, 0] and moved[1][0] == 0 < moved[1][1]


@pytest.mark.parametrize("mode", ["none", "auto"])
def test_a_budget_below_everything_states_the_least(mesh: DeviceMesh, mode: str) -> None:
    """One rank holds to it, too, although it waits for no gather."""
    engine = make_engine(mesh, offload=mode, memory_budget="40kB")
    optimizer = sgd(engine)
    with pytest.raises(MemoryBudgetError, match=r"needs? [0-9]+ .*with a budget of"):
        for _ in range(6):
            one_step(engine, BATCH, optimizer)
    engine.close()


def test_host_memory_that_does_not_suffice_is_named(mesh: DeviceMesh) -> None:
    """The rank runs out from the first step on: other ranks wait for it, so it continues with the memory there is."""
    plain = make_engine(mesh, schedule=None)
    expected = [one_step(plain, BATCH, optimizer) for optimizer in [sgd(plain)] for _ in range(2)]
    plain.close()
    engine = make_engine(mesh, schedule=None, offload=["activations"], host_memory_budget="100kB")
    optimizer = sgd(engine)
    with pytest.warns(UserWarning, match="no host memory for .* bytes of offloaded .*host_memory_budget"):
        losses = [one_step(engine, BATCH, optimizer) for _ in range(2)]
    stats = engine.runtime.stats()
    assert losses == expected and stats["stayed_tensors"] > 0 and stats["host_bytes"] <= 100_000
    engine.close()
    # What was not asked for by name takes what there is.
    engine = make_engine(mesh, offload="auto", memory_budget="1MB", host_memory_budget="600kB")
    with pytest.raises(MemoryBudgetError, match="or more host memory than 585.9 KiB") as refused:
        one_step(engine, BATCH, sgd(engine))
    least = str(refused.value).partition("still needs ")[2].split()[0]
    engine.close()
    engine = make_engine(mesh, offload="auto", memory_budget=f"{least}B", host_memory_budget="600kB")
    one_step(engine, BATCH, sgd(engine))
    assert 0 < engine.runtime.stats()["host_bytes"] <= 600_000
    engine.close()


def test_a_graph_may_run_again_before_its_backward(mesh: DeviceMesh) -> None:
    results = []
    for mode in ("none", ["activations"]):
        engine = make_engine(mesh, schedule=None, offload=mode)
        first, second = (engine.run_step("training_step", batch) for batch in (BATCH[:8], BATCH[8:16]))
        engine.backward((first + 2 * second).backward)
        results.append([p.grad.to_local().clone() for p in engine.module.parameters()])
        moved = engine.runtime.stats()
        assert (moved["offloaded_bytes"] > 0) == (mode != "none")
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("stage", "backend"),
    [(1, "eager"), (2, "eager"), pytest.param(3, "inductor", marks=pytest.mark.extensive)],
)
def test_stages_backends_and_other_lengths(mesh: DeviceMesh, stage: int, backend: str) -> None:
    losses: list[list[float]] = []
    for mode in ("none", ["activations"]):
        torch._dynamo.reset()  # else the second engine's first program has symbolic sizes, and other kernels
        settings_ = {"schedule": None, "region_backend": backend, "offload": mode}
        engine = make_engine(mesh, stage, **settings_)
        optimizer = sgd(engine)
        losses.append([one_step(engine, BATCH[:, :length], optimizer) for length in (32, 32, 17, 24, 32)])
        assert (engine.summary().offloaded_activation_bytes > 0) == (mode != "none")
        with torch.no_grad():
            losses[-1].append(float(engine.run_step("validation_step", BATCH[:, :9])))
        engine.close()
    assert losses[0] == losses[1]


def test_a_step_that_is_given_up_leaves_nothing_behind(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh, schedule=None, offload=["activations"])
    optimizer = sgd(engine)
    expected = one_step(engine, BATCH, optimizer)
    for _ in range(2):
        engine.run_step("training_step", BATCH)  # its loss is dropped, and with it what it saved
    held = engine.runtime.stats()["host_bytes"]
    for _ in range(3):
        assert one_step(engine, BATCH, optimizer) != expected
    assert engine.runtime.stats()["host_bytes"] == held > 0, "buffers are used again"
    engine.close()
