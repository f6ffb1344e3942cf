"""Settings of the compiler and of the runtime, as they appear in code, in YAML and on the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from lightning_deepcompile.console import LogLevel
from lightning_deepcompile.options import checked
from lightning_deepcompile.plan.budget import Budget, ByteCount, as_fraction, parse_budget
from lightning_deepcompile.plan.offload import Offloading, OffloadKind, OffloadMode
from lightning_deepcompile.plan.pass_schedule import PassSchedule
from lightning_deepcompile.plan.settings import Reduction, Rounding
from lightning_deepcompile.runtime.dc import SYMMETRIC_THRESHOLD

Schedule = Annotated[list[dict[str, Any]], PassSchedule()]


@checked
@dataclass
class CompileConfig:
    """Settings of how the step is compiled and how its programs are scheduled.

    Args:
        region_backend: Compiler of the compute between two collectives. ``"inductor"`` is fast. ``"eager"`` runs the
            captured operators one by one. It is slow, and shows whether a problem comes from the compiler or from this
            package.
        reduce: Time at which gradients of accumulated micro-batches are reduced. ``"every"``: in every micro-batch.
            ``"boundary"``: once, in the last micro-batch; until then they are added up unsharded, in the parameters'
            dtype. This needs less communication, and the memory of unsharded gradients. None: at the boundary at stage
            1, else in every micro-batch; with ``rounding="any"`` at stage 3, planning decides for each block by time
            and memory.
        fallback: Treatment of functions that cannot be compiled, or that were compiled too often. ``"warn"``: the
            function runs as Python, with correct results, at about the speed of eager FSDP. One warning names it and
            the reason. ``"error"``: training ends with an error.
        symmetric_memory: Whether the GPUs' copy engines gather large groups of parameters. They write directly into the
            memory into which the other GPUs of the host gather. Such gathers take about as long as those by NCCL's
            kernels, and leave all thread blocks to compute. They need NCCL 2.28. Gathered parameters keep their memory
            until the next plan, outside of torch's allocator. If a rank dies or hangs in such a gather, the processes
            of the other ranks end, as a waiting copy engine receives no error. True: for groups of at least 32 MiB
            (gathered); bytes or a text like ``"64MiB"``: another bound; False: never. ``"auto"``: as True if all GPUs
            that share the parameters are of one host, the module has at least a billion parameters, and there is
            neither a memory budget nor offloading nor ``cuda_graphs=True``. Then there are no CUDA graphs. With ranks
            on several hosts, and on CPU, True has no effect, and one warning says why.
        cuda_graphs: Whether to record each program of a training step as a CUDA graph, with its gathers and reductions,
            and also clipping by norm and the step of a fused optimizer. One call then launches the whole graph. This
            helps small models, whose host is slower than their device. Graphs are recorded after planning, when
            programs have run a few times. They keep their memory between steps: gradients, activations and intermediate
            values. A program runs without a graph if it reads values on the host, copies activations to it, or uses the
            batch statistics of other ranks; the summary says why. ``"auto"``: if devices wait for their hosts, memory
            suffices, and a trial shows that graphs are faster. No effect on CPUs.
        schedule: Passes that plan the programs, and when: a list of ``{"step": n, "passes": [...]}``. Steps are
            optimizer steps since training started or resumed. The entry of step 0 applies from the first step on. Each
            later entry profiles steps n and n + 1, plans with the measurements, and swaps the programs before step
            n + 2. Passes are names (``zero3``, ``prefetch``, ``fuse``, ``offload_activation``, ``offload_optimizer``,
            ``unshard``, ``keep_whole``, ``reduce_late``, ``proactive_prefetch``) or ``"package.module:name"`` of your
            own. ``"auto"``: `plan.DEFAULT_SCHEDULE`, which plans at step 3. None: nothing is measured, and programs
            stay as they are compiled, with the least memory.
        memory_budget: Memory of each device that plans may use: bytes (at least 1 MiB), a text like ``"24GiB"`` or
            ``"90%"``, or a fraction. None: 0.9 of the device, less the activations of the profiled step, so that later
            batches may be up to twice as large. Any other value is a limit at stage 3: if no plan fits, training stops
            with an error that says what would fit. Where torch's allocator does not count (CPU), only the memory
            between regions is known.
        offload: Tensors that are kept in host memory while the device does not need them: optimizer states, saved
            tensors (activations), and at stage 3 shards of parameters. Gradients stay on the device. ``"auto"``: as
            much as exceeds the memory budget, decided before a step runs, and nothing if all fits. ``"none"``: nothing.
            ``"all"``: all of them. A list of ``"states"``, ``"activations"`` and ``"parameters"``: all tensors of these
            kinds, and no others. Results are bit-identical.
        host_memory_budget: Memory of each node for offloaded tensors, shared by its ranks: bytes, a text like
            ``"400GiB"`` or ``"80%"``, or a fraction of the memory that is available when training is set up. None is
            0.8.
        rounding: Whether last bits of results may change. They change with losses and feed-forward layers in chunks of
            tokens, with operators or checkpointed blocks that are recomputed, or no longer recomputed, and with
            gradients that are reduced later or together: each adds numbers up in another order. ``"same"``: no plan
            changes a bit, even if the alternative is out of memory. ``"needed"``: only if a step does not fit
            otherwise; one line says so, and the step is traced once more. ``"any"``: also if a plan saves time by it.
            Plans then keep activations that the model checkpoints, merge reductions, and reduce accumulated gradients
            once (stage 3).
        plan: File of a plan. If it exists and fits, training starts with its schedules and its places of optimizer
            states, and measures nothing. Otherwise the run measures, and writes its plan to the file. ``"auto"``:
            ``deepcompile_plan.json`` in the Trainer's root directory.
        log_level: Lowest level of messages from the logger ``lightning_deepcompile``: ``"debug"``, ``"info"``,
            ``"warning"`` or ``"error"``. The environment variable ``DEEPCOMPILE_LOG`` takes precedence. None: the
            logger's own level, or ``"info"``.

    Raises:
        ValueError: If a value has another type, is no choice, or is out of range. The message names the argument, the
            value seen and the allowed values.
        TypeError: For an unknown argument. The message names the most similar one.
    """

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
