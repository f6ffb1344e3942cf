"""The model, the optimizer and the batches: the same for every system."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from jobs import Case, Shape
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.olmoe.modeling_olmoe import OlmoeDecoderLayer

FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], type[nn.Module]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, LlamaDecoderLayer),
    "mixtral": (MixtralConfig, MixtralForCausalLM, MixtralDecoderLayer),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, OlmoeDecoderLayer),
}
"""Configuration, model and block of each family of shapes."""
LEARNING_RATE = 1e-4
COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build_model(shape: Shape, device: torch.device | str) -> PreTrainedModel:
    """Builds the model in fp32 right on the device, with the same random weights on every rank of every system.

    Routers add no loss of their own, which would differ with the rows of a rank, and choose among untrained experts for
    random tokens: nearly evenly. Of a deferred model there is nothing but shapes: whoever shards it must initialise it.
    """
    config_class, model_class, _ = FAMILIES[shape.family]
    experts = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_used}
    config = config_class(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
        **(experts if shape.experts > 1 else {}),
    )
    torch.manual_seed(0)
    with torch.device("meta" if shape.deferred else device):
        model = model_class(config).train()
    if shape.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def convert_to_fp8(model: PreTrainedModel, recipe: str, device: str, *, gathers: bool = False) -> None:
    """Makes the linear layers of all blocks FP8 layers of torchao; the head stays as it is.

    Args:
        model: The model.
        recipe: Name of torchao's recipe.
        device: Where it trains; on CPUs FP8 is emulated.
        gathers: Whether FSDP2 gathers weights as FP8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, emulate=device == "cpu", enable_fsdp_float8_all_gather=gathers)
    convert_to_float8_training(model.model.layers, config=config)


def shard_with_fsdp2(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    *,
    compiled: bool = True,
    dynamic: bool = False,
    keep: bool = False,
    offload: bool = False,
) -> None:
    """Shards every block and the rest with ``fully_shard``, as its users do.

    Args:
        model: The model; changed in place.
        blocks: Its blocks.
        mesh: Of the ranks that share parameters; of two dimensions with replicas.
        dtype: Computes and reduces in it; None: in the parameters'.
        compiled: Whether blocks are compiled, one by one.
        dynamic: Whether for all sizes at once.
        keep: Whether parameters stay gathered after the forward pass.
        offload: Whether shards are in host memory.
    """
    sharding = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)}
    if offload:
        sharding["offload_policy"] = CPUOffloadPolicy()
    for block in blocks:
        if compiled:
            block.compile(dynamic=dynamic)
        fully_shard(block, reshard_after_forward=not keep, **sharding)
    fully_shard(model, **sharding)


class LossInPieces(nn.Module):
    """A decoder whose logits never exist whole, written by hand: those of a piece of tokens are computed once more.

    Args:
        model: With its head.
        pieces: How many there are.
    """

    def __init__(self, model: PreTrainedModel, pieces: int) -> None:
        super().__init__()
        self.model, self.head, self.pieces = model.model, model.lm_head, pieces

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss that the model has of the same arguments."""
        hidden = self.model(input_ids=input_ids).last_hidden_state
        rows, targets = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        pairs = zip(rows.chunk(self.pieces), targets.chunk(self.pieces), strict=True)
        losses = [checkpoint(self._sum, *pair, use_reentrant=False) for pair in pairs]
        return torch.stack(losses).sum() / len(targets)

    def _sum(self, rows: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows, self.head.weight).float(), targets, reduction="sum")


def block_class(shape: Shape) -> type[nn.Module]:
    """The class of the model's blocks."""
    return FAMILIES[shape.family][2]


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
    """The optimizer of every system."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


class MuonWithAdamW(torch.optim.Optimizer):
    """PyTorch's Muon for matrices and its AdamW for the rest, as one optimizer.

    Args:
        matrices: Those of the blocks.
        others: All other parameters.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> None:
        groups = [
            _settings(torch.optim.Muon, lr=LEARNING_RATE, weight_decay=0.0) | {"params": list(matrices), "muon": True},
            _settings(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.0) | {"params": list(others), "muon": False},
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps; see PyTorch's optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind, muon in ((torch.optim.Muon, True), (torch.optim.AdamW, False)):
            groups = [group for group in self.param_groups if group["muon"] == muon]
            if any(group["params"] for group in groups):
                inner = kind([torch.zeros(1, 1)])
                inner.param_groups, inner.state = groups, self.state
                inner.step()
        return loss


def _settings(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> dict[str, Any]:
    return kind([torch.zeros(1, 1)], **settings).defaults


def make_optimizer(model: nn.Module, shape: Shape, name: str) -> torch.optim.Optimizer:
    """Builds the optimizer that a job names, ``"adamw"`` or ``"muon"``; of experts, stacks of matrices are AdamW's."""
    if name == "adamw":
        return adamw(model.parameters())
    blocks = [module for module in model.modules() if isinstance(module, block_class(shape))]
    inside = {p for block in blocks for p in block.parameters() if p.dim() == 2}
    matrices = [p for p in model.parameters() if p in inside]
    return MuonWithAdamW(matrices, [p for p in model.parameters() if p not in inside])


class Batches:
    """Random tokens that already sit on the device, so that no system pays for loading data."""

    POOL = 2
    """So few that the third step sees the first tokens again: its loss shows what the optimizer did."""

    def __init__(self, shape: Shape, case: Case, length: int, rank: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1000 * rank + case.seq)
        size = (self.POOL, case.batch, case.seq)
        tokens = torch.randint(shape.vocab, size, generator=generator).to(device)
        self._pool = [batch.clone() for batch in tokens]  # as a loader's: no batch is a view of all
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self._pool[index % self.POOL] for index in range(self._length))
