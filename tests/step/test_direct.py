"""Optimizers step by PyTorch's functions for them: in every bit what their own classes do."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import Mlp, Record, train
from multiprocess import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor


class OwnAdam(torch.optim.Adam):
    """A subclass may do anything: it steps by itself."""


class OwnAdamW(torch.optim.AdamW):
    """A subclass, as above."""


class OwnSGD(torch.optim.SGD):
    """A subclass, as above."""


OWN = {torch.optim.Adam: OwnAdam, torch.optim.AdamW: OwnAdamW, torch.optim.SGD: OwnSGD}


def annealed(kind: type[torch.optim.Optimizer], **settings: Any) -> Callable[[], Mlp]:
    """Another learning rate in every step, and two groups; some parameters have no gradients, or no elements."""

    class Annealed(Mlp):
        def __init__(self) -> None:
            super().__init__()
            del self.layers[2]

        def configure_optimizers(self) -> Any:
            groups = [{"params": [self.embed.weight, self.one_row, self.empty], "weight_decay": 0.0}]
            known = {p for group in groups for p in group["params"]}
            groups.append({"params": [p for p in self.parameters() if p not in known]})
            optimizer = kind(groups, lr=1e-2, **settings)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Annealed


class Interferes(pl.Callback):
    """Between two steps: freezes, loads states, replaces one, drops others; and looks at what a step has left."""

    def __init__(self, steps: int) -> None:
        self._steps = iter(range(steps))
        self.direct: list[bool] = []
        self.hooks: Counter[str] = Counter()

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        (optimizer,) = trainer.optimizers
        direct = trainer.strategy.engine._local_shards[optimizer]._direct
        optimizer.register_step_pre_hook(lambda *_: self.hooks.update(["before"]))
        optimizer.register_step_post_hook(self._after)
        if direct is not None:
            begin = direct.begin

            def watched(**options: Any) -> bool:
                self.direct.append(begin(**options))
                return self.direct[-1]

            direct.begin = watched

    def _after(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        assert len(parameters) == len(set(parameters)) > 10 and set(optimizer.state) <= set(parameters)
        self.hooks.update(["after"])

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        step = next(self._steps)
        if step == 3:
            module.layers[1][0].weight.requires_grad_(False)
            module.layers[1][0].weight.grad = None
        elif step == 5:
            module.layers[1][0].weight.requires_grad_(True)
        elif step == 6:
            state = optimizer.state_dict()
            copied = {k: {n: v.clone() for n, v in entries.items()} for k, entries in state["state"].items()}
            optimizer.load_state_dict({**state, "state": copied})
        elif step == 8:
            for entries in optimizer.state.values():
                for name in {"exp_avg", "momentum_buffer"} & set(entries):
                    entries[name] = entries[name] * 0.5
        elif step == 9:
            optimizer.state.pop(module.head.weight, None)
        elif step == 10:
            module.head.weight.grad = module.head.weight.grad * 2


CHOICES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
]


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _run(kind: type[torch.optim.Optimizer], settings: dict[str, Any], world: int, stage: int, **trainer: Any) -> Any:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    watch = Interferes(12)
    record = train(
        annealed(kind, **settings),
        DeepCompileStrategy(stage=stage, compile=CompileConfig(region_backend="eager", schedule=None)),
        world_size=world,
        rank=int(os.environ["RANK"]),
        steps=12,
        callbacks=[watch],
        inspect=lambda run: {
            k: {n: _local(v).clone() for n, v in e.items()} for k, e in run.optimizers[0].state_dict()["state"].items()
        },
        **trainer,
    )
    assert watch.hooks == {"before": 12, "after": 12}
    return record, watch.direct


def _all(world: int, stage: int, choices: slice) -> list[Any]:
    runs = []
    for kind, settings in CHOICES[choices]:
        torch._dynamo.reset()
        runs.append([_run(k, settings, world, stage, accumulate=2, gradient_clip_val=0.5) for k in (OWN[kind], kind)])
    return runs


@pytest.mark.parametrize(
    ("world", "stage", "choices"),
    [(2, 3, slice(1)), (2, 1, slice(1, 2)), pytest.param(1, 3, slice(3), marks=pytest.mark.extensive)],
)
def test_no_bit_changes(world: int, stage: int, choices: slice) -> None:
    for runs in run_ranks(_all, world, world, stage, choices):
        for (kind, _), ((own, never), (direct, when)) in zip(CHOICES[choices], runs, strict=True):
            assert never == []
            # The class makes states: of all parameters, and of one that has lost its own.
            assert [step for step, did in enumerate(when) if not did] == [0, 9], kind
            assert direct.losses == own.losses
            for name, value in own.params.items():
                assert torch.equal(value, direct.params[name]), (kind, name)
            assert own.extra.keys() == direct.extra.keys()
            for key, entries in own.extra.items():
                assert entries.keys() == direct.extra[key].keys()
                assert all(torch.equal(value, direct.extra[key][name]) for name, value in entries.items())


class Manual(Mlp):
    """Steps by hand: with a closure, without, scaled as by a gradient scaler, and compiled by the user."""

    own: type[torch.optim.Optimizer]

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return self.own(self.parameters(), lr=1e-2, fused=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self._step(batch_idx)
        return {"loss": loss.detach()}

    @torch.compiler.disable
    def _step(self, batch_idx: int) -> None:
        optimizer = self.optimizers().optimizer
        if batch_idx == 3:
            assert optimizer.step(lambda: torch.tensor(2.0)) == 2
        elif batch_idx == 4:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        elif batch_idx == 6:
            torch.compile(lambda: optimizer.step(), backend="eager")()
        else:
            optimizer.step()
        optimizer.zero_grad()


def _by_hand() -> list[Record]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    records = []
    for own in (OwnAdamW, torch.optim.AdamW):
        torch._dynamo.reset()
        Manual.own = own
        strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager", schedule=None))
        records.append(train(Manual, strategy, world_size=1, rank=0, steps=9))
    return records


def test_steps_by_hand_scaled_and_compiled() -> None:
    ((own, direct),) = run_ranks(_by_hand, 1)
    assert direct.losses == own.losses
    assert all(torch.equal(value, direct.params[name]) for name, value in own.params.items())
