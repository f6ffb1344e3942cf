"""Mixtures of experts whose tokens are spread unevenly train sharded as in one process.

Every token has a topic, and an expert for it: so a test's data decide which experts have tokens, on which rank.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from cases import LENGTH, ROWS, VOCAB, Base, Record, assert_same_training, train
from multiprocess import run_ranks
from test_recompute import keep_plans
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

TOPICS, EXPERTS, WIDTH, INNER, LAYERS = 3, 4, 16, 8, 2
CAPACITY = 3
"""Tokens of a sequence that an expert takes."""


class Topics(Dataset[Tensor]):
    """Token rows of one topic each. A rank reads its part of every global batch; one process reads all of it."""

    def __init__(self, topic: Callable[[int, int], int], batches: int, rows: int, rank: int, world_size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        words = torch.randint(0, VOCAB // TOPICS, (batches, rows, LENGTH + 1), generator=generator)
        topics = torch.tensor([[topic(batch, row // ROWS) for row in range(rows)] for batch in range(batches)])
        self.data = (words * TOPICS + topics[..., None]).chunk(world_size, dim=1)[rank].flatten(0, 1)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


ROUTING: dict[str, Callable[[int, int], int]] = {
    # A rank's tokens have one topic, another one in every step; no rank has tokens for the last expert.
    "apart": lambda batch, rank: (batch + rank) % TOPICS,
    # All tokens of all ranks go to the same expert.
    "one": lambda batch, rank: 1,
}


def steer(embedding: nn.Embedding, routers: list[nn.Linear]) -> None:
    """Makes a token's topic decide its expert: the topic's own, and if there is a second one, the next."""
    with torch.no_grad():
        embedding.weight[:, :TOPICS] = 3 * F.one_hot(torch.arange(VOCAB) % TOPICS, TOPICS)
        for router in routers:
            router.weight *= 0.1
            router.weight[:, :TOPICS] = torch.zeros(EXPERTS, TOPICS)
            for topic in range(TOPICS):
                router.weight[topic : topic + 2, topic] = torch.tensor([1.0, 0.5])


class Loop(nn.Module):
    """Experts are modules; each takes the tokens that were sent to it, however many those are."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gates, chosen = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            index = (chosen == number).nonzero()[:, 0]
            out.index_add_(0, index, gates[index, None] * expert(tokens[index]))
        return x + out.view_as(x)


class Stacked(nn.Module):
    """All experts' weights are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)


class Grouped(Stacked):
    """Tokens are sorted by expert, and multiplied in groups."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gates, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = torch.zeros(EXPERTS, dtype=torch.int32).index_add(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
        ends = ends.cumsum(0, dtype=torch.int32)
        hidden = F.gelu(F.grouped_mm(tokens[order], self.up, offs=ends))
        mixed = F.grouped_mm(hidden, self.down, offs=ends) * gates[order, None]
        return x + torch.zeros_like(tokens).index_add(0, order, mixed).view_as(x)


class Buffered(Stacked):
    """Experts have buffers of fixed size (GShard, Switch); tokens that find theirs full are dropped."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).max(-1)
        sent = F.one_hot(chosen, EXPERTS)
        place = (sent.cumsum(1) * sent).sum(-1) - 1
        dispatch = sent[..., None] * F.one_hot(place.clamp(max=CAPACITY), CAPACITY + 1)[:, :, None, :CAPACITY]
        dispatch = dispatch.to(x.dtype)  # row, token, expert, place
        buffers = torch.einsum("rtec,rtw->recw", dispatch, x)
        mixed = torch.einsum("reci,eiw->recw", F.gelu(torch.einsum("recw,ewi->reci", buffers, self.up)), self.down)
        return x + torch.einsum("rtec,recw->rtw", dispatch * gates[..., None, None], mixed)


class Mixture(Base):
    """Its optimizer has states, and its parameters may be compared."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.005, momentum=0.9)


class Own(Mixture):
    """A mixture as users write it."""

    def __init__(self, layer: type[nn.Module], checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)
        steer(self.embed, [layer.router for layer in self.layers])

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


class HuggingFace(Mixture):
    """Mixtral or OLMoE; two experts for every token."""

    def __init__(self, name: str, checkpointed: bool = False) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name}Config")(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=2,
            max_position_embeddings=32, use_cache=False, experts_implementation="grouped_mm", eos_token_id=None,
            initializer_range=0.2,  # else queries and keys have gradients that are rounding alone
        )  # fmt: skip
        self.net = getattr(transformers, f"{name}ForCausalLM")(config)
        if checkpointed:
            self.net.gradient_checkpointing_enable()
        steer(self.net.model.embed_tokens, [layer.mlp.gate for layer in self.net.model.layers])

    def logits(self, tokens: Tensor) -> Tensor:
        return self.net(input_ids=tokens).logits


MODELS: dict[str, Callable[[], Base]] = {
    "loop": functools.partial(Own, Loop),
    "grouped": functools.partial(Own, Grouped),
    "buffered": functools.partial(Own, Buffered),
    "buffered, checkpointed": functools.partial(Own, Buffered, checkpointed=True),
    "Mixtral": functools.partial(HuggingFace, "Mixtral"),
    "Mixtral, checkpointed": functools.partial(HuggingFace, "Mixtral", checkpointed=True),
    "Olmoe": functools.partial(HuggingFace, "Olmoe"),
}
COMPILED = {"buffered", "buffered, checkpointed", "Mixtral", "Mixtral, checkpointed", "Olmoe"}
"""Of the others, Dynamo takes no loop with sizes that depend on values, and no grouped product of fp32."""

Run = tuple[str, str, str, dict[str, Any]]  # its id, model, routing, settings
OFFLOAD, RECOMPUTE = {"offload": ["states"]}, {"rounding": "any"}
RUNS: dict[int, list[Run]] = {
    2: [
        ("loop", "loop", "apart", {}),
        ("grouped", "grouped", "one", {}),
        ("buffered", "buffered, checkpointed", "one", RECOMPUTE),
        ("Mixtral", "Mixtral", "one", OFFLOAD),
        ("Mixtral, recompute", "Mixtral, checkpointed", "apart", RECOMPUTE),
        ("Mixtral, inductor", "Mixtral", "apart", {"region_backend": "inductor"}),
        ("Olmoe", "Olmoe", "apart", {}),
    ],
    3: [
        ("loop", "loop", "one", {}),
        ("buffered", "buffered", "apart", {}),
        ("Mixtral", "Mixtral, checkpointed", "apart", {}),
        ("Olmoe", "Olmoe", "one", OFFLOAD),
    ],
}
EVERYDAY = {2: {"loop", "Mixtral"}, 3: {"buffered"}}
"""The others take minutes: they are `extensive`."""
STEPS = 8
"""Plans are made after five."""


def _data(routing: str) -> Any:
    return functools.partial(Topics, ROUTING[routing])


def _inspect(trainer: Any) -> Any:
    return trainer.strategy.summary(), trainer.strategy.engine.capture.tracing.uncheckpointed


def _train_all(runs: list[Run]) -> dict[str, Record | str]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    keep_plans()
    results: dict[str, Record | str] = {}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name, model, routing, settings in runs:
        config = CompileConfig(**{"region_backend": "eager", **settings})
        strategy = DeepCompileStrategy(compile=config, timeout=timedelta(seconds=60))
        options = {"steps": STEPS, "data": _data(routing), "inspect": _inspect}
        try:
            results[name] = train(MODELS[model], strategy, world_size=world, rank=rank, **options)
        except Exception:
            results[name] = traceback.format_exc()
        torch._dynamo.reset()
    return results


@functools.cache
def _sharded(world_size: int) -> list[dict[str, Record | str]]:
    everyday = [run for run in RUNS[world_size] if run[0] in EVERYDAY[world_size]]
    return run_ranks(_train_all, world_size, RUNS[world_size] if "TEST_ALL" in os.environ else everyday, timeout=400)


def _alone(model: str, routing: str, data_world: int, steps: int) -> Record:
    build = MODELS[model]
    return train(build, "auto", world_size=1, rank=0, data_world=data_world, steps=steps, data=_data(routing))


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("world_size", "run"),
    [
        pytest.param(
            world, run, id=f"{run[0]} on {world}", marks=[] if run[0] in EVERYDAY[world] else [pytest.mark.extensive]
        )
        for world, runs in RUNS.items()
        for run in runs
    ],
)
@pytest.mark.xdist_group("experts")
def test_equals_unsharded(world_size: int, run: Run) -> None:
    name, model, routing, settings = run
    expected = _alone(model, routing, world_size, STEPS)
    for rank, results in enumerate(_sharded(world_size)):
        actual = results[name]
        if isinstance(actual, str):
            pytest.fail(f"rank {rank}:\n{actual}")
        assert_same_training(actual, expected, params=True)
        summary, uncheckpointed = actual.extra
        if model in COMPILED:
            assert summary.graphs == 1 and not summary.uncompiled, summary
            assert (uncheckpointed > 0) == ("recompute" in settings)
        assert (summary.offloaded_bytes > 0) == ("offload" in settings)


@pytest.mark.parametrize("routing", ROUTING)
@pytest.mark.parametrize("model", ["loop", "buffered", "Mixtral", "Olmoe"])
def test_most_experts_of_a_rank_have_no_tokens(model: str, routing: str) -> None:
    """Checks the data: on rank 0, in the first step, only the experts of one topic compute."""
    (grads,) = _alone(model, routing, 1, 1).grads
    experts = {name: grad for name, grad in grads.items() if "layers.0" in name and "router" not in name}
    if model == "loop":
        used = {int(name.split(".")[3]) for name, grad in experts.items() if bool(grad.any())}
    else:
        (down,) = (grad for name, grad in experts.items() if name.endswith(("layers.0.down", "experts.down_proj")))
        used = set(down.flatten(1).any(1).nonzero().flatten().tolist())
    topic = ROUTING[routing](0, 0)
    assert used == ({topic, topic + 1} if model in ("Mixtral", "Olmoe") else {topic})
