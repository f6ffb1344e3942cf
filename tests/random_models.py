"""Modules at random: layers of odd sizes, branches, double uses, ties, frozen and unused parameters."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["Model", "Spec", "batches", "specs"]

VOCAB, LENGTH, ROWS = 7, 3, 2  # ROWS per rank
SIZES = (1, 2, 3, 5, 6)
STEPS = 2
EPS = 0.1
"""Of norms. Equal rows differ by rounding errors, which a norm divides by the root of this: with PyTorch's defaults, a
few norms in a row make them as large as the numbers that are compared."""

Op = tuple[Any, ...]
"""A kind, a size, and for what is made of others these, in lists."""


@dataclass(frozen=True)
class Spec:
    """A model, as data.

    Args:
        ops: What it computes, one after another.
        seed: Of its parameters and its batches.
        frozen: Numbers of parameters, modulo how many there are.
        ties: Pairs of numbers of weights of linear layers; those of one shape become one.
        unused: Whether it has a layer that it does not call.
        broken: After how many operations its graph breaks.
    """

    ops: tuple[Op, ...]
    seed: int
    frozen: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]
    unused: bool
    broken: int | None


def _linear(width: int, size: int) -> tuple[nn.Module, int]:
    return nn.Linear(width, size, bias=size != 3), size


def _conv(width: int, size: int) -> tuple[nn.Module, int]:
    return nn.Conv1d(width, size, 3, padding=1, padding_mode="circular" if size == 2 else "zeros"), size


def _depthwise(width: int, size: int) -> tuple[nn.Module, int]:
    return nn.Conv1d(width, 2 * width, 2, padding=1, dilation=2, groups=width, bias=size > 2), 2 * width


def _group_norm(width: int, size: int) -> tuple[nn.Module, int]:
    return nn.GroupNorm(next(n for n in (3, 2, 1) if width % n == 0), width, eps=EPS), width


# What makes a layer of the width before and a size, and how it is called, with the tokens of the batch.
LAYERS: dict[str, tuple[Callable[[int, int], tuple[nn.Module, int]], Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "linear": (_linear, lambda m, x, t: m(x)),
    "conv": (_conv, lambda m, x, t: m(x.mT).mT),
    "depthwise": (_depthwise, lambda m, x, t: m(x.mT).mT[:, : x.shape[1]]),
    "layer norm": (lambda w, s: (nn.LayerNorm(w, eps=EPS, bias=s > 2), w), lambda m, x, t: m(x)),
    "rms norm": (lambda w, s: (nn.RMSNorm((LENGTH, w), eps=EPS), w), lambda m, x, t: m(x)),
    "group norm": (_group_norm, lambda m, x, t: m(x.mT).mT),
    "embedding": (lambda w, s: (nn.Embedding(VOCAB, w, padding_idx=s), w), lambda m, x, t: x + m(t)),
    "bag": (lambda w, s: (nn.EmbeddingBag(VOCAB, w), w), lambda m, x, t: x * m(t)[:, None]),
    "gru": (lambda w, s: (nn.GRU(w, s, batch_first=True), s), lambda m, x, t: m(x)[0]),
    "lstm": (lambda w, s: (nn.LSTM(w, s, batch_first=True), s), lambda m, x, t: m(x)[0]),
    "bilinear": (lambda w, s: (nn.Bilinear(w, w, s), s), lambda m, x, t: m(x.contiguous(), x.tanh())),
    "prelu": (lambda w, s: (nn.PReLU(w if s > 2 else 1), w), lambda m, x, t: m(x.mT).mT),
    "attention": (
        lambda w, s: (nn.MultiheadAttention(w, 1, batch_first=True, bias=s > 1), w),
        lambda m, x, t: m(x, x, x, need_weights=False)[0],
    ),
    "scale": (lambda w, s: (nn.ParameterList([torch.tensor(1.1)]), w), lambda m, x, t: x * m[0]),
    "shift": (lambda w, s: (nn.ParameterList([torch.full((1, w), 0.1)]), w), lambda m, x, t: x + m[0]),
    "twice": (lambda w, s: (nn.Linear(w, w), w), lambda m, x, t: m(m(x).tanh())),
    "turned": (lambda w, s: (nn.Linear(w, s), w), lambda m, x, t: F.linear(m(x), m.weight.t())),
    "sliced": (lambda w, s: (nn.Linear(w, 2 * s), s), lambda m, x, t: F.linear(x, m.weight[:s_of(m)], m.bias[::2])),
    "activation": (lambda w, s: (ACTIVATIONS[s](), w), lambda m, x, t: m(x)),
}  # fmt: skip
ACTIVATIONS: dict[int, Callable[[], nn.Module]] = {1: nn.Tanh, 2: nn.GELU, 3: nn.SiLU, 5: nn.Softplus, 6: nn.Identity}
GROUPS = ("residual", "sum", "cat", "checkpointed", "without gradients", "repeated")


def s_of(layer: nn.Linear) -> int:
    return layer.out_features // 2


class Layer(nn.Module):
    """One of `LAYERS`."""

    def __init__(self, kind: str, size: int, width: int) -> None:
        super().__init__()
        make, self.call = LAYERS[kind]
        self.layer, self.width = make(width, size)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.call(self.layer, x, tokens)


class Group(nn.Module):
    """One of `GROUPS`, of chains of operations."""

    def __init__(self, kind: str, chains: tuple[tuple[Op, ...], ...], width: int) -> None:
        super().__init__()
        self.kind = kind
        self.chains = nn.ModuleList(Chain(chain, width) for chain in chains)
        # Brings what is to be added to one width.
        same = kind in ("residual", "sum", "repeated")
        self.fit = nn.ModuleList(nn.Linear(c.width, width) if same and c.width != width else nn.Identity()
                                 for c in self.chains)  # fmt: skip
        widths = [chain.width for chain in self.chains]
        self.width = width if same else sum(widths) if kind == "cat" else widths[0]

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        first = self.chains[0]
        if self.kind == "checkpointed":
            return checkpoint(first, x, tokens, use_reentrant=False)
        if self.kind == "without gradients":
            with torch.no_grad():
                return first(x, tokens)
        if self.kind == "repeated":
            for _ in range(3):
                x = self.fit[0](first(x, tokens))
            return x
        branches = [fit(chain(x, tokens)) for fit, chain in zip(self.fit, self.chains, strict=True)]
        return torch.cat(branches, -1) if self.kind == "cat" else sum(branches, x if self.kind == "residual" else 0)


class Chain(nn.Module):
    """Operations, one after another."""

    def __init__(self, ops: tuple[Op, ...], width: int) -> None:
        super().__init__()
        self.ops = nn.ModuleList()
        for kind, argument in ops:
            self.ops.append(Group(kind, argument, width) if kind in GROUPS else Layer(kind, argument, width))
            width = self.ops[-1].width
        self.width = width

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        for op in self.ops:
            x = op(x, tokens)
        return x


class Model(nn.Module):
    """The model of a `Spec`; its loss is a mean over rows."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        torch.manual_seed(spec.seed)
        self.embed = nn.Embedding(VOCAB, 3)
        split = len(spec.ops) if spec.broken is None else spec.broken % (len(spec.ops) + 1)
        self.first = Chain(spec.ops[:split], 3)
        self.second = Chain(spec.ops[split:], self.first.width)
        self.broken = spec.broken is not None
        self.head = nn.Linear(self.second.width, VOCAB)
        if spec.unused:
            self.unused = nn.Linear(3, 2)
        layers = [m for m in self.modules() if isinstance(m, nn.Linear)]
        for a, b in spec.ties:
            a, b = layers[a % len(layers)], layers[b % len(layers)]
            if a.weight.shape == b.weight.shape:
                a.weight = b.weight
        # A norm of a single number is its bias. At zero PReLU has two slopes, and rounding would choose one of them.
        for bias in (p for name, p in self.named_parameters() if name.endswith("bias")):
            nn.init.normal_(bias, std=0.3)
        parameters = list(self.parameters())
        for number in spec.frozen:
            parameters[number % len(parameters)].requires_grad_(False)
        self.head.bias.requires_grad_(True)

    def training_step(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embed(tokens), tokens)
        if self.broken:
            torch._dynamo.graph_break()
        x = self.second(x, tokens)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


def batches(spec: Spec, world_size: int) -> list[Tensor]:
    """The global batch of every step."""
    generator = torch.Generator().manual_seed(spec.seed)
    return [torch.randint(0, VOCAB, (ROWS * world_size, LENGTH), generator=generator) for _ in range(STEPS)]


def _operation(choose: random.Random, leaves: list[int]) -> Op:
    """A layer, or a group of chains while the step has less than four layers."""
    leaves[0] += 1
    if leaves[0] > 4 or choose.random() < 0.6:
        return choose.choice(sorted(LAYERS)), choose.choice(SIZES)
    leaves[0] -= 1
    chains = [[_operation(choose, leaves) for _ in range(choose.randint(1, 3))] for _ in range(choose.randint(1, 2))]
    return choose.choice(GROUPS), tuple(map(tuple, chains))


def _spec(number: int) -> Spec:
    choose = random.Random(number)
    return Spec(
        ops=tuple(_operation(choose, [0]) for _ in range(choose.randint(2, 5))),
        seed=number,
        frozen=tuple(choose.randint(0, 99) for _ in range(choose.randint(0, 4))),
        ties=tuple((choose.randint(0, 20), choose.randint(0, 20)) for _ in range(choose.randint(0, 2))),
        unused=choose.random() < 0.5,
        broken=choose.choice([None, choose.randint(0, 5)]),
    )


def specs(count: int) -> list[Spec]:
    """Returns `count` models, the same ones every time and everywhere: a model's seed is its number.

    Args:
        count: How many.
    """
    return list(map(_spec, range(count)))
