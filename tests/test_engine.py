"""The engine in one process (world size 1): programs as text, swapping schedules, what is saved, dynamic shapes."""

from __future__ import annotations

import contextvars
import gc
import itertools
import re
import tracemalloc
from typing import Any

import pytest
import torch
from cases import ONLY
from shuffle import KEEPING
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from lightning_deepcompile.capture import partition
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.plan.settings import PlanSettings


class Net(nn.Module):
    """Embedding, three equal blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)

    def training_step(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    def validation_step(self, tokens: Tensor) -> Tensor:
        return self.training_step(tokens)


def make_engine(mesh: DeviceMesh, stage: int = 3, **settings: object) -> Engine:
    config = CompileConfig(**{"region_backend": "eager", **ONLY, **settings})  # type: ignore[arg-type]
    return Engine(Net(), mesh, config, stage=stage)


def one_step(engine: Engine, tokens: Tensor, optimizer: torch.optim.Optimizer) -> float:
    loss = engine.run_step("training_step", tokens)
    optimizer.zero_grad()
    engine.backward(loss.backward)
    optimizer.step()
    engine.parameters_changed()
    return float(loss)


def _in_place(parameter: Any) -> None:
    with torch.no_grad():
        parameter.mul_(2.0)


def _local(parameter: Any) -> None:
    with torch.no_grad():
        parameter.to_local().mul_(2.0)


def _data(parameter: Any) -> None:
    parameter.data.mul_(2.0)


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (_in_place, ("training_step", "training_step")),
        (_local, ("training_step", "training_step")),
        (_data, ("training_step", "validation_step")),
    ],
)
def test_whole_parameters_are_gathered_anew_after_a_write(mesh: DeviceMesh, write: Any, names: tuple[str, str]) -> None:
    losses = []
    for stage in (2, 3):
        engine = make_engine(mesh, stage=stage)
        with torch.no_grad():
            for name in (names[0], names[0], *names, names[0]):
                losses.append(float(engine.run_step(name, TOKENS)))
                if name == names[1] and len(losses) % 5 > 1:
                    write(engine.module.head.weight)
        engine.close()
    assert losses[:5] == losses[5:] and losses[0] == losses[1] and len(set(losses)) > 1


def sgd(engine: Engine) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.5)
    engine.attach_optimizer(optimizer)
    return optimizer


TOKENS = torch.arange(24).reshape(2, 12) % 16

FORWARD = """\
frame0.forward [lower -> zero3 -> prefetch]: 5 regions, 3 distinct
  gather   embed (1 param, 512 B float32)
  gather   blocks.0 (2 params, 288 B float32)
  wait     embed (1 param, 512 B float32)
  compute  region_0 = r0 (embed; N ops)
  release  embed (1 param, 512 B float32)
  gather   blocks.1 (2 params, 288 B float32)
  wait     blocks.0 (2 params, 288 B float32)
  compute  region_1 = r1 (blocks.0; N ops)
  release  blocks.0 (2 params, 288 B float32)
  gather   blocks.2 (2 params, 288 B float32)
  wait     blocks.1 (2 params, 288 B float32)
  compute  region_2 = r1 (blocks.1; N ops)
  release  blocks.1 (2 params, 288 B float32)
  gather   head (1 param, 512 B float32)
  wait     blocks.2 (2 params, 288 B float32)
  compute  region_3 = r1 (blocks.2; N ops)
  release  blocks.2 (2 params, 288 B float32)
  wait     head (1 param, 512 B float32)
  compute  region_4 = r2 (head; N ops)
  release  head (1 param, 512 B float32)"""


def test_programs_read_as_they_run(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh, memory_budget=1 << 40)  # without one, a rank alone cuts nothing
    engine.capture.scheduling.replan(PlanSettings(prefetch_blocks=1))
    one_step(engine, TOKENS, sgd(engine))
    programs = engine.programs()
    assert re.sub(r"\d+ ops", "N ops", programs["frame0.forward"]) == FORWARD
    backward = [line.split()[:2] for line in programs["frame0.backward"].splitlines()[1:]]
    # Each block is launched one group ahead, released, then reduced; the table comes last.
    moves = [" ".join(words) for words in backward if words[0] in ("gather", "release", "reduce")]
    assert moves == [
        "gather head",
        "gather blocks.2",
        "release head",
        "reduce head",
        "gather blocks.1",
        "release blocks.2",
        "reduce blocks.2",
        "gather blocks.0",
        "release blocks.1",
        "reduce blocks.1",
        "release blocks.0",
        "reduce blocks.0",
        "reduce embed",
    ]
    engine.close()


def test_nothing_is_cut_where_nothing_moves(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh)
    one_step(engine, TOKENS, sgd(engine))
    assert {name: e.count("compute") for name, e in engine.programs().items()} == {
        "frame0.forward": 1,
        "frame0.backward": 1,
    }
    engine.close()


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_launches_stay_within_the_distance(mesh: DeviceMesh, ahead: int) -> None:
    engine = make_engine(mesh, memory_budget=1 << 40)
    engine.capture.scheduling.replan(PlanSettings(prefetch_blocks=ahead))
    one_step(engine, TOKENS, sgd(engine))
    for text in engine.programs().values():
        alive, most, waited = set(), 0, set()
        for line in text.splitlines()[1:]:
            verb, block = line.split()[:2]
            if verb == "gather":
                assert block not in alive
                alive.add(block)
            elif verb == "wait":
                assert block in alive
                waited.add(block)
            elif verb == "release":
                alive.remove(block)
            most = max(most, len(alive))
        assert most <= ahead + 1
        assert not alive
    engine.close()


def test_swapping_schedules_changes_nothing_but_the_schedule(mesh: DeviceMesh) -> None:
    losses: dict[bool, list[float]] = {}
    weights: dict[bool, Tensor] = {}
    for swap in (False, True):
        engine = make_engine(mesh, memory_budget=1 << 40)
        optimizer = sgd(engine)
        losses[swap] = [one_step(engine, TOKENS, optimizer) for _ in range(2)]
        compiled, graphs, before = engine.capture.regions.compiled, len(engine.capture.frames.all), engine.programs()
        if swap:
            engine.capture.scheduling.replan(PlanSettings(prefetch_blocks=0), KEEPING)
            assert engine.programs() != before
        losses[swap] += [one_step(engine, TOKENS, optimizer) for _ in range(2)]
        assert (engine.capture.regions.compiled, len(engine.capture.frames.all)) == (compiled, graphs)
        weights[swap] = torch.cat([p.local.detach().flatten() for p in engine.model.parameters])
        engine.close()
    assert losses[True] == losses[False]
    assert losses[True][-1] < losses[True][0]
    assert torch.equal(weights[True], weights[False])


def test_gathered_parameters_are_never_saved(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    for autocast in (False, True):
        engine = make_engine(mesh)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            one_step(engine, TOKENS, sgd(engine))
        assert engine.capture.saved_parameters == 0
        engine.close()
    # The count can tell: untagged, the partitioner saves them.
    monkeypatch.setattr(partition, "tag_gathers", lambda gm: None)
    engine = make_engine(mesh)
    one_step(engine, TOKENS, sgd(engine))
    assert engine.capture.saved_parameters > 0
    engine.close()


def test_variable_lengths_recompile_once(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh)
    optimizer = sgd(engine)
    reference = Net()
    for length in (12, 7, 9, 5, 11):
        for parameter, shard in zip(reference.parameters(), engine.model.parameters, strict=True):
            parameter.data.copy_(shard.local.detach())
        expected = float(reference.training_step(TOKENS[:, :length]))
        assert one_step(engine, TOKENS[:, :length], optimizer) == pytest.approx(expected, rel=1e-5)
    assert len(engine.capture.frames.all) == 2  # static, then dynamic
    engine.close()


def test_steps_leave_no_objects_behind(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh)
    optimizer = sgd(engine)

    def traced_after(steps: int) -> int:
        for _ in range(steps):
            one_step(engine, TOKENS, optimizer)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    one_step(engine, TOKENS, optimizer)
    variables = len(contextvars.copy_context())
    tracemalloc.start()
    try:
        # What lives on from before is replaced once, and counted from then on: that looks like growth, but ends.
        marks = [traced_after(120) for _ in range(4)]
    finally:
        tracemalloc.stop()
    assert len(contextvars.copy_context()) == variables, "PyTorch makes one for each patch of its settings"
    assert min(b - a for a, b in itertools.pairwise(marks)) < 12_000, marks
    engine.close()


def test_reading_a_weight_outside_a_step_gives_the_shard(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh)
    before = engine.runtime.stats()["gathers"]
    weight = engine.module.head.weight
    assert weight is engine.module.head._parameters["weight"]
    assert engine.runtime.stats()["gathers"] == before
    engine.close()


def test_a_gradient_that_someone_keeps_keeps_its_values(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh)
    optimizer = sgd(engine)
    one_step(engine, TOKENS, optimizer)
    kept = engine.module.head.weight.grad
    value = kept.full_tensor().clone()
    for _ in range(2):
        engine.timeline.drop_stale_gradients()
        one_step(engine, TOKENS.flip(1), optimizer)
    assert torch.equal(kept.full_tensor(), value)
    assert not torch.equal(engine.module.head.weight.grad.full_tensor(), value)
    block = engine.module.blocks[0]  # whose two gradients share their memory
    others = {p: p.grad.full_tensor() for p in engine.module.parameters() if p is not block.weight}
    kept = block.weight.grad
    engine.gradients.forget([block.weight])
    assert block.weight.grad is None and kept is not None
    assert all(torch.equal(p.grad.full_tensor(), value) for p, value in others.items()), "only one was forgotten"
    engine.close()


def test_gradients_that_need_no_backward(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss times zero: all gradients are constants, which the partitioner moves into the forward graph."""
    plain = Net.training_step
    monkeypatch.setattr(
        Net, "training_step", lambda self, tokens: (plain(self, tokens) * 0, plain(self, tokens).detach())
    )
    engine = make_engine(mesh)
    loss, _ = engine.run_step("training_step", TOKENS)
    engine.backward(loss.backward)
    for parameter in engine.model.parameters:
        assert torch.equal(parameter.dtensor.grad.to_local(), torch.zeros_like(parameter.local))
    engine.close()


def test_zeroing_gradients_through_the_module_counts(mesh: DeviceMesh) -> None:
    engine = make_engine(mesh)
    optimizer = sgd(engine)
    loss = engine.run_step("training_step", TOKENS)
    engine.backward(loss.backward)
    once = engine.module.head.weight.grad.full_tensor().clone()
    engine.module.zero_grad()
    loss = engine.run_step("training_step", TOKENS)
    engine.backward(loss.backward)
    assert torch.equal(engine.module.head.weight.grad.full_tensor(), once)
    loss = engine.run_step("training_step", TOKENS)
    engine.backward(loss.backward)
    torch.testing.assert_close(engine.module.head.weight.grad.full_tensor(), 2 * once)
    del optimizer
    engine.close()


@torch._dynamo.config.patch(recompile_limit=2)
def test_models_of_one_class_do_not_use_up_each_others_recompile_limit(mesh: DeviceMesh) -> None:
    for _ in range(4):
        engine = make_engine(mesh)
        one_step(engine, TOKENS, sgd(engine))
        assert len(engine.capture.frames.all) == 1
        engine.close()


class Odd(nn.Module):
    """Sizes that tensor cores do not like."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 13)) for _ in range(3))
        self.head = nn.Linear(13, 19)

    def training_step(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).flatten(1).square().mean() + F.gelu(self.head(x)).mean()


@pytest.mark.parametrize("region_backend", ["inductor", "eager"])
def test_products_that_inductor_pads(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, region_backend: str) -> None:
    """Inductor pads products on GPUs if that is faster: views of one then have other strides than in the trace."""
    from torch._inductor import config
    from torch._inductor.fx_passes import pad_mm

    padded = []
    monkeypatch.setattr(pad_mm, "check_device", lambda *matrices: padded.append(matrices) or True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    module, x = Odd(), torch.randn(2, 12, 13)
    plain = [*torch.autograd.grad(module.training_step(x), [*module.parameters()])]
    with config.patch(force_shape_pad=True, shape_padding=True):
        engine = Engine(module, mesh, CompileConfig(region_backend=region_backend))
        engine.backward(engine.run_step("training_step", x).backward)
        engine.close()
    assert bool(padded) == (region_backend == "inductor")
    for parameter, expected in zip(module.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), expected, rtol=1e-5, atol=1e-7)


class Dtypes(nn.Module):
    """Gradients whose values, or whose norm, no other dtype holds; a 0-dim parameter is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.short = nn.Parameter(torch.ones(8, 8, dtype=torch.float16))
        self.single = nn.Parameter(torch.tensor(1.0))

    def training_step(self, x: Tensor) -> Tensor:
        return (self.scale * x).sum() + (self.short.float() * 3e4).sum() + self.single


def test_gradients_and_norms_keep_their_dtypes_digits_and_range(mesh: DeviceMesh) -> None:
    engine = Engine(Dtypes(), mesh, CompileConfig(region_backend="eager"))
    x = torch.tensor([1e9 + 1 / 3], dtype=torch.float64)
    engine.backward(engine.run_step("training_step", x).backward)
    assert engine.module.scale.grad.dtype is torch.float64 and engine.module.scale.grad == x[0]
    assert engine.module.short.grad.dtype is torch.float16 and engine.module.single.grad == 1
    norm = engine.clipping.total_norm([engine.module.short])
    assert norm.dtype is torch.float32 and float(norm) == pytest.approx(8 * 3e4, rel=1e-4)
    norm = engine.clipping.norm(engine.module.parameters(), 1.0)
    assert norm.dtype is torch.float64 and float(norm) == pytest.approx(float(x[0]), rel=1e-7)
    assert float(engine.module.scale.grad) == pytest.approx(1.0, rel=1e-7)
