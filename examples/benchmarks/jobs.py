"""The measurements (shapes, cases, systems) and the job of a group of workers; imports no torch."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SYSTEMS = {
    "deepcompile": "Lightning Trainer, DeepCompileStrategy with its defaults (or the options named after @; "
    "@device_mesh=2x4 for two replicas, each shared by four ranks)",
    "deepcompile-uncompiled": "as deepcompile, with the step kept away from the compiler (`torch.compiler.disable`): "
    "what runs where a function cannot be compiled",
    "deepcompile-fp8": "as deepcompile, with the linear layers of all blocks converted by torchao's "
    "`convert_to_float8_training` (@recipe=rowwise for another recipe than tensorwise): weights travel as FP8",
    "deepcompile-fp8-wide": "as deepcompile-fp8, but weights are gathered as they are, and quantised by every rank",
    "fsdp": "Lightning Trainer, FSDPStrategy(auto_wrap_policy={the decoder layer}, FULL_SHARD, limit_all_gathers, "
    "forward_prefetch, backward_prefetch=BACKWARD_PRE, use_orig_params)",
    "fsdp2": "plain loop, fully_shard per block and root, every block compiled, default prefetch, "
    "gradients reduced every micro-batch",
    "fsdp2-eager": "as fsdp2, nothing compiled",
    "fsdp2-fp8": "as fsdp2, with the same FP8 layers, `enable_fsdp_float8_all_gather`, and scales computed for all "
    "weights together after the optimizer's step, as torchao says",
    "fsdp2-fp8-wide": "as fsdp2, with the same FP8 layers, without that",
    "fsdp2-graphs": "as fsdp2, forward and backward of a step in one CUDA graph, gradients kept, the optimizer behind "
    "it; with @reshard=false parameters stay gathered as in fsdp2-noreshard",
    "fsdp2-hsdp": "as fsdp2, sharded inside of a node, with a replica on each node (with --nodes)",
    "fsdp2-offload": "as fsdp2, parameters, gradients and states in host memory (`CPUOffloadPolicy`), where the "
    "optimizer steps; set OMP_NUM_THREADS",
    "fsdp2-noreshard": "as fsdp2, parameters stay gathered until the step's last backward, gradients reduced once a "
    "step (FSDP2's fastest setting, at the price of memory)",
    "fsdp2-pieces": "as fsdp2, with a loss that the model computes in 8 pieces of tokens, as its user would write it "
    "(`LossInPieces` in models.py): each under activation checkpointing; @pieces=16 for another number",
    "deepspeed": "plain loop, deepspeed.initialize, ZeRO-3, eager: overlap_comm, buckets and prefetch of one block, "
    "norms not partitioned, no clipping, gradients of several micro-batches added up in fp32; with @compile=true "
    "blocks are leaf modules and compiled one by one, other options are DeepSpeed's own",
    "deepspeed-deepcompile": "as deepspeed, with DeepSpeed's DeepCompile (engine.compile()): what its passes plan "
    "holds from step 6 on",
    "ddp": "Lightning Trainer, DDPStrategy: nothing sharded, the reference for losses of small models",
    "roofline": "no training: the bound described in roofline.py",
}
OPTIMIZERS = {
    "adamw": "fused AdamW for all parameters",
    "muon": "torch.optim.Muon for the blocks' matrices, AdamW (not fused) for the rest, in one class",
}
DEEPSPEED = ("deepspeed", "deepspeed-deepcompile")
FP8 = ("deepcompile-fp8", "deepcompile-fp8-wide", "fsdp2-fp8", "fsdp2-fp8-wide")
WITH_OPTIONS = ("deepcompile", "deepcompile-uncompiled", "fsdp2-graphs", "fsdp2-pieces", *FP8, *DEEPSPEED)


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder of Transformers; how it is built and run where not all of it fits onto a device.

    Attributes:
        intermediate: Width of a block's MLP; with experts, of each of them.
        family: The model's classes: of ``models.FAMILIES``.
        experts: Experts of a block; 1 is a plain MLP without a router.
        experts_used: Experts that a token is sent to.
        checkpointing: Whether layers keep only their inputs, and run again in backward.
        deferred: Whether the model is built without memory, and initialised block by block into shards.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    layers: int
    family: str = "llama"
    experts: int = 1
    experts_used: int = 1
    checkpointing: bool = False
    deferred: bool = False

    def flops_per_token(self, seq: int) -> int:
        """Model FLOPs of forward plus backward for one token: no recomputation, causal attention at half its square.

        Of a block's experts those count that the token is sent to; the router's product counts, its choice does not.
        """
        matmul = self.layers * self._block_weights(self.experts_used) + self.vocab * self.hidden
        return 6 * matmul + 6 * self.layers * self.hidden * seq

    @property
    def block_weights(self) -> int:
        """Elements of a block's matrices, of all experts; its norms are a few times `hidden` more."""
        return self._block_weights(self.experts)

    @property
    def parameters(self) -> int:
        """Elements of all matrices: of the blocks, with all experts, of the embedding and of the head."""
        return self.layers * self.block_weights + 2 * self.vocab * self.hidden

    def _block_weights(self, experts: int) -> int:
        attention = 2 * self.hidden * (self.hidden + self.hidden * self.kv_heads // self.heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + router + experts * 3 * self.hidden * self.intermediate


SHAPES = {
    "llama3-1b": Shape(hidden=2048, intermediate=8192, heads=32, kv_heads=8, vocab=128256, layers=16),
    "llama3-8b": Shape(hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocab=128256, layers=32),
    "llama3-70b": Shape(hidden=8192, intermediate=28672, heads=64, kv_heads=8, vocab=128256, layers=80),
    "mixtral-8x7b": Shape(
        hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocab=32000, layers=32,
        family="mixtral", experts=8, experts_used=2,
    ),
    "olmoe-1b-7b": Shape(
        hidden=2048, intermediate=1024, heads=16, kv_heads=16, vocab=50304, layers=16,
        family="olmoe", experts=64, experts_used=8,
    ),
    "small": Shape(hidden=512, intermediate=1408, heads=8, kv_heads=4, vocab=8192, layers=16),
    "tiny": Shape(hidden=64, intermediate=160, heads=4, kv_heads=2, vocab=259, layers=2),
    "mixtral-tiny": Shape(
        hidden=64, intermediate=48, heads=4, kv_heads=2, vocab=259, layers=2,
        family="mixtral", experts=5, experts_used=2,
    ),
    "olmoe-tiny": Shape(
        hidden=64, intermediate=24, heads=4, kv_heads=4, vocab=259, layers=2,
        family="olmoe", experts=9, experts_used=3,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One batch shape: sequence length x micro-batch per GPU x micro-batches per optimizer step."""

    seq: int
    batch: int
    accumulation: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Reads ``SEQxBATCHxACCUMULATION``."""
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
            raise ValueError(f"case {text!r} is not SEQxBATCHxACCUMULATION with positive numbers, e.g. 1024x1x4")
        return cls(*map(int, text.split("x")))

    @property
    def tokens(self) -> int:
        """Tokens of one rank in one optimizer step."""
        return self.seq * self.batch * self.accumulation

    def __str__(self) -> str:
        return f"{self.seq}x{self.batch}x{self.accumulation}"


@dataclass(frozen=True)
class System:
    """A way to train the model, and the options given with it."""

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def case_by_case(self) -> bool:
        """True if each case gets processes of its own.

        What is planned with measurements of the first steps is for one case, DeepSpeed's engines are told when they are
        made how many micro-batches a step has, and what FSDP2 keeps from a captured step cannot be used outside of it.
        """
        return self.kind in (*DEEPSPEED, "fsdp2-graphs") or (
            self.kind.startswith("deepcompile") and self.options.get("schedule", "auto") is not None
        )

    @property
    def recipe(self) -> str | None:
        """Name of torchao's recipe for its FP8 layers; None without FP8."""
        return str(self.options.get("recipe", "tensorwise")) if self.kind in FP8 else None

    @classmethod
    def parse(cls, text: str) -> System:
        """Reads ``KIND`` or ``KIND@option=value+option=value`` (values are JSON, else strings)."""
        kind, _, tail = text.partition("@")
        if kind not in SYSTEMS:
            raise ValueError(f"system {kind!r} is not one of {', '.join(SYSTEMS)}")
        if tail and kind not in WITH_OPTIONS:
            raise ValueError(f"system {text!r}: only {', '.join(WITH_OPTIONS)} take options after @")
        pairs = [item.partition("=")[::2] for item in tail.split("+") if item]
        if any(not name or not value for name, value in pairs):
            raise ValueError(f"system {text!r}: write options as {kind}@name=value+name=value")
        return cls(text, kind, {name: _value(value) for name, value in pairs})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@dataclass(frozen=True)
class Job:
    """The order for one group of workers: one system, some cases, one model.

    Attributes:
        folder: Where the workers leave their records and logs.
        out: Where a kept profile goes.
        spawned: ``time.time()`` at the start of the workers.
        deadline: ``time.time()`` after which no further case is started.
        profile: The case to profile, if any.
        memory: On CPUs, measure the most memory in use, of the first case; it slows steps down.
        optimizer: Of ``OPTIMIZERS``.
    """

    system: System
    cases: list[Case]
    shape: Shape
    world: int
    device: str
    precision: str
    steps: int
    warmup: int
    folder: str
    out: str
    spawned: float
    deadline: float
    profile: Case | None = None
    memory: bool = False
    optimizer: str = "adamw"
    nodes: int = 1

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return self.world // self.nodes

    def save(self, path: Path) -> None:
        """Writes the job as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Job:
        """Reads what :meth:`save` wrote."""
        raw = json.loads(path.read_text())
        raw["system"], raw["shape"] = System(**raw["system"]), Shape(**raw["shape"])
        raw["cases"] = [Case(**case) for case in raw["cases"]]
        raw["profile"] = raw["profile"] and Case(**raw["profile"])
        return cls(**raw)
