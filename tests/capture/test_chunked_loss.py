"""Losses in pieces: equal to whole ones, without whole logits; what needs its logits whole keeps them, and is told."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_close, assert_same_training
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from training_in_pieces import equal_runs, ragged_runs

from lightning_deepcompile.capture.chunked_loss import chunk_losses
from lightning_deepcompile.plan.tracing import Tracing

CLASSES, WIDTH = 64, 8


class Head(nn.Module):
    """An embedding, a head, and a loss of its logits, tokens and a factor that is learned."""

    def __init__(self, loss: Callable[..., Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.zeros(()))
        self.loss = loss
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls.add_(1)  # nothing reads what it returns
        hidden = torch.vmap(lambda row: row + 1)(self.embed(tokens))
        return self.loss(self.head(hidden), tokens, self.scale)


# Losses that are taken apart ------------------------------------------------------------------------------------------


def plain(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def shifted(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    """The loss of earlier versions of Transformers."""
    logits = logits.float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), tokens[..., 1:].contiguous().view(-1))


def padded(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    """The loss of recent versions of Transformers, by the number of items."""
    labels = F.pad(tokens, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1), reduction="sum") / (labels > 5).sum()


def capped(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    """A scale that is learned, a soft cap, ignored classes, label smoothing, weights of classes, and a z-loss."""
    logits = 30 * torch.tanh(logits * scale / 30)
    logits = logits.view(-1, CLASSES)
    weight = torch.arange(1.0, CLASSES + 1)
    ce = F.cross_entropy(logits, tokens.view(-1), weight=weight, ignore_index=3, label_smoothing=0.1)
    return ce + 1e-2 * logits.logsumexp(-1).pow(2).mean()


def swapped(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    return 2 * F.cross_entropy(logits.transpose(1, 2), tokens)


def masked(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    mask = (tokens > 5).float()
    return (F.cross_entropy(logits.permute(0, 2, 1), tokens, reduction="none") * mask).sum() / mask.sum()


def log_likelihood(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(2, dtype=torch.float64).reshape(-1, CLASSES), tokens.reshape(-1)) - scale * 0.1


def probabilities(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    wanted = 0.5 * F.one_hot(tokens, CLASSES).to(logits.dtype) + 0.5 / CLASSES
    return F.cross_entropy(logits.view(-1, CLASSES), wanted.view(-1, CLASSES))


def square(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    """One column: as many rows of tokens as of logits."""
    return F.cross_entropy(logits[:, :1].transpose(1, 2), tokens[:, :1])


TAKEN = [plain, shifted, padded, capped, swapped, masked, log_likelihood, probabilities, square]


def _run(loss: Callable[..., Any], dtype: torch.dtype = torch.float32, dynamic: bool | None = None) -> tuple[int, int]:
    """Compares with the loss as it is; returns how many losses were taken apart, and the most elements of a tensor."""
    replaced, largest = [], [0]

    def compiler(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        values = [n.meta.get("val") for n in gm.graph.nodes]
        sizes = [v.shape[0] * v.shape[1] for v in values if isinstance(v, Tensor) and v.dim() == 2]
        largest.append(max((s for s in sizes if isinstance(s, int)), default=0))
        return gm

    def backend(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        replaced.append(chunk_losses(gm, 3))
        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(gm, inputs)

    torch._dynamo.reset()
    whole = Head(loss, dtype)
    pieces = copy.deepcopy(whole)
    compiled = torch.compile(pieces, backend=backend, dynamic=dynamic)
    for rows in (7, 5) if dynamic else (7,):
        tokens = torch.randint(0, CLASSES, (rows, 11), generator=torch.Generator().manual_seed(rows))
        expected, actual = whole(tokens), compiled(tokens)
        for name, one, other in [("loss", actual, expected)] if isinstance(actual, Tensor) else []:
            assert_close(one, other, name, rtol=1e-6)
            other.backward()
            one.backward()
        with torch.no_grad():
            assert torch.allclose(
                compiled(tokens)[:1] if not isinstance(actual, Tensor) else compiled(tokens), expected
            )
    assert pieces.calls == whole.calls + (2 if dynamic else 1), "once more, for evaluation"
    for (name, one), other in zip(pieces.named_parameters(), whole.parameters(), strict=True):
        assert_close(one.grad, other.grad, name)
    return replaced[0], max(largest)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize(
    ("loss", "dynamic"),
    [
        *((loss, None) for loss in TAKEN),
        *(pytest.param(loss, True, marks=[] if loss is padded else pytest.mark.extensive) for loss in TAKEN),
    ],
)
def test_a_loss_in_pieces_is_the_whole_loss(loss: Callable[..., Any], dynamic: bool | None) -> None:
    replaced, largest = _run(loss, dynamic=dynamic)
    assert replaced == 1
    if loss is not probabilities:  # its targets are as large as logits
        assert largest <= max(CLASSES * WIDTH, 26 * CLASSES), "a third of 77 rows of logits"


# Losses that are left whole -------------------------------------------------------------------------------------------


def accuracy(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    return plain(logits, tokens, scale) * (1 + (logits.argmax(-1) == tokens).float().mean())


def two_results(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    return plain(logits, tokens, scale).exp() + logits.flatten(0, 1).logsumexp(-1).mean().exp()


def other_rows(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    return shifted(logits, tokens, scale) + logits.logsumexp(-1).mean()


def outer(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    """Losses of every row with those of every other."""
    losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    return (losses.view(-1, 1) * losses).mean()


def written(logits: Tensor, tokens: Tensor, scale: Tensor) -> Tensor:
    tokens = tokens.clone()
    rows = logits.flatten(0, 1)
    tokens.clamp_(max=5)
    return F.cross_entropy(rows, tokens.flatten())


LEFT = {
    accuracy: "`argmax`",
    two_results: "several sums",
    other_rows: "other rows",
    outer: "`mul`",
    written: "`clamp_`",
}


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize(("loss", "words"), LEFT.items())
def test_a_loss_that_needs_its_logits_is_left(
    loss: Callable[..., Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lightning_deepcompile"):
        assert _run(loss)[0] == 0
    (said,) = {record.getMessage() for record in caplog.records if "is not chunked" in record.getMessage()}
    assert words in said, said


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_layers_without_a_loss_are_left_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_deepcompile"):
        assert _run(lambda logits, tokens, scale: logits.relu().mean() + scale)[0] == 0
    assert not [record for record in caplog.records if "is not chunked" in record.getMessage()]


# Training -------------------------------------------------------------------------------------------------------------

PIECES = 5
# Case, what compiles regions, micro-batches a step, ZeRO stage.
RUNS = [("llama", "inductor", 1, 3), ("gpt_tied", "eager", 3, 3)]
if "TEST_ALL" in os.environ:
    RUNS += [("mlp", "eager", 2, 1), ("frozen", "eager", 1, 3)]


def _check(accelerator: str) -> None:
    for run, summary, programs in equal_runs(RUNS, accelerator, Tracing(chunked_losses=PIECES)):
        assert summary.chunked_losses >= 1, run
        if run[0] == "llama":
            forward, backward = programs["frame0.forward"], programs["frame0.backward"]
            gathers = [line for line in forward.splitlines() if line.startswith("  gather ") and "lm_head" in line]
            regions = re.findall(r"compute  region_\d+ = (r\d+) \([^;]*lm_head;", forward)
            assert len(gathers) == 1 and len(regions) == PIECES and len(set(regions)) < PIECES, forward
            # The weight's gradient is there when forward ends: backward reads the norm alone.
            gather = backward.splitlines()[1]
            assert gather.startswith("  gather   net.model.norm+net.lm_head (1 param, 64 B"), backward


@pytest.mark.timeout(400)
def test_training_is_that_of_one_process() -> None:
    _check("cpu")


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_training_is_that_of_one_gpu() -> None:
    _check("gpu")


@pytest.mark.extensive
def test_every_rank_may_have_its_own_number_of_tokens() -> None:
    for whole, pieces in ragged_runs(Tracing(), Tracing(chunked_losses=3)):
        assert_same_training(pieces, whole, params=True)
        assert [record.extra[0].chunked_losses > 0 for record in (whole, pieces)] == [False, True]
