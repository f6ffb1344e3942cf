"""Several documents in a batch, padded or packed, in every way in which attention keeps them apart.

All ways compute the same: losses and gradients of each way are compared with one process, and with the padded way.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import Record, Recorder, assert_same_training
from multiprocess import devices, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.utils.data import DataLoader

VOCAB, WIDTH, HEADS, STEPS, WORLD = 37, 32, 2, 4, 2

# ---------------------------------------------------------------------------------------------------- batches

Documents = list[Tensor]
"""Tokens of each."""


def documents(step: int, rank: int) -> Documents:
    """Every step and rank has another number of documents, and other lengths: one of a single token, one document."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    count = 1 if (step, rank) == (3, 0) else int(torch.randint(2, 6, (), generator=generator))
    lengths = torch.randint(1, 14, (count,), generator=generator).clamp(min=2 if count == 1 else 1)
    return [torch.randint(0, VOCAB, (int(length),), generator=generator) for length in lengths]


def targets(document: Tensor) -> Tensor:
    """The next token of each, and none for the last."""
    return torch.cat([document[1:], torch.tensor([-100])])


def padded(docs: Documents, *, left: bool = False) -> dict[str, Any]:
    """Rows of one length."""
    longest = max(map(len, docs))

    def rows(values: list[Tensor], empty: int) -> Tensor:
        gaps = [torch.full((longest - len(value),), empty) for value in values]
        return torch.stack([torch.cat((g, v) if left else (v, g)) for g, v in zip(gaps, values, strict=True)])

    return {
        "input_ids": rows(docs, 0),
        "labels": rows([targets(d) for d in docs], -100),
        "attention_mask": rows([torch.ones_like(d) for d in docs], 0),
        "position_ids": rows([torch.arange(len(d)) for d in docs], 0),
    }


def packed(docs: Documents) -> dict[str, Any]:
    """One row, in which positions start anew with each document."""
    return {
        "input_ids": torch.cat(docs)[None],
        "labels": torch.cat([targets(d) for d in docs])[None],
        "position_ids": torch.cat([torch.arange(len(d)) for d in docs])[None],
    }


def offsets(docs: Documents) -> Tensor:
    return torch.tensor([0, *map(len, docs)]).cumsum(0).int()


def numbered(docs: Documents) -> dict[str, Any]:
    """Packed, with the number of each token's document."""
    return packed(docs) | {"document": torch.cat([torch.full_like(d, n) for n, d in enumerate(docs)])}


def with_offsets(docs: Documents) -> dict[str, Any]:
    return packed(docs) | {"offsets": offsets(docs), "longest": max(map(len, docs))}


def with_lengths(docs: Documents) -> dict[str, Any]:
    return packed(docs) | {"lengths": [len(d) for d in docs]}


def with_block_mask(docs: Documents) -> dict[str, Any]:
    batch = numbered(docs)
    return batch | {"mask": block_mask(batch["document"])}


def block_mask(document: Tensor) -> BlockMask:
    length = len(document)
    return create_block_mask(within(document), None, None, length, length, device=document.device.type)


def within(document: Tensor) -> Callable[..., Tensor]:
    """The mask of attention to what precedes a token in its document."""

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[query] == document[key]) & (query >= key)

    return mask


# --------------------------------------------------------------------------------------- operators of one's own


def _each(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    parts = [tuple(x[start:end].transpose(0, 1) for x in (q, k, v)) for start, end in zip(ends, ends[1:], strict=False)]
    return torch.cat([F.scaled_dot_product_attention(*part, is_causal=True).transpose(0, 1) for part in parts])


def _gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> list[Tensor]:
    """Written out, as a kernel would have it: autograd does not reach into an operator."""
    ends, parts = offsets.tolist(), []
    for start, end in zip(ends, ends[1:], strict=False):
        g, a, b, c = (x[start:end].transpose(0, 1) for x in (gradient, q, k, v))
        hidden = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
        scale = q.shape[-1] ** -0.5
        p = (a @ b.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        dp = g @ c.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        parts.append([x.transpose(0, 1) for x in (ds @ b, ds.mT @ a, p.mT @ g)])
    return [torch.cat(x) for x in zip(*parts, strict=True)]


def _operator(name: str, *, fake: bool) -> Callable[..., Tensor]:
    """An operator as ``flash_attn_varlen_func``: what it does with offsets is hidden from compilers."""

    @torch.library.custom_op(f"documents::{name}", mutates_args=())
    def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        assert longest == int(offsets.diff().max())
        return _each(q, k, v, offsets).contiguous()

    @torch.library.custom_op(f"documents::{name}_backward", mutates_args=())
    def attend_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> list[Tensor]:
        return _gradients(gradient, q, k, v, offsets)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4])

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *attend_backward(gradient, *ctx.saved_tensors), None, None

    attend.register_autograd(backward, setup_context=setup)
    if fake:
        attend.register_fake(lambda q, k, v, offsets, longest: torch.empty_like(q))
        attend_backward.register_fake(lambda gradient, q, k, v, offsets: [torch.empty_like(x) for x in (q, k, v)])
    return attend


varlen, varlen_untraceable = _operator("varlen", fake=True), _operator("varlen_untraceable", fake=False)


class VarlenFunction(torch.autograd.Function):
    """Attends without a registered operator."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, offsets)
        return _each(q, k, v, offsets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *_gradients(gradient, *ctx.saved_tensors), None


# ---------------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH // HEADS)) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + self.out(attend(q, k, v).flatten(-2))
        return x + self.mlp(x)


class Model(pl.LightningModule):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def attention(self, batch: dict[str, Any]) -> Callable[..., Tensor]:
        """Returns the attention of a batch, of (..., tokens, heads, width)."""
        raise NotImplementedError

    def loss(self, batch: dict[str, Any]) -> Tensor:
        attend = self.attention(batch)
        x = self.token(batch["input_ids"]) + self.position(batch["position_ids"])
        for block in self.blocks:
            x = block(x, attend)
        return F.cross_entropy(self.head(x).flatten(0, -2), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def by_heads(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Lets heads precede tokens."""
    return lambda *qkv: attention(*(x.transpose(-3, -2) for x in qkv)).transpose(-3, -2)


class Padded(Model):
    def attention(self, batch: dict[str, Any]) -> Callable[..., Tensor]:
        real = batch["attention_mask"].bool()
        length = real.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
        # A token of padding sees itself: a row of which nothing is seen has no softmax.
        mask = (causal & real[:, None, None]) | torch.eye(length, dtype=torch.bool, device=real.device)
        return by_heads(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Masked(Model):
    """A mask of which document a token is in."""

    def attention(self, batch: dict[str, Any]) -> Callable[..., Tensor]:
        document = batch["document"]
        mask = (document[:, None] == document).tril()
        return by_heads(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class DenseMask(Model):
    """FlexAttention's mask function as a dense mask."""

    def attention(self, batch: dict[str, Any]) -> Callable[..., Tensor]:
        length = len(batch["document"])
        mask = create_mask(within(batch["document"]), None, None, length, length, device=self.device)
        return by_heads(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def flat(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Drops the dimension of rows."""
    return lambda *qkv: attention(*(x.squeeze(0) for x in qkv)).unsqueeze(0)


class Varlen(Model):
    operator = staticmethod(varlen)

    def attention(self, batch: dict[str, Any]) -> Callable[..., Tensor]:
        return flat(lambda q, k, v: self.operator(q, k, v, batch["offsets"], batch["longest"]))


class Untraceable(Varlen):
    operator = staticmethod(varlen_untraceable)


class ByFunction(Model):
    def attention(self, batch: dict[str, Any]) -> Callable[..., Tensor]:
        return flat(lambda q, k, v: VarlenFunction.apply(q, k, v, batch["offsets"]))


class OneByOne(Model):
    """Documents are told apart by lengths in a list."""

    def attention(self, batch: dict[str, Any]) -> Callable[..., Tensor]:
        def attend(*qkv: Tensor) -> Tensor:
            parts = [x.transpose(-3, -2).split(batch["lengths"], dim=-2) for x in qkv]
            each = [F.scaled_dot_product_attention(*part, is_causal=True) for part in zip(*parts, strict=True)]
            return torch.cat(each, dim=-2).transpose(-3, -2)

        return attend


class Nested(Model):
    """Nested tensors in the jagged layout; on CPUs PyTorch has no causal attention for them."""

    def attention(self, batch: dict[str, Any]) -> Callable[..., Tensor]:
        def attend(*qkv: Tensor) -> Tensor:
            nested = [torch.nested.nested_tensor_from_jagged(x[0].contiguous(), batch["offsets"]) for x in qkv]
            q, k, v = (x.transpose(1, 2) for x in nested)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()[None]

        return attend


class NestedBatch(Model):
    """The batch itself is nested, and so is all that the model computes."""

    def loss(self, batch: dict[str, Any]) -> Tensor:
        def attend(*qkv: Tensor) -> Tensor:
            q, k, v = (x.contiguous().transpose(1, 2) for x in qkv)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

        x = self.token(batch["input_ids"]) + self.position(batch["position_ids"])
        for block in self.blocks:
            x = block(x, attend)
        return F.cross_entropy(self.head(x).values(), batch["labels"].values())


def nested(docs: Documents) -> dict[str, Any]:
    ids = torch.nested.nested_tensor(docs, layout=torch.jagged)
    return {
        "input_ids": ids,
        "labels": torch.nested.nested_tensor_from_jagged(torch.cat([targets(d) for d in docs]), ids.offsets()),
        "position_ids": torch.nested.nested_tensor_from_jagged(packed(docs)["position_ids"][0], ids.offsets()),
    }


class Flex(Model):
    """FlexAttention; the mask of blocks comes with the batch, or is made in the step."""

    def attention(self, batch: dict[str, Any]) -> Callable[..., Tensor]:
        mask = batch["mask"] if "mask" in batch else block_mask(batch["document"])
        return by_heads(lambda q, k, v: flex_attention(q, k, v, block_mask=mask))


class FlexOutside(Flex):
    """The mask is made outside of the step, on the device: what its function reads does not move with it."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        for one in batch if isinstance(batch, list) else [batch]:
            one["mask"] = block_mask(one["document"])
        return batch


class FrozenTrunk(Flex):
    """FlexAttention without gradients, all that it does on CPUs: the head alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.token, self.position, self.blocks):
            part.requires_grad_(False)


class VarlenAttention(Model):
    """PyTorch's own; it has kernels for GPUs alone, of half precision."""

    def attention(self, batch: dict[str, Any]) -> Callable[..., Tensor]:
        from torch.nn.attention.varlen import varlen_attn

        ends, longest = batch["offsets"], batch["longest"]
        return flat(lambda q, k, v: varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0)))


def llama(implementation: str) -> Callable[[], Model]:
    def build() -> Model:
        from transformers import LlamaConfig, LlamaForCausalLM

        class Llama(Model):
            def __init__(self) -> None:
                super(Model, self).__init__()
                config = LlamaConfig(
                    vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1,
                    num_attention_heads=HEADS, num_key_value_heads=1, attn_implementation=implementation,
                )  # fmt: skip
                self.net = LlamaForCausalLM(config)

            def loss(self, batch: dict[str, Any]) -> Tensor:
                labels = batch["labels"]
                logits = self.net(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
                return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

        return Llama()

    return build


COMPILED, IN_PIECES, AS_PYTHON = "compiled", "in pieces", "as Python"

# Per way: the model, its batches, how its step runs, and the most graphs of four steps. Sizes differ in all of them,
# and rank 0 meets a single document.
CASES: dict[str, tuple[Callable[[], Model], Callable[[Documents], dict[str, Any]], str, int]] = {
    "padded": (Padded, padded, COMPILED, 4),
    "padded left": (Padded, functools.partial(padded, left=True), COMPILED, 4),
    "mask": (Masked, numbered, COMPILED, 2),
    "mask function": (DenseMask, numbered, COMPILED, 2),
    "operator": (Varlen, with_offsets, COMPILED, 3),
    "operator without a fake": (Untraceable, with_offsets, AS_PYTHON, 2),
    "function": (ByFunction, with_offsets, IN_PIECES, 17),
    "lengths": (OneByOne, with_lengths, COMPILED, STEPS),
    "nested attention": (Nested, with_offsets, IN_PIECES, 10),
    "nested": (NestedBatch, nested, IN_PIECES, 14),  # 12 from PyTorch 2.13 on
    "flex": (FrozenTrunk, numbered, COMPILED, 2),
    "flex, mask outside": (FrozenTrunk, with_block_mask, COMPILED, 2),
    "llama, padded": (llama("sdpa"), padded, COMPILED, 4),
    "llama, padded, eager": (llama("eager"), padded, COMPILED, 4),
    "llama, packed": (llama("sdpa"), packed, COMPILED, 2),
    "flex, trained": (Flex, numbered, COMPILED, 2),
    "flex, trained, mask outside": (FlexOutside, numbered, COMPILED, 2),
    "varlen_attn": (VarlenAttention, with_offsets, COMPILED, 3),
}
UNTRAINED = "flex, trained"
ON_GPUS = [UNTRAINED, "flex, trained, mask outside", "varlen_attn"]
SIMILAR = [
    "mask",  # Inductor compiles it
    "padded left",
    "lengths",
    "function",
    "mask function",
    "nested attention",
    "nested",
    "flex, mask outside",
    "llama, padded",
    "llama, padded, eager",
]  # to others
BY_INDUCTOR = [
    "mask",
    *(name for name in CASES if name not in (*ON_GPUS, *SIMILAR)),
    "lengths",
    "nested attention",
    "nested",
    "llama, padded",
]
"""All kinds; the first is run with every change."""


def on_all_parts(module: Model, batch: list[dict[str, Any]], batch_idx: int) -> Tensor:
    """The training step of one process, on the batches of all ranks."""
    return sum(module.loss(part) for part in batch) / len(batch)


def train(name: str, strategy: Any, world: int, accelerator: str = "cpu", **options: Any) -> tuple[Record, Any]:
    build, collate, _, _ = CASES[name]
    torch.manual_seed(5)
    module, recorder = build(), Recorder()
    every = [[collate(documents(step, rank)) for rank in range(WORLD)] for step in range(STEPS)]
    if world == 1:
        module.__class__ = type("Alone", (type(module),), {"training_step": on_all_parts})
    else:
        every = [parts[int(os.environ["RANK"])] for parts in every]
    trainer = pl.Trainer(
        strategy=strategy, accelerator=accelerator, **devices(world), max_epochs=1, logger=False, callbacks=[recorder],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(every, batch_size=None))
    return recorder.record, trainer.strategy.summary() if world > 1 else None


def train_all(names: list[str], backend: Any = "eager", **options: Any) -> dict[str, Any]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    results: dict[str, Any] = {}
    for name in names:
        strategy = DeepCompileStrategy(compile=CompileConfig(region_backend=backend))
        try:
            results[name] = train(name, strategy, WORLD, **options)
        except Exception:
            results[name] = traceback.format_exc()
        torch._dynamo.reset()
    return results


def check(results: Any, expected: Record, name: str) -> None:
    """Compares a rank's training with one process's, and how its step ran with what is documented."""
    assert not isinstance(results, str), results
    record, summary = results
    assert_same_training(record, expected, params=True)
    how = COMPILED if not summary.uncompiled else AS_PYTHON if "training_step" in str(summary.uncompiled) else IN_PIECES
    assert how == CASES[name][2], summary.uncompiled
    assert summary.graphs <= CASES[name][3], f"{summary.graphs} graphs"


@pytest.fixture(scope="module")
def sharded() -> list[dict[str, Any]]:
    if "TEST_ALL" in os.environ:
        names = [name for name in CASES if name not in ON_GPUS[1:]]
    else:
        names = [name for name in CASES if name not in (*ON_GPUS, *SIMILAR)]
    return run_ranks(train_all, WORLD, names, timeout=500)


@pytest.fixture(scope="module")
def by_inductor() -> list[dict[str, Any]]:
    names = BY_INDUCTOR if "TEST_ALL" in os.environ else BY_INDUCTOR[:1]
    return run_ranks(train_all, WORLD, names, "inductor", timeout=900)


@pytest.mark.timeout(600)
@pytest.mark.xdist_group("documents")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.extensive] if name in SIMILAR else [])
        for name in CASES
        if name not in ON_GPUS
    ],
)
def test_documents_train_as_alone(name: str, sharded: list[dict[str, Any]]) -> None:
    expected, _ = train(name, "auto", 1)
    for results in sharded:
        check(results[name], expected, name)
        if CASES[name][2] == AS_PYTHON:
            assert "no fake impl registered" in str(results[name][1].uncompiled), "the reason is named"


@pytest.mark.timeout(1000)
@pytest.mark.xdist_group("documents by inductor")
@pytest.mark.parametrize(
    "name", [BY_INDUCTOR[0], *(pytest.param(name, marks=pytest.mark.extensive) for name in BY_INDUCTOR[1:])]
)
def test_documents_train_as_alone_with_inductor(name: str, by_inductor: list[dict[str, Any]]) -> None:
    expected, _ = train(name, "auto", 1)
    for results in by_inductor:
        check(results[name], expected, name)


def test_all_ways_compute_the_same() -> None:
    """Whatever keeps documents apart, in one process: what is compared above is the right thing."""
    expected, _ = train("padded", "auto", 1)
    for name in ("padded left", "mask", "mask function", "operator", "operator without a fake", "function", "lengths"):
        assert_same_training(train(name, "auto", 1)[0], expected, params=True)
    assert_same_training(train("llama, packed", "auto", 1)[0], train("llama, padded", "auto", 1)[0], params=True)


@pytest.mark.extensive
@pytest.mark.xdist_group("documents")
def test_flex_attention_is_not_trained_on_cpus(sharded: list[dict[str, Any]]) -> None:
    """PyTorch says so, on every rank."""
    for results in sharded:
        assert "FlexAttention does not support backward on CPU" in results[UNTRAINED]


@pytest.mark.gpu
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("name", "precision"), [("varlen_attn", "bf16-true"), *((n, "32-true") for n in ON_GPUS[:2])])
def test_kernels_of_gpus_train_as_alone(name: str, precision: str) -> None:
    options = {"accelerator": "gpu", "precision": precision}
    results = run_ranks(train_all, WORLD, [name], "inductor", **options, timeout=400)
    ((expected, _),) = run_ranks(train, 1, name, "auto", 1, **options)
    for rank in results:
        if precision == "32-true":
            check(rank[name], expected, name)
        else:
            assert not isinstance(rank[name], str), rank[name]
            torch.testing.assert_close(
                torch.tensor(rank[name][0].losses), torch.tensor(expected.losses), rtol=2e-2, atol=0.0
            )
            assert not rank[name][1].uncompiled
