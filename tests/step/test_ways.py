"""Optimizers of every kind train as one process does, each in the way that the probe finds for it."""

from __future__ import annotations

import os
import re
import time
import unittest
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from cases import Base, assert_close, assert_same_training, full, train
from multiprocess import RankError, join, run_ranks
from optimizers import GlobalClip, Lion, Sam, SignSam
from test_freshness import Shallow
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.step.ways import Way


def with_optimizer(make: Callable[[Any], Any]) -> Callable[[], Base]:
    class Own(Shallow):
        def configure_optimizers(self) -> Any:
            return make(self)

    return Own


def prodigy(module: Any) -> Any:
    from prodigyopt import Prodigy

    return Prodigy(module.parameters(), lr=1.0, d0=1e-2)


@torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
def _compiled(p: Tensor, gradient: Tensor, factor: Tensor) -> None:
    p.sub_(gradient * factor)


class CompiledClip(GlobalClip):
    """Its arithmetic is compiled, as of many packages' classes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        factor = 0.01 / torch.stack([p.grad.norm() for p in held]).norm().clamp(min=0.1)
        for p in held:
            if p.dim() == 2:
                _compiled(p, p.grad, factor)  # of few shapes
            else:
                p.sub_(p.grad * factor)
        return loss


MAKERS: dict[str, tuple[Callable[[Any], Any], Way, bool]] = {
    "lion": (lambda m: Lion(m.parameters()), Way.SHARDS, True),
    "sign sam": (lambda m: SignSam(m.parameters()), Way.SHARDS, True),
    "global clip": (lambda m: GlobalClip(m.parameters()), Way.DTENSORS, True),
    "compiled": (lambda m: CompiledClip(m.parameters()), Way.DTENSORS, True),
    "sam": (lambda m: Sam(m.parameters(), lr=0.1, momentum=0.9), Way.DTENSORS, True),
    "prodigy": (prodigy, Way.OWNERS, False),
}


def trained(names: list[str], stage: int, world_size: int, rank: int) -> dict[str, Any]:
    records = {}
    for name in names:
        strategy = DeepCompileStrategy(stage=stage, compile=CompileConfig(region_backend="eager"))

        def ways(trainer: Any) -> Any:
            return [shards.ways.ways() for shards in trainer.strategy.engine._local_shards.values()]

        records[name] = train(
            with_optimizer(MAKERS[name][0]), strategy, world_size=world_size, rank=rank, steps=6, inspect=ways
        )
    return records


@pytest.mark.parametrize(("stage", "world_size"), [(3, 2), (1, 3)])
def test_optimizers_train_as_in_one_process(stage: int, world_size: int) -> None:
    quick = ["sign sam", "compiled", "sam"] if stage == 3 else ["sam"]
    names = [*MAKERS] if "TEST_ALL" in os.environ else quick
    results = run_ranks(rank_main, world_size, names, stage, world_size)
    for name in names:
        make, way, params = MAKERS[name]
        alone = train(with_optimizer(make), "auto", world_size=1, rank=0, steps=6, data_world=world_size)
        for result in results:
            assert result[name].extra == [[way]], name
            assert_same_training(result[name], alone, params=params)


def rank_main(names: list[str], stage: int, world_size: int) -> Any:
    return trained(names, stage, world_size, int(os.environ["RANK"]))


class SamByHand(Shallow):
    """SAM as its README shows it for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        first = super().training_step(batch, batch_idx)
        self.manual_backward(first)
        optimizer.first_step(zero_grad=True)
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.second_step(zero_grad=True)
        return {"loss": first.detach()}

    def configure_optimizers(self) -> Any:
        return Sam(self.parameters(), lr=0.1, momentum=0.9)


def by_hand(stage: int, world_size: int) -> Any:
    strategy = DeepCompileStrategy(stage=stage, compile=CompileConfig(region_backend="eager"))
    return train(SamByHand, strategy, world_size=world_size, rank=int(os.environ["RANK"]), steps=5)


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.extensive)])
def test_sam_in_a_manual_step(stage: int) -> None:
    alone = train(SamByHand, "auto", world_size=1, rank=0, steps=5, data_world=2)
    for record in run_ranks(by_hand, 2, stage, 2):
        assert_close(torch.tensor(record.losses), torch.tensor(alone.losses), "losses")
        for name, value in alone.params.items():
            assert_close(record.params[name], value, name)


class Noting(torch.optim.SGD):
    """An optimizer with a method that is no step."""

    def note(self) -> None:
        """Does nothing to gradients."""


class NotesBetweenMicroBatches(Shallow):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.optimizers().note()

    def configure_optimizers(self) -> Any:
        return Noting(self.parameters(), lr=0.1)


def noting(stage: int, world_size: int) -> Any:
    strategy = DeepCompileStrategy(stage=stage, compile=CompileConfig(region_backend="eager"))
    rank = int(os.environ["RANK"])
    return train(NotesBetweenMicroBatches, strategy, world_size=world_size, rank=rank, steps=3, accumulate=2)


def test_a_method_between_micro_batches_leaves_gradients() -> None:
    alone = train(NotesBetweenMicroBatches, "auto", world_size=1, rank=0, steps=3, accumulate=2, data_world=2)
    for record in run_ranks(noting, 2, 3, 2):
        assert_same_training(record, alone, params=True)


class Looks(pl.Callback):
    """Reads and writes states between steps, as one does in one process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[Any] = []
        self.shown = True

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        (optimizer,) = trainer.optimizers
        momentum = optimizer.state[module.head.weight][self.name]
        self.shown &= isinstance(momentum, DTensor)
        self.seen.append((tuple(momentum.shape), momentum.mean().item(), momentum.abs().max().item()))
        self.seen.append((float(momentum.norm()), momentum.std().item(), momentum[-1].sum().item()))
        with torch.no_grad():
            momentum[:40] = 0
            momentum[-2:] *= 2
            momentum[:, 1].mul_(0.5)
            momentum.mul_(0.9)
        self.seen.append(momentum.norm().item())
        if batch_idx == 1:
            optimizer.state[module.head.weight][self.name] = momentum.clone()

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        if module.head.weight in optimizer.state:
            optimizer.state[module.head.weight][self.name][5:45].add_(0.01)


def resets(
    make: Callable[[Any], Any], name: str, strategy: Any, world: int, rank: int, data_world: int = 3, **options: Any
) -> Any:
    looks = Looks(name)
    options |= {"callbacks": [looks], "data_world": data_world}
    record = train(with_optimizer(make), strategy, world_size=world, rank=rank, steps=5, **options)
    return record.losses, looks.seen, looks.shown, record.params


STATES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lion": (lambda m: Lion(m.parameters()), "exp_avg"),
    "adamw": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3), "exp_avg"),
    "global clip": (lambda m: GlobalClip(m.parameters()), "momentum_buffer"),
}
SHOWN, IN_HOST_MEMORY = ["adamw", "global clip"], ["adamw"]
if "TEST_ALL" in os.environ:
    STATES["sgd"] = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "momentum_buffer"
    STATES["fused adamw"] = lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3, fused=True), "exp_avg"
    SHOWN, IN_HOST_MEMORY = [*STATES], ["adamw", "lion"]


def reset_on_ranks() -> Any:
    def one(name: str, offload: str) -> Any:
        strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager", offload=offload))
        return resets(*STATES[name], strategy, 2, int(os.environ["RANK"]), 2)

    shown = {name: one(name, "none") for name in SHOWN}
    return shown | {f"{name} in host memory": one(name, "all") for name in IN_HOST_MEMORY}


def test_states_are_those_of_one_process() -> None:
    alone = {name: resets(*STATES[name], "auto", 1, 0, 2) for name in SHOWN}
    for result in run_ranks(reset_on_ranks, 2):
        assert len(result) == len(SHOWN) + len(IN_HOST_MEMORY)
        for name, (losses, seen, shown, params) in result.items():
            expected = alone[name.removesuffix(" in host memory")]
            assert shown, name
            torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=0, msg=lambda m, name=name: f"{name}: {m}")
            torch.testing.assert_close(seen, expected[1], rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")
            for parameter, value in expected[3].items():
                assert_close(params[parameter], value, f"{name} {parameter}")


class _Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


class _AsksOthersOnOneRank(torch.optim.Optimizer):
    """Communicates in its steps, on rank 1 alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if dist.get_rank() == 1:
                    dist.all_reduce(parameter.grad)
                parameter.data -= parameter.grad


class _Broken(torch.optim.SGD):
    """Cannot step anywhere."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError("no kernel for such a step")


class _TwiceByNumpy(Sam):
    """Evaluates its closure twice, and leaves PyTorch."""

    def _grad_norm(self) -> Tensor:
        return torch.tensor(sum(float((p.grad.numpy() ** 2).sum()) for p in self.param_groups[0]["params"])).sqrt()


class _Slow(Lion):
    """Takes its time."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        time.sleep(0.03)
        return super().step(closure)


def _alone() -> tuple[list[str], float | None]:
    """Errors of optimizers that one rank refuses; and the loss of a step whose closure returns one on rank 0 alone."""
    join("cpu")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    engine = Engine(_Line(), mesh, CompileConfig(region_backend="eager"), timeout=timedelta(seconds=20))
    errors = []
    for kind in (torch.optim.LBFGS if rank else torch.optim.SGD, _AsksOthersOnOneRank):
        with pytest.raises((ValueError, RuntimeError)) as raised:
            engine.attach_optimizer(kind(engine.module.parameters()))
        errors.append(str(raised.value))
    for make in (_Broken, _TwiceByNumpy):
        with pytest.raises(ValueError) as refused:
            engine.attach_optimizer(make(engine.module.parameters(), lr=0.1))
        errors.append(str(refused.value))
    with unittest.TestCase().assertLogs("lightning_deepcompile", "INFO") as heard:
        engine.attach_optimizer(_Slow(engine.module.parameters()))
    errors.append("\n".join(heard.output))
    optimizer = GlobalClip(engine.module.parameters())
    engine.attach_optimizer(optimizer)

    def closure() -> Tensor | None:
        loss = engine.run_step("training_step", torch.ones(4, 3))
        engine.backward(loss.backward)
        return loss if rank == 0 else None

    with engine.stepping(optimizer):
        loss = optimizer.step(closure)
    engine.close()
    return errors, None if loss is None else loss.item()


class _LeavesOnce(GlobalClip):
    """One rank raises where the others wait for its part of a norm."""

    rank: int | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if dist.get_rank() == _LeavesOnce.rank:
            raise ArithmeticError("this rank gives up")
        return super().step(closure)


class _Leaves(Shallow):
    def on_train_start(self) -> None:
        _LeavesOnce.rank = 1

    def configure_optimizers(self) -> Any:
        return _LeavesOnce(self.parameters())


def _leave() -> None:
    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    train(_Leaves, strategy, world_size=2, rank=int(os.environ["RANK"]), steps=3)


def test_a_class_that_raises_within_a_step_on_dtensors_ends_all_ranks() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="this rank gives up") as caught:
        run_ranks(_leave, 2)
    assert "was still running" not in str(caught.value), "the other rank did not notice by itself"
    assert time.monotonic() - start < 150


class _Largest(torch.optim.Optimizer):
    """Clips by the largest element of all gradients, for which DTensors have no answer where a rank has no rows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        held = [p for group in self.param_groups for p in group["params"]]
        largest = torch.stack([p.grad.max() for p in held]).max()
        for p in held:
            p.sub_(p.grad * (0.1 / largest.clamp(min=1)))
        return loss


class _OneRow(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.value = nn.Embedding(61, 8), nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.value(self.embed(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return _Largest(self.parameters())


def _largest() -> Any:
    strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
    rank = int(os.environ["RANK"])
    return train(_OneRow, strategy, world_size=2, rank=rank, steps=3, inspect=lambda t: t.strategy.summary())


def test_a_class_that_fails_on_a_rank_without_rows_is_found_out_before_the_others_wait() -> None:
    alone = train(_OneRow, "auto", world_size=1, rank=0, steps=3, data_world=2)
    for record in run_ranks(_largest, 2, timeout=100):
        assert_same_training(record, alone, params=True)
        assert "on DTensors it fails" in str(record.extra)


class _Noisy(torch.optim.Optimizer):
    """Steps of random length, element by element or by the norm of each tensor."""

    def __init__(self, params: Any, *, by_norm: bool) -> None:
        super().__init__(params, {"by_norm": by_norm})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                size = 1 + p.grad.norm() if group["by_norm"] else 1
                p.sub_(p.grad / size * torch.rand_like(p))


class _Scaled(_Line):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def training_step(self, x: Tensor) -> Tensor:
        return super().training_step(x) * self.scale


def _draws() -> list[Any]:
    """Parameters after two steps of a class that draws random numbers, on meshes of replicas and shards."""
    join("cpu")
    found = []
    for shape, by_norm in (((2, 2), False), ((2, 2), True), ((4, 1), True)):
        mesh, config = init_device_mesh("cpu", shape), CompileConfig(region_backend="eager")
        torch.manual_seed(1)
        engine = Engine(_Scaled(), mesh, config, timeout=timedelta(seconds=20))
        optimizer = _Noisy(engine.module.parameters(), by_norm=by_norm)
        engine.attach_optimizer(optimizer)
        torch.manual_seed(dist.get_rank())
        for _ in range(2):
            optimizer.zero_grad()
            engine.backward(engine.run_step("training_step", torch.ones(4, 3)).backward)
            with engine.stepping(optimizer):
                optimizer.step()
        found.append([full(p) for p in engine.module.parameters()])
        engine.close()
    return found


def test_ranks_that_step_on_the_same_tensors_agree_on_random_numbers() -> None:
    first, *others = run_ranks(_draws, 4)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_what_one_rank_alone_refuses_or_returns_keeps_no_other_waiting() -> None:
    ((lbfgs, asks, *others), loss), ((own_lbfgs, own_asks, *_), nothing) = run_ranks(_alone, 2, timeout=100)
    assert "failed on rank 1: ValueError" in lbfgs and "failed on rank 1: ValueError" in asks
    assert "flat vectors" in own_lbfgs and "communicat" in own_asks
    assert loss is not None and nothing is None
    broken, twice, slow = others
    assert broken.startswith("_Broken is not element-wise") and "no kernel for such a step" in broken
    assert twice.startswith("_TwiceByNumpy is not element-wise") and "numpy" in twice
    assert "use an optimizer that updates each tensor by itself" in broken and "torch.zeros_like(parameter)" in twice
    assert re.search(r"Probing how _Slow steps took \d+\.\d s", slow)
