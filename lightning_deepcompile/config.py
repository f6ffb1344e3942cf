"""Settings of the compiler and of the runtime, as they appear in code, in YAML and on the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from lightning_deepcompile.console import LogLevel
from lightning_deepcompile.options import AtLeast, checked
from lightning_deepcompile.plan.budget import Budget, ByteCount, as_fraction, parse_budget
from lightning_deepcompile.plan.offload import Offloading, OffloadKind, OffloadMode
from lightning_deepcompile.plan.pass_schedule import PassSchedule
from lightning_deepcompile.plan.settings import Reduction, Rounding
from lightning_deepcompile.runtime.dc import SYMMETRIC_THRESHOLD

__all__ = ["CompileConfig"]

Schedule = Annotated[list[dict[str, Any]], PassSchedule()]

_PACK_BELOW, _MANY_RANKS = 128 * 2**10, 64
"""Bytes of the largest shards that travel packed, and from how many GPUs on. Measured on CPU (docs/benchmarks.md): the
bound is the same for 2, 4 and 8 ranks. Eight GPUs gather large layers faster unpacked; 64 were not there to measure."""


@checked
@dataclass
class CompileConfig:
    """How the step is compiled and how its program is scheduled.

    Args:
        region_backend: What compiles the compute between two collectives. ``"inductor"`` is the fast one; ``"eager"``
            runs the captured operators one by one: slow, and useful to tell a compiler problem from one of ours.
        prefetch_blocks: How many blocks ahead of its use a block's parameters are gathered. 0 gathers right before the
            use; each block ahead costs the memory of one gathered block.
        reduce: When gradients of accumulated micro-batches travel: ``"every"`` micro-batch's are reduced, or they are
            added up unsharded, in the parameters' dtype, and reduced at the ``"boundary"``, with the last one: less
            communication for the memory of unsharded gradients. None: by stage, the boundary at stage 1 alone; with
            ``rounding="any"``, planning decides at stage 3, for each block, by time and memory.
        reduce_window: How many groups of full gradients may wait for their reduce-scatter before the compute stream
            waits for the oldest. Bounds the memory that gradients take during backward.
        early_gathers: Launch the gathers that open a step when the optimizer has stepped, while the host is busy with
            the trainer (stage 3, automatic optimization). Parameters that hooks write to in between are gathered again;
            only writes through ``parameter.to_local().data`` that begin after the second step are not seen in time, and
            end training with an error.
        head_start: Launch them even while the optimizer steps, which begins with what they read; plans open a step with
            as many of them as that hides. For PyTorch's element-wise optimizers. What an optimizer's own hooks write to
            parameters is treated like later writes.
        keep_last_block: Keep the last gathered block of a forward pass for the backward pass that starts with it,
            instead of gathering it twice in a row.
        recompile_limit: How often Dynamo may compile one function anew (new shapes, changed attributes) before it is
            run as it is, with one warning.
        fallback: What happens to a function that cannot be compiled, or was compiled too often. ``"warn"``: it runs as
            Python, as right as ever and about as fast as eager FSDP, with one warning that says which and why.
            ``"error"``: that ends training.
        max_ctas: Upper limit of GPU thread blocks that a NCCL collective may occupy; 0 leaves the choice to NCCL.
        symmetric_memory: Leave gathers of large groups of parameters to the GPUs' copy engines, which write straight to
            where the other GPUs of the host gather to. They take about as long as NCCL's kernels, and no thread blocks
            from compute that runs beside them. NCCL does it, from 2.28 on. What is gathered so stays allocated until
            the next plan, outside of torch's allocator. A rank that dies or hangs in such a gather ends the other
            ranks' processes, as no error reaches a copy engine that waits. True: groups of at least 32 MiB (gathered);
            bytes or a text like ``"64MiB"``: another bound; False: none. ``"auto"``: as True where all GPUs that share
            the parameters are of one host, the module has a billion parameters or more, and there is neither a memory
            budget nor offloading nor ``cuda_graphs=True``; then there are no CUDA graphs. Where ranks are on several
            hosts, and on CPU, one warning says why and nothing changes.
        pack_shards: Gather what is small in one operation, packed: a collective costs its latency once, whatever it
            carries, and a copy on either side; with many ranks every shard is small. ``"auto"``: shards of at most 128
            KiB, on CPU, and on GPUs from 64 ranks on that share the parameters, unless there is a memory budget or
            offloading: while it travels, what is packed takes its memory twice. Bytes, or a text like ``"1MiB"``, for
            another bound, False for none. So do gradients, but on more than two CPU ranks, where plans regroup them and
            the order in which ranks are added up would change: there with ``rounding="any"`` alone.
        embedding: How the rows of an embedding come to a rank at stage 3. ``"gather"``: with its whole table, as other
            parameters do. ``"exchange"``: the ranks that hold the rows look them up, and get the rows of the gradient
            back, wherever nothing else reads the table; with few tokens per rank that is a small part of the bytes. A
            batch of which some rank has more tokens than that pays for takes the whole table. ``"auto"``: exchange for
            tables of at least 64 MiB (gathered) of which each rank holds at least 8192 rows. Tied tables, and all under
            hybrid sharding, are gathered. Processes agree on the most tokens that any has in every pass. Gradients of
            rows are added up in fp32, which may change their last bits.
        recognize_causal_masks: Replace an attention mask that provably is the causal one by ``is_causal=True``, which
            admits the flash attention kernels.
        cuda_graphs: Record each program of a training step, with its gathers and reductions, clipping by norm and the
            step of a fused optimizer as CUDA graphs, and launch each as a whole: the host of a small model is slower
            than its device. They are recorded when they have run a few times and planning is done. They keep their
            memory between steps: gradients, activations, and what is computed in between. What reads values on the
            host, copies activations to it, or takes part in other ranks' batch statistics runs as before; the summary
            says why. ``"auto"``: where devices wait for their hosts, there is memory for it, and it turns out to be
            faster. CPUs have no graphs.
        trace_blocks_once: Trace blocks that are equal (the layers of a transformer) once, and write them out again:
            the first step begins in a fraction of the time. Blocks that draw random numbers, write to buffers or meet
            symbolic sizes are traced one by one all the same.
        schedule: Which passes plan the programs, and when: a list of ``{"step": n, "passes": [...]}``, in optimizer
            steps since the start or the resuming. The entry of step 0 applies from the first step on. Each later one
            profiles steps n and n + 1, plans with what they measured, and swaps the programs before step n + 2.
            Passes are names (``zero3``, ``prefetch``, ``fuse``, ``offload_activation``, ``unshard``, ``keep_whole``,
            ``reduce_late``, ``proactive_prefetch``) or ``"package.module:name"`` of your own. ``"auto"``:
            `plan.DEFAULT_SCHEDULE`, which plans at step 3. None: nothing is measured; programs stay as they are
            compiled, with the least memory.
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
        offload_chunk: Most bytes of states (and shards) that step together. Three such buffers are on the device while
            the optimizer steps, or more if a plan finds memory for them. A parameter whose states are larger is a chunk
            of its own, and the last to leave.
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
        TypeError: For an argument that there is not; the message names the one that is most like it.
    """

    region_backend: Literal["inductor", "eager"] = "inductor"
    prefetch_blocks: Annotated[int, AtLeast(0)] = 2
    reduce: Reduction | None = None
    reduce_window: Annotated[int, AtLeast(0)] = 2
    early_gathers: bool = True
    head_start: bool = True
    keep_last_block: bool = True
    recompile_limit: Annotated[int, AtLeast(1)] = 16
    fallback: Literal["warn", "error"] = "warn"
    max_ctas: Annotated[int, AtLeast(0)] = 0
    symmetric_memory: Literal["auto"] | bool | ByteCount = "auto"
    pack_shards: Literal["auto", False] | ByteCount = "auto"
    embedding: Literal["auto", "gather", "exchange"] = "auto"
    recognize_causal_masks: bool = True
    cuda_graphs: Literal["auto"] | bool = "auto"
    trace_blocks_once: bool = True
    schedule: Schedule | Literal["auto"] | None = "auto"
    memory_budget: Budget | None = None
    rounding: Rounding = "needed"
    plan: str | Path | None = None
    offload: OffloadMode | list[OffloadKind] = "auto"
    host_memory_budget: Budget | None = None
    offload_chunk: ByteCount = "256MiB"
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
        """How each kind of what `offload` names is offloaded."""
        return Offloading.of(self.offload)

    def reduction(self, stage: int) -> Reduction | Literal["auto"]:
        """When gradients are reduced under a ZeRO stage; ``"auto"`` only where plans are made."""
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

    def pack_below(self, device_type: str, ranks: int, tight: bool) -> int:
        """Bytes of the largest shard that travels packed with others; 0: none does.

        Args:
            device_type: ``"cuda"`` or ``"cpu"``.
            ranks: That share the parameters.
            tight: As for `symmetric_threshold`.
        """
        if self.pack_shards is False:
            return 0
        if self.pack_shards != "auto":
            return parse_budget(self.pack_shards, total=1, name="pack_shards")
        if self.memory_budget is not None or tight:
            return 0
        return _PACK_BELOW if device_type == "cpu" or ranks >= _MANY_RANKS else 0

    def packs_reductions(self, device_type: str, ranks: int) -> bool:
        """Whether gradients travel packed, too.

        In which order more than two ranks are added up depends on where in a message they are, so what is packed
        together must stay the same when a plan takes over. On GPUs plans do not regroup gradients by themselves
        (`plan.reductions.may_merge`).

        Args:
            device_type: ``"cuda"`` or ``"cpu"``.
            ranks: That add up gradients.
        """
        return ranks <= 2 or device_type != "cpu" or self.rounding == "any"

    @property
    def replays(self) -> Literal["auto"] | bool:
        """As `cuda_graphs`, where the other settings allow for it."""
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
