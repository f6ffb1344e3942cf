"""Equal blocks are traced once, and nobody can tell from the results."""

from __future__ import annotations

import enum
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from gpt import GPT
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_deepcompile import CompileConfig
from lightning_deepcompile.capture.inlining import computed_with
from lightning_deepcompile.engine.engine import Engine

WIDTH, LAYERS = 8, 4
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Layer(nn.Module):
    """A block with a nested module, a constant, and a residual."""

    def __init__(self, scale: float = 0.5, *, dropout: float = 0.0, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.scale, self.dropout = norm(WIDTH), scale, dropout
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        y = self.inner(self.norm(x) * side) + self.bias
        return x + self.scale * F.dropout(y, self.dropout, self.training)


class Net(nn.Module):
    """Layers that share an input with no gradient, and one with."""

    def __init__(self, make: Callable[[int], nn.Module] = lambda index: Layer(), *, frozen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make(index) for index in range(LAYERS))
        for parameter in itertools.chain.from_iterable(layer.parameters() for layer in self.layers[:frozen]):
            parameter.requires_grad_(False)

    def call(self, layer: nn.Module, x: Tensor, side: Tensor) -> Tensor:
        return layer(x, side)

    def training_step(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        side = x.sigmoid()
        for layer in self.layers:
            x = self.call(layer, x, side)
        return x.square().mean()

    def validation_step(self, x: Tensor) -> Tensor:
        return self.training_step(x)


class Checkpointed(Net):
    """The same with activation checkpointing."""

    def call(self, layer: nn.Module, x: Tensor, side: Tensor) -> Tensor:
        return checkpoint(layer, x, side, use_reentrant=False)


class Autocast(Net):
    """The same under an autocast of its own, which a block by itself would not see."""

    def training_step(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().training_step(x)


def _gpt() -> nn.Module:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = GPT(layers=LAYERS, width=16, heads=2, vocabulary=32)

        def training_step(self, x: Tensor) -> Tensor:
            tokens = (x.abs() * 31).long().clamp(max=31)[:, :, 0]
            return F.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())

    return Step()


class Kind(enum.Enum):
    """Its members mean the same number."""

    HALF, ALSO_HALF = 0.5, (0.5,)

    @property
    def number(self) -> float:
        return 0.5


class Limit(NamedTuple):
    most: float


@dataclass(frozen=True)
class Options:
    kind: Kind
    limit: Limit


@torch.compiler.allow_in_graph
class Limited(torch.autograd.Function):
    """A product that Dynamo leaves to AOTAutograd, with options that are no numbers, as in torchao's FP8 layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: Options, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = options
        return (x @ weight.t()).clamp(max=options.limit.most) * options.kind.number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = gradient * ctx.options.kind.number
        return gradient @ weight, None, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


@torch.compiler.allow_in_graph
class LimitedLess(Limited):
    """Another class."""


class WithOptions(nn.Module):
    def __init__(self, options: Options, function: type[Limited] = Limited) -> None:
        super().__init__()
        self.options, self.function = options, function
        self.weight, self.inner = nn.Parameter(torch.randn(WIDTH, WIDTH)), Layer()

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return x + self.inner(self.function.apply(x, self.options, self.weight), side)


def _with_options(last: Options, function: type[Limited] = Limited) -> Net:
    """Layers of which the last one may differ."""
    options = [Options(Kind.HALF, Limit(2.0)) for _ in range(LAYERS - 1)]
    functions = [Limited] * (LAYERS - 1)
    return Net(lambda index: WithOptions([*options, last][index], [*functions, function][index]))


def _fp8(kind: type[Net] = Net) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    net = kind()
    convert_to_float8_training(net.layers, config=config)
    return net


# What is built, and how many of its blocks share a trace.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "equal": (Net, LAYERS),
    "gpt": (_gpt, LAYERS),
    "checkpointed": (Checkpointed, LAYERS),
    "autocast in the step": (Autocast, 0),
    "one frozen": (lambda: Net(frozen=1), LAYERS - 1),
    "one constant differs": (lambda: Net(lambda index: Layer(0.5 + (index == 2))), LAYERS - 1),
    "zeros of two signs": (lambda: Net(lambda index: Layer(-0.0 if index < 2 else 0.0)), 0),
    "options": (lambda: _with_options(Options(Kind.HALF, Limit(2.0))), LAYERS),
    "a number in the options differs": (lambda: _with_options(Options(Kind.HALF, Limit(0.1))), LAYERS - 1),
    "a name in the options differs": (lambda: _with_options(Options(Kind.ALSO_HALF, Limit(2.0))), LAYERS - 1),
    "another function": (lambda: _with_options(Options(Kind.HALF, Limit(2.0)), LimitedLess), LAYERS - 1),
    "FP8": (_fp8, LAYERS),
    "FP8, checkpointed": (lambda: _fp8(Checkpointed), LAYERS),
    "random": (lambda: Net(lambda index: Layer(dropout=0.5)), 0),
    "in place": (lambda: Net(lambda index: _InPlace()), 0),
    "buffers": (lambda: Net(lambda index: Layer(norm=_BatchNorm)), 0),
}


class _InPlace(Layer):
    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        x += self.inner(self.norm(side)) + self.bias
        return x


class _BatchNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


def _steps(engine: Engine, batches: list[Tensor]) -> list[Tensor]:
    """Losses and gradients of accumulated passes."""
    results = []
    for batch in batches:
        torch.manual_seed(1)
        loss = engine.run_step("training_step", batch)
        engine.backward(loss.backward)
        results += [loss.detach(), *(p.grad.to_local().clone() for p in engine.module.parameters() if p.requires_grad)]
    return results


def _batches(*lengths: int) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(2, length, WIDTH) for length in lengths]


def _engine(model: nn.Module, mesh: DeviceMesh, once: bool) -> Engine:
    engine = Engine(model.train(), mesh, CompileConfig(region_backend="eager"))
    engine.capture.traces_once = once
    return engine


SIMILAR = {"gpt", "zeros of two signs", "options", "a name in the options differs", "another function"}  # to others
SIMILAR |= {"FP8, checkpointed", "in place"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extensive] if name in SIMILAR else []) for name in MODELS]
)
def test_results_are_the_same_to_the_last_bit(name: str, mesh: DeviceMesh) -> None:
    make, shared = MODELS[name]
    _assert_equal(make, shared, mesh, (4, 4, 6, 7) if "TEST_ALL" in os.environ or name == "checkpointed" else (4, 4))


def test_why_equal_blocks_are_traced_one_by_one_is_said(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lightning_deepcompile.capture.templates")
    _steps(_engine(MODELS["random"][0](), mesh, True), _batches(4))
    assert f"{LAYERS} equal blocks are traced one by one: it draws random numbers" in caplog.text


def test_low_precision_around_the_step(mesh: DeviceMesh) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _assert_equal(_gpt, LAYERS, mesh)


def _assert_equal(
    make: Callable[[], nn.Module], shared: int, mesh: DeviceMesh, lengths: Sequence[int] = (4, 4)
) -> None:
    """Compares each step with blocks traced one by one; the second length is traced with a symbol."""
    once, plain = _engine(make(), mesh, True), _engine(make(), mesh, False)
    for batch, traces in zip(_batches(*lengths), (1, 1, 2, 2), strict=False):
        for ours, expected in zip(_steps(once, [batch]), _steps(plain, [batch]), strict=True):
            assert torch.equal(ours, expected)
        assert (once.capture.blocks, plain.capture.blocks) == (traces * shared, 0)
    assert once.capture.saved_parameters == 0


def test_each_block_gathers_and_reduces_its_own_parameters(mesh: DeviceMesh) -> None:
    engine = _engine(Net(), mesh, True)
    _steps(engine, _batches(4))
    for text in engine.programs().values():
        gathers = "".join(line for line in text.splitlines() if line.startswith("  gather"))
        assert all(f"layers.{index} " in gathers for index in range(LAYERS))
    summary = engine.summary()
    assert summary.reductions_per_step == len(list(engine.module.parameters()))
    assert summary.regions_compiled < summary.regions_total


def test_evaluation_and_symbolic_lengths(mesh: DeviceMesh) -> None:
    engine, plain = _engine(Net(), mesh, True), _engine(Net(), mesh, False)
    for length in (4, 6, 7):  # the second length is traced with a symbol
        (batch,) = _batches(length)
        with torch.no_grad():
            assert torch.equal(engine.run_step("validation_step", batch), plain.run_step("validation_step", batch))
    assert engine.capture.blocks == 2 * LAYERS


@pytest.mark.parametrize("kind", [Net, Checkpointed])
def test_another_model_of_the_same_class(kind: type[Net], mesh: DeviceMesh) -> None:
    """Dynamo makes integers inputs that differ from those it has seen: the parameters' numbers must not be."""
    engines = [_engine(kind(), mesh, True) for _ in range(3)]
    first, *others = [_steps(engine, _batches(4)) for engine in engines]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert [engine.capture.blocks for engine in engines] == [LAYERS] * 3


def test_blocks_do_not_share_memory_in_what_inductor_sees(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it takes a copy from one block to the next for a copy of a tensor to itself, and drops it."""
    from lightning_deepcompile.capture import backend

    graphs: list[fx.GraphModule] = []
    inline = backend.inline_blocks

    def record(gm: fx.GraphModule, instances: Any) -> None:
        inline(gm, instances)
        graphs.append(gm)

    monkeypatch.setattr(backend, "inline_blocks", record)
    _steps(_engine(Net(), mesh, True), _batches(4))
    for gm in graphs:
        values = {n: n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor)}
        products = [n for n in values if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)]
        assert len(products) >= 2 * LAYERS
        for product in products:
            sharing = [n for n, value in values.items() if torch._C._is_alias_of(value, values[product])]
            assert product in sharing and all(product in _ancestors(node) for node in sharing if node is not product)


def test_what_backward_computes_with_is_known_before_blocks_are_inlined(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOTAutograd has the graphs by then, and forward is compiled before backward."""
    from lightning_deepcompile.capture import backend

    found: list[set[str]] = []
    inline = backend.inline_blocks

    def compare(gm: fx.GraphModule, instances: Any) -> None:
        before = computed_with(gm, instances)
        inline(gm, instances)
        found.append(before)
        assert before == computed_with(gm, ())

    monkeypatch.setattr(backend, "inline_blocks", compare)
    _steps(_engine(Net(), mesh, True), _batches(4))
    assert len(found) == 2 and all(found)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                pending.append(source)
    return found
