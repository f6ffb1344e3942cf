"""Settings of the compiler and of the runtime, as they appear in code, in YAML and on the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from lightning_deepcompile.console import LogLevel
from lightning_deepcompile.options import checked
from lightning_deepcompile.plan.budget import Budget, ByteCount, as_fraction, parse_budget
from lightning_deepcompile.plan.offload import Offloading, OffloadKind, OffloadMode
from lightning_deepcompile.plan.pass_schedule import PassSchedule
from lightning_deepcompile.plan.settings import Reduction, Rounding
from lightning_deepcompile.runtime.dc import SYMMETRIC_THRESHOLD

__all__ = ["CompileConfig"]

Schedule = Annotated[list[dict[str, Any]], PassSchedule()]

_GONE = {
    "prefetch_blocks": "blocks are gathered two blocks ahead, until a plan places gathers (`schedule`)",
    "reduce_window": "two groups of gradients may be on their way",
    "keep_last_block": "the last block of a forward pass stays gathered for the backward pass",
    "max_ctas": "set the environment variable NCCL_MAX_CTAS",
    "early_gathers": "gathers that open a step are launched before it; write to parameters under `torch.no_grad()`",
    "head_start": "gathers that open a step are launched while the optimizer steps, where its class allows it",
    "embedding": "rows of large tables are exchanged, all other tables are gathered",
    "recognize_causal_masks": "causal masks are always recognised",
    "trace_blocks_once": "equal blocks are always traced once",
    "pack_shards": "each shard travels by itself, which two GPUs do faster",
    "recompile_limit": "it is 16, or set `torch._dynamo.config.recompile_limit`",
    "offload_activations": "`offload` takes a list, such as ['activations']",
    "offload_parameters": "`offload` takes a list, such as ['parameters']",
    "offload_chunk": "it is 256 MiB, or a sixteenth of all states if that is less",
    "chunk_loss": "chunks are planned, as `rounding` allows",
    "chunk_mlp": "chunks are planned, as `rounding` allows",
    "recompute": "what is computed again is planned, as `rounding` allows",
}
"""What replaces settings of earlier versions."""


@checked
@dataclass
class CompileConfig:
    """Settings of how the step is compiled and how its programs are scheduled.

    Args:
        region_backend: What compiles the compute between two collectives. ``"inductor"`` is the fast one; ``"eager"``
            runs the captured operators one by one: slow, and useful to tell a compiler problem from one of ours.
        reduce: When gradients of accumulated micro-batches travel: ``"every"`` micro-batch's are reduced, or they are
            added up unsharded, in the parameters' dtype, and reduced at the ``"boundary"``, with the last one: less
            communication for the memory of unsharded gradients. None: by stage, the boundary at stage 1 alone; with
            ``rounding="any"``, planning decides at stage 3, for each block, by time and memory.
        fallback: What happens to a function that cannot be compiled, or was compiled too often. ``"warn"``: it runs as
            Python, as right as ever and about as fast as eager FSDP, with one warning that says which and why.
            ``"error"``: that ends training.
        symmetric_memory: Leave gathers of large groups of parameters to the GPUs' copy engines, which write straight to
            where the other GPUs of the host gather to. They take about as long as NCCL's kernels, and no thread blocks
            from compute that runs beside them. NCCL does it, from 2.28 on. What is gathered so stays allocated until
            the next plan, outside of torch's allocator. A rank that dies or hangs in such a gather ends the other
            ranks' processes, as no error reaches a copy engine that waits. True: groups of at least 32 MiB (gathered);
            bytes or a text like ``"64MiB"``: another bound; False: none. ``"auto"``: as True where all GPUs that share
            the parameters are of one host, the module has a billion parameters or more, and there is neither a memory
            budget nor offloading nor ``cuda_graphs=True``; then there are no CUDA graphs. Where ranks are on several
            hosts, and on CPU, one warning says why and nothing changes.
        cuda_graphs: Record each program of a training step, with its gathers and reductions, clipping by norm and the
            step of a fused optimizer as CUDA graphs, and launch each as a whole: the host of a small model is slower
            than its device. They are recorded when they have run a few times and planning is done. They keep their
            memory between steps: gradients, activations, and what is computed in between. What reads values on the
            host, copies activations to it, or takes part in other ranks' batch statistics runs as before; the summary
            says why. ``"auto"``: where devices wait for their hosts, there is memory for it, and it turns out to be
            faster. CPUs have no graphs.
        schedule: Which passes plan the programs, and when: a list of ``{"step": n, "passes": [...]}``, in optimizer
            steps since the start or the resuming. The entry of step 0 applies from the first step on. Each later one
            profiles steps n and n + 1, plans with what they measured, and swaps the programs before step n + 2.
            Passes are names (``zero3``, ``prefetch``, ``fuse``, ``offload_activation``, ``offload_optimizer``,
            ``unshard``, ``keep_whole``, ``reduce_late``, ``proactive_prefetch``) or ``"package.module:name"`` of your
            own. ``"auto"``: `plan.DEFAULT_SCHEDULE`, which plans at step 3. None: nothing is measured; programs stay as
            they are compiled, with the least memory.
        memory_budget: What plans may use of each device's memory: bytes (at least 1 MiB), a text like ``"24GiB"`` or
            ``"90%"``, or a fraction. None is 0.9 of it, less what activations took in the profiled step, so that later
            batches may be up to twice as large; anything else is held to at stage 3: if no plan fits, training stops
            with an error that says what would.
            Where torch's allocator does not count (CPU), only what programs hold between regions is known.
        offload: What waits in host memory: optimizer states, saved tensors (activations), and at stage 3 shards of
            parameters; gradients stay on the device. ``"auto"``: what exceeds the memory budget, decided before a step
            runs, and nothing where all fits. ``"none"``: nothing. ``"all"``: all of it. A list of ``"states"``,
            ``"activations"`` and ``"parameters"``: all of these, and nothing else. No bit of the result changes.
        host_memory_budget: What may be used of each node's memory for all of them, by all of its ranks together: bytes,
            a text like ``"400GiB"`` or ``"80%"``, or a fraction of what is available when training is set up. None is
            0.8.
        rounding: Whether last bits of results may change. Losses over many classes and feed-forward layers in chunks
            of tokens, and cheap operators or checkpointed blocks that are computed again, or no longer, add numbers up
            in another order, and so do gradients that are reduced later or together. ``"same"``: no plan changes a bit,
            even where the alternative is out of memory. ``"needed"``: only where a step does not fit otherwise; one
            line says so, and the step is traced once more. ``"any"``: plans may also where that takes less time: they
            keep activations that the model checkpoints, merge reductions, and reduce accumulated gradients once
            (stage 3).
        plan: File of a plan. If it exists and fits, training starts with it, and with optimizer states where it has
            them, and does not profile; the plan of a run that did profile is written to it. ``"auto"``:
            ``deepcompile_plan.json`` in the Trainer's root directory.
        log_level: Least level of what the logger ``lightning_deepcompile`` tells: ``"debug"``, ``"info"``,
            ``"warning"`` or ``"error"``. The environment variable ``DEEPCOMPILE_LOG`` goes before it. None: the level
            that the logger has, or ``"info"``.

    Raises:
        ValueError: If a value is of another type, no choice, or out of range; the message names the argument, the value
            seen and what may be there.
        TypeError: For an argument that there is not; the message names what is most like it, or replaces it.
    """

    _gone: ClassVar[dict[str, str]] = _GONE

    region_backend: Literal["inductor", "eager"] = "inductor"
    reduce: Reduction | None = None
    fallback: Literal["warn", "error"] = "warn"
    symmetric_memory: Literal["auto"] | bool | ByteCount = "auto"
    cuda_graphs: Literal["auto"] | bool = "auto"
    schedule: Schedule | Literal["auto"] | None = "auto"
    memory_budget: Budget | None = None
    rounding: Rounding = "needed"
    plan: str | Path | None = None
    offload: OffloadMode | list[OffloadKind] = "auto"
    host_memory_budget: Budget | None = None
    log_level: LogLevel | None = field(default=None, compare=False)  # a module is not sharded anew for it

    def __post_init__(self) -> None:
        if self.cuda_graphs is True and (others := self._without_graphs):
            raise ValueError(
                f"CompileConfig(cuda_graphs=True, {others[0]}={getattr(self, others[0])!r}): what runs at such a "
                "setting cannot be recorded. Leave one of them out, or use cuda_graphs='auto'."
            )
        # One form for each: settings are compared, and written to plan files.
        self.memory_budget = as_fraction(self.memory_budget)
        self.host_memory_budget = as_fraction(self.host_memory_budget)
        self.plan = None if self.plan is None else str(self.plan)

    @property
    def offloading(self) -> Offloading:
        """The mode of each kind of tensors that `offload` names."""
        return Offloading.of(self.offload)

    def reduction(self, stage: int) -> Reduction | Literal["auto"]:
        """The time at which gradients are reduced under a ZeRO stage; ``"auto"`` only where plans are made."""
        if self.reduce is None and self.rounding == "any" and stage == 3:
            return "auto"
        return self.reduce or ("boundary" if stage == 1 else "every")

    @property
    def planned(self) -> list[dict[str, Any]]:
        """The entries of a `schedule` of the user's own."""
        return self.schedule if isinstance(self.schedule, list) else []

    def symmetric_threshold(self, pays: bool, tight: bool) -> int:
        """Bytes of a gathered group from which on copy engines move it; 0: none.

        Args:
            pays: Whether the ranks that share parameters are GPUs of one host, with an NCCL that can do it, and the
                module is large.
            tight: Whether shards or optimizer states may wait in host memory.
        """
        if self.symmetric_memory == "auto":
            wanted = pays and self.memory_budget is None and not tight and self.cuda_graphs is not True
        elif isinstance(self.symmetric_memory, bool):
            wanted = self.symmetric_memory
        else:
            return parse_budget(self.symmetric_memory, total=1, name="symmetric_memory")
        return SYMMETRIC_THRESHOLD if wanted else 0

    @property
    def replays(self) -> Literal["auto"] | bool:
        """The setting `cuda_graphs`, or False where another setting rules graphs out."""
        return False if self._without_graphs else self.cuda_graphs

    @property
    def _without_graphs(self) -> list[str]:
        # They count, or move, what a graph would have as it was. What is decided by itself gives way to graphs.
        moves = {"symmetric_memory": self.symmetric_memory not in (False, "auto")}
        moves["offload"] = self.offloading.parameters == "all"
        return [name for name, set_so in moves.items() if set_so]

    def in_folder(self, root: str) -> CompileConfig:
        """The settings of a run whose root directory is `root`, in which what is ``"auto"`` has its place."""
        plan = os.path.join(root, "deepcompile_plan.json") if self.plan == "auto" else self.plan
        return replace(self, plan=plan)
