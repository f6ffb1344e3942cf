"""FP8 layers of torchao: their weights travel as FP8, and train like in one process.

FP8 scales of activations are those of a rank's own rows. So the process that ranks are compared with computes their
batches one after the other, and accumulates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import ROWS, Base, Record, Tokens, assert_close, full, train
from multiprocess import devices, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.capture import backend

EAGER = CompileConfig(region_backend="eager", schedule=None, fallback="error")


def recipe(name: str = "tensorwise", **changes: Any) -> Any:
    from torchao.float8 import Float8LinearConfig

    return replace(Float8LinearConfig.from_recipe_name(name), **{"emulate": True, **changes})


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Fp8(Base):
    """Its layers are converted, with weights whose rows are not divisible by three; its embedding and head are not."""

    recipe_name = "tensorwise"
    changes: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 24), nn.Linear(24, 61)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def configure_model(self) -> None:
        from torchao.float8 import convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        if not any(isinstance(module, Float8Linear) for module in self.modules()):  # Lightning calls it for each loop
            convert_to_float8_training(self.layers, config=recipe(self.recipe_name, **self.changes))

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Rowwise(Fp8):
    recipe_name = "rowwise"


class HighPrecisionGradients(Fp8):
    recipe_name = "rowwise_with_gw_hp"


class Products(Fp8):
    """Products take FP8 numbers, as on GPUs; their inner dimensions are multiples of 16."""

    changes = {"emulate": False, "pad_inner_dim": True}


class ForFsdp(Fp8):
    """Weights are objects that FSDP2 would gather as FP8."""

    changes = {"enable_fsdp_float8_all_gather": True}


class Shrinks(Fp8):
    """Writes to the weights of its last layer, behind the first gathers, in a way that PyTorch does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(Layer() for _ in range(3))

    def on_train_batch_end(self, *args: Any) -> None:
        self.layers[-1].up.weight.to_local().data.mul_(0.5)


class InBoth(Fp8):
    """Reads its weights in FP8, and in bf16."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            up, down = (part.weight.t().bfloat16() for part in (layer.up, layer.down))
            x = layer(x) + F.linear(F.linear(x.bfloat16(), down), up).float()
        return self.head(x)


class RankDependent(Fp8):
    """Ranks run other programs, and so take turns."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers if os.environ["RANK"] == "0" else list(self.layers)[::-1]:
            x = layer(x)
        return self.head(x)


def figures(trainer: Any) -> dict[str, Any]:
    engine = trainer.strategy.engine
    model, capture = engine.model, engine.capture
    blocks = [block for executable in capture.frames.executables for block in executable.program.derived]
    model.derived.refresh(blocks)
    values = {value.id: value for block in blocks for value in block.values}.values()
    return {
        "communicated": dict(engine.timeline.communicated),
        "programs": engine.programs(),
        "summary": str(engine.summary()),
        "narrow": sum(capture.params[value.id].gathered_bytes for value in values if value.is_gathered),
        "wide": sum(capture.params[i].gathered_bytes for i in {value.source for value in values}),
        "scales": {
            model.by_id[value.source].name: model.derived.read(value.id).cpu().clone()
            for value in values
            if not value.is_gathered
        },
    }


def ranks(build: Callable[[], Base], config: CompileConfig, **options: Any) -> Record:
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    names = ("stage", "device_mesh", "activation_checkpointing_policy")
    own = {name: options.pop(name) for name in names if name in options}
    strategy = DeepCompileStrategy(compile=config, **own)
    return train(build, strategy, world_size=world_size, rank=rank, inspect=figures, **options)


def alone(build: Callable[[], Base], world_size: int, **options: Any) -> Record:
    accumulate = options.pop("accumulate", 1)
    return train(build, "auto", world_size=1, rank=0, accumulate=accumulate * world_size, **options)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.extensive), 3])
def test_fp8_trains_as_in_one_process(world_size: int) -> None:
    # The mean of three has other last bits than a sum of thirds: in later steps some weights would be rounded to other
    # FP8 numbers.
    steps = 5 if world_size == 2 else 2
    (ours, *_) = run_ranks(ranks, world_size, Fp8, EAGER, steps=steps)
    assert_same_as_accumulated(ours, alone(Fp8, world_size, steps=steps), world_size)
    assert_scales(ours)


def assert_same_as_accumulated(actual: Record, expected: Record, world_size: int) -> None:
    """Compares a training on ranks with one process that computes a rank's batch at a time."""
    losses = torch.tensor(expected.losses).view(-1, world_size).sum(1)  # each was divided by their number
    assert_close(torch.tensor(actual.losses), losses, "losses")
    for step, (mine, theirs) in enumerate(zip(actual.grads, expected.grads, strict=True)):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            assert_close(mine[name], theirs[name], f"step {step} gradient of {name}")
    for name in expected.params:
        assert_close(actual.params[name], expected.params[name], name)


def assert_scales(record: Record) -> None:
    from torchao.float8.float8_utils import tensor_to_scale

    assert record.extra["scales"]
    for name, scale in record.extra["scales"].items():
        assert scale.equal(tensor_to_scale(record.params[name].t(), torch.float8_e4m3fn)), name


Case = tuple[Callable[[], Base], CompileConfig, dict[str, Any]]
QUICK: dict[str, Case] = {
    "accumulation": (Fp8, EAGER, {"accumulate": 2}),
    "bf16, checkpointing": (Fp8, EAGER, {"precision": "bf16-mixed", "activation_checkpointing_policy": {Layer}}),
}
OTHERS: dict[str, Case] = {
    "in bf16, too": (InBoth, EAGER, {}),
    "turns": (RankDependent, EAGER, {}),
    "rowwise": (Rowwise, EAGER, {}),
    "uncounted writes": (Shrinks, EAGER, {"steps": 4, "accumulate": 2}),
    "products": (Products, EAGER, {"precision": "bf16-mixed"}),
    "stage 1": (Fp8, EAGER, {"accumulate": 2, "stage": 1}),
    "stage 2": (Fp8, EAGER, {"accumulate": 2, "stage": 2}),
    "bf16 weights": (Fp8, EAGER, {"precision": "bf16-true"}),
    "shards in host memory": (Fp8, replace(EAGER, offload="all"), {}),
    "made for FSDP2": (ForFsdp, EAGER, {}),
    "gradients in high precision": (HighPrecisionGradients, EAGER, {}),
    "planned": (Fp8, replace(EAGER, schedule="auto"), {"steps": 12}),
    "AdamW": (Fp8, EAGER, {"optimizer": "adamw", "gradient_clip_val": 0.1}),
}
HYBRID: dict[str, Case] = {"replicas": (Fp8, EAGER, {"device_mesh": (2, 2), "accumulate": 2})}
INDUCTOR = replace(EAGER, region_backend="inductor")
COMPILED: dict[str, Case] = {"products": (Products, INDUCTOR, {"precision": "bf16-mixed"})}
COMPILED_OTHERS: dict[str, Case] = {
    "bf16": (Fp8, INDUCTOR, {"precision": "bf16-mixed"}),
    "fp32": (Fp8, INDUCTOR, {}),
    "rowwise": (Rowwise, INDUCTOR, {}),
}


def both_ways(cases: dict[str, Case]) -> dict[str, tuple[Record, Record]]:
    """Trains with weights that travel as FP8, and with weights that are gathered and then quantised by every rank."""
    derive, results = backend.derive, {}
    for name, (build, config, options) in cases.items():
        backend.derive = derive
        ours = ranks(build, config, **{"steps": 3, **options})
        backend.derive = lambda *args: ()
        results[name] = ours, ranks(build, config, **{"steps": 3, **options})
    return results


@pytest.mark.parametrize(
    "world_size, cases",
    [
        pytest.param(2, QUICK, id="eager"),
        pytest.param(3, OTHERS, id="eager, others", marks=pytest.mark.extensive),
        pytest.param(4, HYBRID, id="hybrid", marks=pytest.mark.extensive),
        pytest.param(2, COMPILED, id="compiled", marks=pytest.mark.extensive),  # as on GPUs
        pytest.param(2, COMPILED_OTHERS, id="compiled, others", marks=pytest.mark.extensive),
    ],
)
def test_weights_that_travel_as_fp8_have_the_same_bits(world_size: int, cases: dict[str, Case]) -> None:
    (first, *_) = run_ranks(both_ways, world_size, cases, timeout=400.0)
    assert_same_bits(first, cases)


def assert_same_bits(first: dict[str, tuple[Record, Record]], cases: dict[str, Case]) -> None:
    """Compares the trainings of `both_ways`, and what they gather."""
    for name, (ours, plain) in first.items():
        assert "derive" not in str(plain.extra["programs"]) and "narrower" not in plain.extra["summary"]
        assert re.search("gathered narrower +(4|10) parameters", ours.extra["summary"]), name
        for text in ours.extra["programs"].values():
            assert "  derive   layers.0 (2 params" in text, name
        assert ours.losses == plain.losses, name
        for mine, theirs in zip(ours.grads, plain.grads, strict=True):
            assert all(mine[key].equal(theirs[key]) for key in theirs), name
        assert all(ours.params[key].equal(plain.params[key]) for key in plain.params), name
    for name in cases.keys() & {"accumulation", "bf16, checkpointing", "bf16"}:
        ours, plain = first[name]
        assert ours.extra["wide"] == ours.extra["narrow"] * (4 if name == "accumulation" else 2)
        micro_batches = cases[name][2].get("accumulate", 1)
        saved = plain.extra["communicated"]["gathered_bytes"] - ours.extra["communicated"]["gathered_bytes"]
        assert saved > 0.95 * 2 * micro_batches * (ours.extra["wide"] - ours.extra["narrow"])
        # One exchange for all weights in each micro-batch.
        gathers = [record.extra["communicated"]["gathers"] for record in (ours, plain)]
        assert gathers[0] == gathers[1] + micro_batches


def save_and_validate(folder: Path) -> Any:
    """Trains, saves a checkpoint, validates, and resumes in a second training."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path = folder / "trained.ckpt"

    def inspect(trainer: Any) -> float:
        batches = Tokens(1, ROWS * world_size, rank, world_size)
        trainer.save_checkpoint(path)
        (metrics,) = trainer.validate(trainer.lightning_module, DataLoader(batches, ROWS), verbose=False)
        programs = trainer.strategy.programs()
        assert any("inference" in name and "  derive   layers.0" in text for name, text in programs.items())
        return float(metrics["val"])

    strategy = DeepCompileStrategy(compile=EAGER)
    first = train(Fp8, strategy, world_size=world_size, rank=rank, steps=2, inspect=inspect)
    trainer = pl.Trainer(
        strategy=DeepCompileStrategy(compile=EAGER), accelerator="cpu", **devices(world_size), max_steps=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    module = Fp8()
    trainer.fit(module, DataLoader(Tokens(1, ROWS * world_size, rank, world_size), ROWS), ckpt_path=path)
    return first, {name: full(parameter) for name, parameter in module.named_parameters()}


def test_checkpoints_have_whole_weights_and_validation_reads_fp8(tmp_path: Path) -> None:
    first, resumed = run_ranks(save_and_validate, 2, tmp_path)[0]
    state = torch.load(tmp_path / "trained.ckpt", weights_only=False)["state_dict"]
    assert state.keys() == first.params.keys()
    assert all(state[name].equal(first.params[name]) and state[name].dtype is torch.float32 for name in state)
    alike = Fp8()
    alike.configure_model()
    alike.load_state_dict(state)
    parts = torch.stack([Tokens(1, 2 * ROWS, 0, 1)[row] for row in range(2 * ROWS)]).split(ROWS)  # of both ranks
    losses = [F.cross_entropy(alike.logits(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) for part in parts]
    mean = torch.stack(losses).mean()
    assert_close(torch.tensor(first.extra), mean.detach(), "loss of validation")
    mean.backward()
    for name, parameter in alike.named_parameters():
        assert_close(resumed[name], parameter.detach() - 0.1 * parameter.grad, name)
