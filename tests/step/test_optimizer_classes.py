"""Optimizers of PyTorch and of other packages, unmodified: each trains as one process does with it.

In fp64, where norms, roots and quotients do not amplify what sums in another order differ by. With ``-s``, the table of
ways, bytes and memory is printed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import VOCAB, Base, Record, Tokens, assert_close, train
from multiprocess import run_ranks
from optimizers import GlobalClip, Lars, Lion, MuonWithAuxAdam, Sam
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.step.optimizers import state_bytes


class Sentences(Tokens):
    """Sentences of enough words for gradients of full rank: roots of other matrices are not determined."""

    def __init__(self, batches: int, global_rows: int, rank: int, world_size: int) -> None:
        data = torch.randint(0, VOCAB, (batches, global_rows, 61), generator=torch.Generator().manual_seed(7))
        self.data = data.chunk(world_size, dim=1)[rank].flatten(0, 1)


class Layered(Base):
    """Matrices that 8-bit states divide into blocks, and that 2, 3 and 6 ranks share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(72, 96)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(96, 48), nn.Tanh(), nn.Linear(48, 96)) for _ in range(2))
        self.head = nn.Linear(96, 72)

    def logits(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.layers.parameters() if p.dim() == 2]

    def others(self) -> list[nn.Parameter]:
        chosen = set(self.matrices())
        return [p for p in self.parameters() if p not in chosen]


class TwoOptimizers(Layered):
    """Muon for matrices, beside AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        logits = self.logits(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        return [torch.optim.Muon(self.matrices(), lr=0.01), torch.optim.AdamW(self.others(), lr=1e-3)]


def other(name: str, **settings: Any) -> Callable[[Layered], Any]:
    def make(module: Layered) -> Any:
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)(module.parameters(), **settings)

    return make


def prodigy(module: Layered) -> Any:
    from prodigyopt import Prodigy

    return Prodigy(module.parameters(), lr=1.0, d0=1e-3)


def transformers_adafactor(module: Layered) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(module.parameters())


def torchao(name: str, **settings: Any) -> Callable[[Layered], Any]:
    def make(module: Layered) -> Any:
        import torchao.optim

        return getattr(torchao.optim, name)(module.parameters(), **settings)

    return make


@dataclass(frozen=True)
class Case:
    """A class.

    Args:
        make: Makes the optimizer of a module; None: the module does.
        ways: How its groups are to step.
        precision: Of the training.
        exact: Whether it computes the same in every run: no random numbers.
        quick: Whether it belongs to the default suite.
    """

    make: Callable[[Layered], Any] | None
    ways: str
    precision: str = "64-true"
    exact: bool = True
    quick: bool = False


MIXED = "on owner ranks, on shards"
CASES = {
    "torch.optim.Muon, AdamW": Case(None, MIXED),
    "MuonWithAuxAdam": Case(
        lambda m: MuonWithAuxAdam(
            [{"params": m.matrices(), "use_muon": True}, {"params": m.others(), "use_muon": False}]
        ),
        MIXED,
        quick=True,
    ),
    "torch.optim.Adafactor": Case(lambda m: torch.optim.Adafactor(m.parameters()), "on owner ranks", quick=True),
    "transformers' Adafactor": Case(transformers_adafactor, "on owner ranks"),
    "Lamb": Case(other("Lamb"), "on owner ranks"),
    "LARS": Case(other("LARS"), "on owner ranks"),
    "one's own LARS": Case(lambda m: Lars(m.parameters()), "on owner ranks"),
    "Shampoo": Case(other("Shampoo"), "on owner ranks"),
    "SOAP": Case(other("SOAP", max_precondition_dim=60), "on owner ranks"),
    "NovoGrad": Case(other("NovoGrad"), "on owner ranks"),
    "CAME": Case(other("CAME"), "on owner ranks"),
    "AdamP": Case(other("AdamP"), "on owner ranks"),
    "Prodigy": Case(prodigy, "on owner ranks", quick=True),
    "SAM": Case(lambda m: Sam(m.parameters(), lr=0.1, momentum=0.9), "as DTensors"),
    "clipping in the step": Case(lambda m: GlobalClip(m.parameters()), "as DTensors"),
    "Lion": Case(other("Lion"), "on shards", quick=True),
    "one's own Lion": Case(lambda m: Lion(m.parameters()), "on shards"),
    "AdEMAMix": Case(other("AdEMAMix"), "on shards"),
    "AdamW8bit": Case(torchao("AdamW8bit"), "on owner ranks", precision="32-true"),
    "AdamW4bit": Case(torchao("AdamW4bit"), "on owner ranks", precision="32-true"),
    "_AdamW, stochastic rounding": Case(
        torchao("_AdamW", bf16_stochastic_round=True), "on shards", precision="bf16-true", exact=False
    ),
}


QUANTISED = {"AdamW8bit": 0.4, "AdamW4bit": 0.2}
"""States as part of those in fp32, with biases, which are not quantised, and scales."""


def build(name: str) -> Callable[[], Layered]:
    make = CASES[name].make
    if make is None:
        return TwoOptimizers

    class Own(Layered):
        def configure_optimizers(self) -> Any:
            return make(self)

    return Own


def figures(trainer: Any) -> dict[str, Any]:
    engine = trainer.strategy.engine
    shards = [engine.local_shards(optimizer) for optimizer in trainer.optimizers]
    ways = dict.fromkeys(way.value for one in shards for way in one.ways.ways())
    return {
        "ways": ", ".join(ways),
        "sent": sum(one.owner_step.sent for one in shards if one.owner_step is not None),
        "predicted": engine.timeline.leaving.states,
        "states": sum(state_bytes(optimizer, engine.device) for optimizer in trainer.optimizers),
        "summary": str(engine.summary()),
    }


Mesh = tuple[int, int] | None


def train_all(names: list[str], stage: int, world_size: int, steps: int, mesh: Mesh) -> dict[str, Record]:
    rank, records = int(os.environ["RANK"]), {}
    for name in names:
        strategy = DeepCompileStrategy(stage=stage, device_mesh=mesh, compile=CompileConfig(region_backend="eager"))
        options = {"precision": CASES[name].precision, "steps": steps, "inspect": figures, "data": Sentences}
        records[name] = train(build(name), strategy, world_size=world_size, rank=rank, **options)
    return records


@functools.cache
def alone(name: str, ranks: int, steps: int) -> Record:
    options = {"precision": CASES[name].precision, "steps": steps, "data_world": ranks, "data": Sentences}
    return train(build(name), "auto", world_size=1, rank=0, **options)


def check_all(names: list[str], stage: int, world_size: int, steps: int, mesh: Mesh = None) -> None:
    results = run_ranks(train_all, world_size, names, stage, world_size, steps, mesh, timeout=90 * len(names))
    for name in names:
        case = CASES[name]
        expected = alone(name, world_size, steps)
        records = [result[name] for result in results]
        extra = [record.extra for record in records]
        sent, states = ([one[key] for one in extra] for key in ("sent", "states"))
        print(f"| {name} | {stage} | {world_size} | {extra[0]['ways']} | {sent} | {states} |")
        if world_size > 1:
            assert extra[0]["ways"] == case.ways, f"{name}: {extra[0]['summary']}"
            for one in extra:
                assert one["predicted"] is None or one["predicted"] == pytest.approx(one["states"], rel=0.02, abs=64), (
                    name
                )
            if name in QUANTISED:
                assert all(one["predicted"] is not None for one in extra)
                elements = sum(value.numel() for value in expected.params.values()) * (mesh[0] if mesh else 1)
                assert sum(states) < QUANTISED[name] * 2 * 4 * elements
            assert "optimizer steps" in extra[0]["summary"]
        for record in records:
            if not case.exact:
                assert torch.tensor(record.losses).isfinite().all()
                continue
            assert_close(torch.tensor(record.losses), torch.tensor(expected.losses), f"losses of {name}")
            for parameter, value in expected.params.items():
                if case.precision == "64-true":
                    assert_close(record.params[parameter], value, f"{name}: {parameter}")


def test_classes_train_as_in_one_process() -> None:
    check_all([name for name, case in CASES.items() if case.quick], stage=3, world_size=2, steps=4)


@pytest.mark.extensive
@pytest.mark.parametrize("stage", [1, 3])
def test_all_classes_on_replicas(stage: int) -> None:
    check_all([*CASES], stage, world_size=4, steps=6, mesh=(2, 2))


@pytest.mark.extensive
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3, 1])
def test_all_classes_at_all_stages(stage: int, world_size: int) -> None:
    check_all([*CASES], stage, world_size, steps=20)
