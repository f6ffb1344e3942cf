"""Unusual users' modules work as without sharding, or are refused with advice."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Mlp, Record, Recorder, Tokens, assert_same_training, full
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from multiprocess import run_ranks
from test_handover import Small, trainer_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.sharding.errors import UnsupportedStepError

ROWS, STEPS = 12, 4


def fit(strategy: Any, build: Callable[[], Mlp], **options: Any) -> tuple[Record, Mlp]:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(3)
    module, recorder = build(), Recorder()
    trainer = trainer_of(strategy, recorder, **options)
    trainer.fit(module, DataLoader(Tokens(STEPS, ROWS, rank, world), batch_size=ROWS // world))
    return recorder.record, module


def ours(**settings: Any) -> DeepCompileStrategy:
    stage = settings.pop("stage", 3)
    return DeepCompileStrategy(stage=stage, compile=CompileConfig(region_backend="eager", **settings))


class Adagrad(Small):
    """An optimizer that makes its states before it steps."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


class Unusual(Adagrad):
    """Buffers without memory of their own, norms, a frozen model that is none of its modules, an own checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.linspace(0.5, 1.0, 13).expand(3, 13))  # less memory than elements
        self.register_buffer("turn", torch.polar(torch.ones(13), torch.linspace(0, 1, 13)))
        self.register_buffer("norms", torch.zeros(2))
        self.teacher = [nn.Linear(61, 61).requires_grad_(False)]
        self.layers[0].forward = functools.partial(checkpoint, self.layers[0].forward, use_reentrant=False)

    def logits(self, tokens: Tensor) -> Tensor:
        logits = super().logits(tokens) * (self.mask.sum() / 39 + self.turn.imag.mean())
        return logits + self.teacher[0](logits.detach())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keeps the norms of its gradients and of its head's, as others would log them."""
        strategy = self.trainer.strategy
        for place, part in enumerate((None, self.head)):
            if isinstance(strategy, DeepCompileStrategy):
                norm = strategy.grad_norm(part)
            else:
                gradients = [p.grad for p in (part or self).parameters() if p.grad is not None]
                norm = torch.nn.utils.get_total_norm(gradients)
            self.norms[place] = norm

    def on_train_end(self) -> None:
        assert isinstance(vars(self.layers[0])["forward"], functools.partial)
        assert self.turn.is_complex()


class Adversarial(Small):
    """Gradients with respect to what it looks up, and then those of its parameters."""

    def near(self, tokens: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            x = self.embed(batch[:, :-1])
        x.requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.near(batch, x), x)
        return self.near(batch, x.detach() + 0.05 * gradient.sign())


class Deep(Adversarial):
    """More parameters than a function may be compiled for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(12))


class Energy(Small):
    """Without a parameter that is trained, tests ask for gradients of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            x = self.embed(batch).requires_grad_(True)
            (gradient,) = torch.autograd.grad(self.head(self.layers[0](x)).square().mean(), x)
        self.log("slope", gradient.square().sum())


class Manual(Adversarial):
    """The same, between `zero_grad` and the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        self.optimizers().zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()
        return {"loss": loss.detach()}


WORKS: dict[str, tuple[Callable[[], Mlp], dict[str, Any], dict[str, Any]]] = {
    "unusual": (Unusual, {}, {}),
    "gradients of inputs": (Adversarial, {}, {"accumulate_grad_batches": 2}),
    "gradients of inputs, by hand": (Manual, {}, {}),
}
if torch.__version__ >= (2, 12):  # before, it cannot step on parameters that it was not made with, and is refused
    WORKS["adagrad, offloaded"] = (Adagrad, {"offload": ["states"]}, {})
if "TEST_ALL" in os.environ:  # all are trained in one launch
    WORKS["gradients of inputs, of many layers"] = (Deep, {}, {"accumulate_grad_batches": 2})


def _works(folder: Path) -> dict[str, Record]:
    records = {}
    for name, (build, settings, options) in WORKS.items():
        records[name], module = fit(ours(**settings), build, **options)
    # What checkpoints callbacks and users do with a state dict.
    state = module.state_dict()
    path = folder / f"{os.environ['RANK']}.pt"
    torch.save(state, path)
    saved, copied = torch.load(path, weights_only=False), copy.deepcopy(state)
    for key, value in state.items():
        assert torch.equal(full(saved[key]), full(value)) and torch.equal(full(copied[key]), full(value)), key
    assert path.stat().st_size < 3 * sum(p.to_local().nbytes for p in state.values() if hasattr(p, "to_local")) + 20_000
    return records


def test_it_trains_as_alone(tmp_path: Path) -> None:
    alone = {name: fit("auto", build, **options)[0] for name, (build, _, options) in WORKS.items()}
    for records in run_ranks(_works, 2, tmp_path):
        for name, record in records.items():
            assert_same_training(record, alone[name], params=True)


def hooked() -> Mlp:
    module = Small()
    module.head.weight.register_hook(lambda gradient: gradient * 0)
    return module


class Elsewhere(Small):
    """A parameter that nothing but a function holds on to."""

    def __init__(self) -> None:
        super().__init__()
        self.last = functools.partial(F.linear, weight=self.head.weight)
        self.kept = nn.ParameterList([self.head.weight])
        del self.head.weight

    def logits(self, tokens: Tensor) -> Tensor:
        return self.last(self.embed(tokens))


class CopiedLater(Small):
    """Makes a teacher of itself when it is sharded already."""

    def on_train_start(self) -> None:
        self.teacher = copy.deepcopy(self.head)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.teacher(self.embed(batch)).square().mean()


@pytest.mark.parametrize(
    ("build", "settings", "error", "message"),
    [
        (hooked, {}, ValueError, "'head.weight' has a hook.*on_before_optimizer_step"),
        (Elsewhere, {}, UnsupportedStepError, r"shape \(61, 13\) that no module.*self.layer.weight"),
        (Adversarial, {"stage": 1}, UnsupportedStepError, "autograd.grad.*reduce='every'"),
        (CopiedLater, {}, UnsupportedStepError, "deepcopy.*`setup` or before"),
    ],
)
def test_what_would_train_silently_wrong_is_refused(
    build: Callable[[], Mlp], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        fit(ours(**settings), build)


def test_gradients_of_inputs_where_nothing_is_trained() -> None:
    slopes = []
    for strategy in ("auto", ours(stage=1)):
        torch.manual_seed(3)
        (metrics,) = trainer_of(strategy).test(Energy(), DataLoader(Tokens(2, 4, 0, 1), batch_size=4), verbose=False)
        slopes.append(metrics["slope"])
    assert slopes[1] == pytest.approx(slopes[0], rel=1e-5)


def test_a_backward_pass_may_name_all_parameters_and_no_others() -> None:
    class Names(Small):
        chosen = "parameters"

        def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
            loss = super().training_step(batch, batch_idx)
            inputs = [p for p in getattr(self, self.chosen)() if p.requires_grad]
            self.manual_backward(loss, inputs=inputs)
            self.optimizers().step()
            self.optimizers().zero_grad()
            return {"loss": loss.detach()}

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def some(self) -> Any:
            return self.head.parameters()

    class NamesSome(Names):
        chosen = "some"

    (_, expected), (_, actual) = fit("auto", Names), fit(ours(), Names)
    for (name, parameter), other in zip(actual.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(full(parameter), full(other), rtol=1e-5, atol=1e-6, msg=name)
    with pytest.raises(MisconfigurationException, match="names 2 tensors, and not all.*toggle_optimizer"):
        fit(ours(), NamesSome)


def test_modules_are_built_where_they_are_under_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepCompileStrategy, "root_device", torch.device("meta"))
    with ours().tensor_init_context():
        assert torch.empty(1).device.type == "cpu", "the whole model need not fit on one GPU"
