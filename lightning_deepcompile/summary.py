"""Counters of a strategy, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_deepcompile.program.printer import format_bytes, format_count


@dataclass(frozen=True)
class Summary:
    """Counters of a strategy.

    Args:
        world_size: Number of ranks that share the parameters.
        replicas: The number of such groups of ranks (more than 1 with hybrid sharding).
        communicator: The communicator of gathers and reductions: ``"nccl"`` or ``"process_group"``.
        graphs: Graphs that Dynamo captured (1 per distinct step without graph breaks).
        programs: Programs made of them (forward, backward, inference).
        regions_compiled: Distinct regions, each compiled once.
        regions_total: Regions in all programs.
        gathers_per_step: Parameters gathered by the last optimizer step, all of its micro-batches.
        gather_groups_per_step: Collective groups that they travelled in.
        reductions_per_step: Gradients reduced by the last optimizer step, all of its micro-batches.
        reduce_groups_per_step: Collective groups that they travelled in.
        sharded_bytes_per_rank: Bytes of parameter shards on this rank.
        saved_parameters: Full parameters saved for backward; anything but 0 is a defect.
        causal_masks: Attention calls whose mask was recognised as the causal one.
        compile_seconds: Time in the backend (tracing with AOTAutograd, partitioning, regions), Dynamo's own excluded.
        region_compile_seconds: Part of it that Inductor took for regions.
        size_graphs: Inputs of which new sizes cost graphs, with their sizes and the number of graphs.
        derived_parameters: Parameters in whose place programs gather values of fewer bytes, such as FP8.
        exchanged_lookups: Embeddings whose rows are looked up on the ranks that hold them.
        chunked_losses: Losses that are computed in pieces, each without whole logits.
        chunked_mlps: Feed-forward layers that are computed in pieces.
        offloaded_bytes: Optimizer states of this rank in host memory.
        offload_moved_bytes: Bytes of them that the last optimizer step copied, to the device and back.
        offload_reason: The reason; empty before the decision, and without offloading.
        symmetric_gathers_per_step: Of the groups that were gathered, those that copy engines moved.
        symmetric_bytes: Device memory that these are gathered to; PyTorch's allocator does not count it.
        offloaded_activation_bytes: Saved tensors that the last training step copied to host memory, and back.
        offloaded_parameter_bytes: Of the shards on this rank, those in host memory, padding included.
        fetched_parameter_bytes: What the last training step copied of them to the device for gathers.
        offload_parameters_reason: Why so many; empty where none may leave.
        memory_plan: What was decided before the first step, where it did not fit as it is; else empty.
        peak_bytes: The most device memory in use since the module was sharded. Planning starts the allocator's peak
            anew when it measures: ``torch.cuda.max_memory_allocated()`` is of the time since then. 0 on CPUs.
        replayed: Programs, optimizers' steps and pieces of clipping that were replayed as CUDA graphs.
        not_replayed: Those that were not, though they should have been, ``name: reason``.
        optimizers: The way in which each optimizer steps, and the reason.
        rank_skew_seconds: Mean time for which the rank with the least work waits in a step for the one with the most,
            measured when the last plan was made; 0 before.
        uncompiled: Functions that run as Python, ``name (file:line): reason``.
        uncompiled_share: The share of the host's time in the last training step (forward and backward) that was not
            spent in compiled programs; 0 if all code is compiled.
    """

    world_size: int
    replicas: int
    communicator: str
    graphs: int
    programs: int
    regions_compiled: int
    regions_total: int
    gathers_per_step: int
    gather_groups_per_step: int
    reductions_per_step: int
    reduce_groups_per_step: int
    sharded_bytes_per_rank: int
    saved_parameters: int
    causal_masks: int
    compile_seconds: float
    region_compile_seconds: float
    size_graphs: tuple[str, ...] = ()
    derived_parameters: int = 0
    exchanged_lookups: int = 0
    chunked_losses: int = 0
    chunked_mlps: int = 0
    offloaded_bytes: int = 0
    offload_moved_bytes: int = 0
    offload_reason: str = ""
    offloaded_activation_bytes: int = 0
    symmetric_gathers_per_step: int = 0
    symmetric_bytes: int = 0
    offloaded_parameter_bytes: int = 0
    fetched_parameter_bytes: int = 0
    offload_parameters_reason: str = ""
    memory_plan: str = ""
    peak_bytes: int = 0
    replayed: int = 0
    not_replayed: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    rank_skew_seconds: float = 0.0
    uncompiled: tuple[str, ...] = ()
    uncompiled_share: float = 0.0

    @property
    def _ranks(self) -> str:
        return str(self.world_size) if self.replicas == 1 else f"{self.replicas} times {self.world_size}"

    @property
    def _gathers(self) -> str:
        text = f"{self.gathers_per_step} in {format_count(self.gather_groups_per_step, 'group')}"
        symmetric = self.symmetric_gathers_per_step
        return f"{text}, {symmetric} of them by copy engines" if symmetric else text

    def __str__(self) -> str:
        reductions = f"{self.reductions_per_step} in {format_count(self.reduce_groups_per_step, 'group')}"
        rows = [
            ("ranks", f"{self._ranks} ({self.communicator})"),
            ("graphs", f"{self.graphs} ({format_count(self.programs, 'program')})"),
            ("regions compiled/total", f"{self.regions_compiled}/{self.regions_total}"),
            ("gathers a step", self._gathers),
            ("reductions a step", reductions),
            ("sharded bytes per rank", format_bytes(self.sharded_bytes_per_rank)),
            ("compile time", f"{self.compile_seconds:.1f} s ({self.region_compile_seconds:.1f} s in regions)"),
        ]
        rows += [("graphs of other sizes", text) for text in self.size_graphs]
        rows += [("optimizer steps", text) for text in self.optimizers]
        if self.memory_plan:
            rows.append(("memory", self.memory_plan))
        if self.peak_bytes:
            rows.append(("most device memory", format_bytes(self.peak_bytes)))
        if self.rank_skew_seconds:
            waits = "a step, the rank with the least work waits for the one with the most"
            rows.append(("rank skew", f"{self.rank_skew_seconds * 1e3:.1f} ms {waits}"))
        if self.uncompiled:
            share = f"{self.uncompiled_share:.0%} of the host's time in a step"
            rows.append(("uncompiled functions", f"{len(self.uncompiled)}, {share}"))
            rows += [("", function) for function in self.uncompiled]
        if self.replayed or self.not_replayed:
            rows.append(
                (
                    "CUDA graphs",
                    f"{self.replayed} of {self.replayed + len(self.not_replayed)} programs, optimizers and clipping",
                )
            )
            rows += [("", program) for program in self.not_replayed]
        if self.derived_parameters:
            rows.append(("gathered narrower", format_count(self.derived_parameters, "parameter")))
        if self.exchanged_lookups:
            rows.append(("embeddings exchanged", str(self.exchanged_lookups)))
        if self.chunked_losses:
            rows.append(("losses in pieces", str(self.chunked_losses)))
        if self.chunked_mlps:
            rows.append(("MLPs in pieces", str(self.chunked_mlps)))
        if self.offload_reason and self.offloaded_bytes:
            moved = f"{format_bytes(self.offload_moved_bytes)} moved a step"
            rows.append(("offloaded states", f"{format_bytes(self.offloaded_bytes)}, {moved} ({self.offload_reason})"))
        if self.offloaded_activation_bytes:
            rows.append(("offloaded activations", f"{format_bytes(self.offloaded_activation_bytes)} a step"))
        if self.offload_parameters_reason and self.offloaded_parameter_bytes:
            moved = f"{format_bytes(self.fetched_parameter_bytes)} gathered a step"
            reason = self.offload_parameters_reason
            rows.append(("offloaded parameters", f"{format_bytes(self.offloaded_parameter_bytes)}, {moved} ({reason})"))
        return "\n".join(["DeepCompile", *(f"  {name:<24}{value}" for name, value in rows)])
