"""Feed-forward layers in pieces: equal to whole ones, and nothing wide exists whole; what needs it whole keeps it."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_close, assert_same_training
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training_in_pieces import equal_runs, ragged_runs

from lightning_deepcompile.capture.chunked_mlp import chunk_mlps
from lightning_deepcompile.plan.tracing import Tracing

WIDTH, WIDE, ROWS = 8, 40, 7 * 11
LAYERS = 2


class Layer(nn.Module):
    """Linear layers and vectors that a function computes with, as a block behind a norm."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.function = nn.LayerNorm(WIDTH), function
        self.up, self.gate, self.down = (
            nn.Linear(WIDTH, WIDE),
            nn.Linear(WIDTH, WIDE, bias=False),
            nn.Linear(WIDE, WIDTH),
        )
        self.both = nn.Linear(WIDTH, 2 * WIDE)
        self.low, self.high = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDE, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDE))
        self.inner = nn.LayerNorm(WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self, self.norm(x))


class Net(nn.Module):
    def __init__(self, function: Callable[..., Tensor], checkpointing: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.checkpointing = nn.ModuleList(Layer(function) for _ in range(LAYERS)), checkpointing
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.head(x).square().mean()


# Layers that are taken apart ------------------------------------------------------------------------------------------


def plain(self: Layer, x: Tensor) -> Tensor:
    return self.down(F.gelu(self.up(x), approximate="tanh"))


def gated(self: Layer, x: Tensor) -> Tensor:
    return self.down(F.silu(self.gate(x)) * self.up(x))


def in_one_product(self: Layer, x: Tensor) -> Tensor:
    gate, up = self.both(x).chunk(2, dim=-1)
    return self.down(up * F.silu(gate))


def interleaved(self: Layer, x: Tensor) -> Tensor:
    both = self.both(x)
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(min=-7.0, max=7.0)
    return self.down((up + 1) * (gate * torch.sigmoid(1.702 * gate)))


def adapted(self: Layer, x: Tensor) -> Tensor:
    """A layer with a low-rank addition, as LoRA's, and without dropout."""
    wide = self.up(x) + 0.5 * self.high(self.low(F.dropout(x, 0.3, training=False)))
    return self.down(F.relu(wide, inplace=True))


def normed(self: Layer, x: Tensor) -> Tensor:
    wide = self.inner(self.up(x)) * self.scale
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return self.down(wide.relu().square())


def beside_something(self: Layer, x: Tensor) -> Tensor:
    """Its input is read by others, too, and what follows is added to that."""
    return x.flip(0) + F.layer_norm(gated(self, x) + x, (WIDTH,))


def flattened(self: Layer, x: Tensor) -> Tensor:
    return plain(self, x.view(-1, WIDTH)).view_as(x)


TAKEN = [plain, gated, in_one_product, interleaved, adapted, normed, beside_something, flattened]


def _run(
    function: Callable[..., Tensor], *, dynamic: bool | None = None, checkpointing: bool = False, casts: bool = False
) -> tuple[int, int]:
    """Compares with the layers as they are; returns how many were taken apart, and the most rows of a wide tensor."""
    replaced, tallest = [], [0]

    def compiler(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        values = [v for n in gm.graph.nodes if isinstance(v := n.meta.get("val"), Tensor) and v.dim() > 1]
        wide = [v.numel() // v.shape[-1] for v in values if v.shape[-1] in (WIDE, 2 * WIDE) and v.shape[0] != WIDTH]
        tallest.extend(rows for rows in wide if isinstance(rows, int))
        return gm

    def backend(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        seen = chunk_mlps(gm, 0)
        replaced.append(chunk_mlps(gm, 3))
        assert seen == replaced[-1] and (replaced[-1] == 0 or chunk_mlps(gm, 3) == 0), "what is in pieces is left"
        cut = min_cut_rematerialization_partition
        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=cut)(gm, inputs)

    torch._dynamo.reset()
    whole = Net(function, checkpointing)
    pieces = copy.deepcopy(whole)
    compiled = torch.compile(pieces, backend=backend, dynamic=dynamic)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        for rows in (7, 5) if dynamic else (7,):
            x = torch.randn(rows, 11, WIDTH, generator=torch.Generator().manual_seed(rows))
            x.requires_grad_(rows == 7)
            given, other = x.detach().clone().requires_grad_(x.requires_grad), x
            expected, actual = whole(other), compiled(given)
            expected.backward()
            actual.backward()
            tolerance = 2e-2 if casts else 1e-5  # a weight's gradient is rounded to bfloat16 in every piece
            assert_close(actual.detach(), expected.detach(), "loss", rtol=tolerance)
            if x.requires_grad:
                assert_close(given.grad, other.grad, "input", rtol=tolerance)
            with torch.no_grad():
                assert_close(compiled(x), expected.detach(), "evaluation", rtol=tolerance)
    for (name, one), other in zip(pieces.named_parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert_close(one.grad, other.grad, name, rtol=tolerance)
    return replaced[0], max(tallest)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize(
    ("function", "checkpointing"),
    [
        *((function, False) for function in TAKEN),
        *(pytest.param(function, True, marks=[] if function is gated else pytest.mark.extensive) for function in TAKEN),
    ],
)
def test_a_layer_in_pieces_is_the_whole_layer(function: Callable[..., Tensor], checkpointing: bool) -> None:
    replaced, tallest = _run(function, checkpointing=checkpointing)
    assert replaced == LAYERS and tallest <= -(-ROWS // 3), "a third of the rows"


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_automatic_casts_and_changing_shapes() -> None:
    assert _run(gated, casts=True, checkpointing=True) == (LAYERS, 26)
    assert _run(gated, dynamic=True)[0] == LAYERS


# Layers that are left whole -------------------------------------------------------------------------------------------


def dropping(self: Layer, x: Tensor) -> Tensor:
    return self.down(F.dropout(self.up(x).relu(), 0.0001))


def across_rows(self: Layer, x: Tensor) -> Tensor:
    return self.down(self.up(x).softmax(1))


def of_other_rows(self: Layer, x: Tensor) -> Tensor:
    return self.down(F.silu(self.gate(x)) * self.up(x).flip(0))


def used_twice(self: Layer, x: Tensor) -> Tensor:
    wide = self.up(x).relu()
    return self.down(wide) * wide.mean()


def narrow(self: Layer, x: Tensor) -> Tensor:
    return self.high(self.low(x).relu())[..., :WIDTH].flip(-1)


def written(self: Layer, x: Tensor) -> Tensor:
    scratch = x.detach().clone()
    wide = self.up(x)
    scratch.mul_(2)
    return self.down(wide.relu()) + scratch


LEFT = [dropping, across_rows, of_other_rows, used_twice, narrow, written]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("function", LEFT)
def test_what_is_needed_whole_is_left(function: Callable[..., Tensor], caplog: pytest.LogCaptureFixture) -> None:
    if function is dropping:
        torch._dynamo.reset()
        found = []
        net = Net(function, False)
        torch.compile(net, backend=lambda gm, inputs: found.append(chunk_mlps(gm, 3)) or gm)(torch.randn(7, 11, WIDTH))
        assert found == [0]
        return
    with caplog.at_level(logging.INFO, "lightning_deepcompile"):
        assert _run(function)[0] == 0
    assert ["`mul_`" in text for text in caplog.messages] == [True] * len(caplog.messages)
    assert bool(caplog.messages) == (function is written)


# Training -------------------------------------------------------------------------------------------------------------

PIECES = 4
# Case, what compiles regions, micro-batches a step, ZeRO stage.
RUNS = [("llama", "inductor", 1, 3), ("mlp", "eager", 2, 1)]
if "TEST_ALL" in os.environ:
    RUNS += [("frozen", "eager", 1, 3), ("llama_checkpointing", "inductor", 2, 3)]


def _check(accelerator: str) -> None:
    for run, summary, programs in equal_runs(RUNS, accelerator, Tracing(chunked_mlps=PIECES)):
        assert summary.chunked_mlps >= 1, run
        if run[0].startswith("llama"):
            _check_llama(summary.chunked_mlps, programs["frame0.forward"], programs["frame0.backward"])


def _check_llama(layers: int, forward: str, backward: str) -> None:
    assert layers == 3
    for program in (forward, backward):
        compiled = Counter(re.findall(r"compute  region_\d+ = (r\d+) ", program))
        # The first and the last piece of a layer have neighbours; those between are compiled once for all layers.
        assert compiled.most_common(1)[0][1] == layers * (PIECES - 2), program


@pytest.mark.timeout(400)
def test_training_is_that_of_one_process() -> None:
    _check("cpu")


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_training_is_that_of_one_gpu() -> None:
    _check("gpu")


@pytest.mark.extensive
def test_every_rank_may_have_its_own_number_of_tokens() -> None:
    for whole, pieces in ragged_runs(Tracing(), Tracing(chunked_mlps=3)):
        assert_same_training(pieces, whole, params=True)
        assert [record.extra[0].chunked_mlps > 0 for record in (whole, pieces)] == [False, True]
