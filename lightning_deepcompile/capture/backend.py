"""The compiler backend of the strategy's steps: turns Dynamo's graphs into executables.

Nothing here communicates, and nothing here may: a compile hook runs when a rank happens to compile, and ranks need not
compile at the same moment (one finds a cached artefact, or meets a new shape first).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from lightning_deepcompile import compat
from lightning_deepcompile.capture.causal_mask import recognize_causal_masks
from lightning_deepcompile.capture.chunked_loss import chunk_losses
from lightning_deepcompile.capture.chunked_mlp import chunk_mlps
from lightning_deepcompile.capture.entry import Entry
from lightning_deepcompile.capture.frames import Frame, Frames
from lightning_deepcompile.capture.graph_checks import check_graph, check_losses_are_apart
from lightning_deepcompile.capture.inlining import computed_with, inline_blocks
from lightning_deepcompile.capture.lookups import LookupExchange
from lightning_deepcompile.capture.partition import (
    count_saved_parameters,
    hide_from_passes,
    partition,
    show_to_compiler,
)
from lightning_deepcompile.capture.scheduling import Scheduling
from lightning_deepcompile.capture.templates import call_repeats, tracing_blocks
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.tracing import Chunkable, Tracing
from lightning_deepcompile.program.codegen import Guard
from lightning_deepcompile.program.derive import derive
from lightning_deepcompile.program.executable import UNCHECKPOINTED, Executable
from lightning_deepcompile.program.graph import is_gather, is_reduce
from lightning_deepcompile.program.lower import RegionCompiler, lower
from lightning_deepcompile.program.program import LOCAL_ID, DerivedBlock, ParamInfo
from lightning_deepcompile.program.program_graphs import ProgramGraphs, examine
from lightning_deepcompile.program.replay import Replays
from lightning_deepcompile.program.saved import mark_saved, number_saved
from lightning_deepcompile.program.schedule import ProgramKind, Schedule
from lightning_deepcompile.ranks.order import Agreement
from lightning_deepcompile.runtime.ops import gathers_of
from lightning_deepcompile.sharding.gradients import GradientSession
from lightning_deepcompile.sharding.shards import ShardedModel

_CHUNK: dict[Chunkable, Callable[..., int]] = {"losses": chunk_losses, "mlps": chunk_mlps}


@dataclass(eq=False, repr=False)
class Capture:
    """Compiles graphs that read sharded parameters.

    Args:
        config: Settings.
        model: The sharded model.
        runtime: ``_C.Runtime`` that executes the programs.
        gradients: Brackets backward passes.
        agreement: Compares a program with the other ranks' before it runs.
        stage: ZeRO stage under which the runtime executes the programs.
        progress: Told what is being compiled.
        choose_activations: Which saved tensors are offloaded, by a forward program's schedule; by default none.
        lookups: Which embeddings are looked up by exchange; None: none.
        guard: What some programs call for a region; see `Executable`.
        nothing_moves: Whether parameters are read where they are, and gradients stay where they are written, if they
            are whole: graphs without equal blocks are not cut then.
        replays: Replays programs as CUDA graphs; None: they run.

    Attributes:
        regions: Compiles regions, each distinct one once.
        params: Parameters by id, and values derived of them.
        frames: The captured graphs, and their programs.
        scheduling: Schedules the programs.
        entry: Prepares each run of a program.
        saved_parameters: Gathered parameters among saved activations; a full parameter there defeats sharding.
        exchanged: Look-ups of rows that were made exchanges.
        blocks: Blocks that were not traced by themselves but with their equals.
        tracing: How the step is traced, from its next trace on.
        traces_once: Whether equal blocks share one trace.
        several_backward_passes: Whether a step has several, with optimizers' steps in between.
        measures: Called with what is compiled while a step is measured, so that it runs as on other ranks; None: no
            step is.
        seconds: Time spent in compilation after Dynamo: tracing with AOTAutograd, partitioning, regions.
    """

    config: CompileConfig
    model: ShardedModel
    runtime: Any
    gradients: GradientSession
    agreement: Agreement
    stage: int = 3
    progress: Callable[[str], None] | None = None
    choose_activations: Callable[[Schedule], frozenset[int]] | None = None
    lookups: LookupExchange | None = None
    guard: Guard | None = None
    nothing_moves: bool = False
    replays: Replays | None = None
    saved_parameters: int = 0
    causal_masks: int = 0
    exchanged: int = 0
    blocks: int = 0
    seconds: float = 0.0
    tracing: Tracing = field(default_factory=Tracing)
    traces_once: bool = True
    several_backward_passes: bool = False
    measures: Callable[[Executable], None] | None = None
    _lowered: int = 0  # numbers of graphs for the runtime; those of dropped ones are not reused
    _timing: bool = False

    def __post_init__(self) -> None:
        self.regions = RegionCompiler(self.config.region_backend)
        activations = self.config.offloading.activations
        settings = PlanSettings(
            # By itself, nothing is offloaded before sizes say that it must.
            offload_activations="none" if self.config.memory_budget is None and activations == "auto" else activations,
            reduce=self.config.reduction(self.stage),
            rounding=self.config.rounding,
        )
        self.params = {p.ds_id: p.info for p in self.model.parameters}
        self.frames = Frames(self.params)
        self.scheduling = Scheduling(self.frames, settings, self.agreement, self.runtime, self.choose_activations)
        self.entry = Entry(self.frames, self.agreement, self.model.derived, self.replays)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """The backend function that ``torch.compile`` calls."""
        frame = self.frames.add(compat.reasons_of(gm))
        if self.config.region_backend == "inductor" and any(getattr(x, "is_cuda", False) for x in example_inputs):
            compat.start_compile_workers()  # they sleep if nothing was compiled for a while
        captured = gm
        with self._timed():
            gathers_of(gm)
            names = {ds_id: info.name for ds_id, info in self.params.items()}
            check_graph(gm, example_inputs, names, self.model.replicated)
            if self.several_backward_passes:
                check_losses_are_apart(gm)
            self.causal_masks += recognize_causal_masks(gm)
            if self.lookups is not None:
                self.exchanged += self.lookups.rewrite(gm)
            for what, chunk in _CHUNK.items():
                if chunks := self.tracing.chunks(what):
                    frame.chunked[what] = chunk(gm, chunks)
                elif self.config.rounding != "same":
                    frame.whole[what] = chunk(gm, 0)
            eager = self.config.region_backend == "eager"
            if self.traces_once:
                gm, frame.blocks = call_repeats(
                    gm,
                    lambda id_: self.params[id_].block,
                    eager=eager,
                    uncheckpointed=self.tracing.uncheckpointed if self.config.rounding == "any" else None,
                    sparing=self.tracing.sparing,
                )
                self.blocks += len(frame.blocks)
            compile_graph = compat.held_weakly(self._compile)
            with tracing_blocks(frame.blocks):
                compiled = compat.capture(
                    gm,
                    example_inputs,
                    forward=functools.partial(compile_graph, frame, "forward"),
                    backward=functools.partial(compile_graph, frame, "backward"),
                    inference=functools.partial(compile_graph, frame, "inference"),
                    partitioner=functools.partial(_partition, frame, self.tracing.sparing),
                    eager=eager,
                )
            return compiled if frame.ids else _unless_elsewhere(self, compiled, captured)

    def retrace(self, tracing: Tracing) -> None:
        """Drops the graphs of training steps, to trace by `tracing`; call between steps, on all ranks alike."""
        self.tracing = tracing
        self.frames.drop_training()
        self.entry.forget()
        self.scheduling.plan = {}
        self.agreement.forget()
        self.runtime.parameters.invalidate()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        # As a rule a backward graph compiles inside a backward pass; it compiles inside __call__ if it saves symbolic
        # sizes.
        if self._timing:
            yield
            return
        self._timing, start = True, time.perf_counter()
        # Compiling makes millions of objects that stay: garbage collection would take a tenth of the time.
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
            self._timing = False
            self.seconds += time.perf_counter() - start

    def new_graph_id(self) -> int:
        """Returns a new runtime id for a graph."""
        self._lowered += 1
        return self.runtime.serial << 32 | self._lowered - 1

    def _inline(self, frame: Frame, kind: ProgramKind, gm: fx.GraphModule) -> None:
        # Not earlier: AOTAutograd copies and prints its graphs, which takes long for a step of many blocks.
        inline_blocks(gm, frame.blocks)
        if kind == "inference":
            hide_from_passes(gm)
            compat.inference_joint_passes(gm)
            show_to_compiler(gm)
        elif kind == "forward":
            self.saved_parameters += count_saved_parameters(gm, frame.outputs)
            frame.saved = number_saved(gm, frame.outputs, frame.computed)
        else:
            mark_saved(gm, frame.saved)

    def _compile(
        self, frame: Frame, kind: ProgramKind, gm: fx.GraphModule, inputs: Sequence[Any]
    ) -> compat.BoxedCallable:
        graph_id = self.new_graph_id()
        with self._timed():
            self._inline(frame, kind, gm)
            derived, inputs = self._derive(gm)
            examined = None if self.replays is None else examine(gm, self.replays.device)  # lowering rewrites it
            # A backward program also releases parameters that the forward program left, whether it reads them or not.
            frame.ids |= {n.args[1] for n in gm.graph.nodes if is_gather(n) or is_reduce(n)}
            name = f"frame{frame.index}.{kind}"
            base = lower(
                gm,
                name=name,
                kind=kind,
                graph_id=graph_id,
                params=self.params,
                compile_region=self.regions,
                progress=self.progress,
                cuts=self._cuts(frame),
                fuses=self.regions.backend == "inductor",
                frame=frame.index,
            )
            base = replace(base, members=tuple(sorted(i & LOCAL_ID for i in frame.ids)), derived=derived)
            if derived:
                base = replace(base, history=("derive", *base.history))
            if self.tracing.uncheckpointed:
                base = replace(base, history=(*base.history, UNCHECKPOINTED))
            self.runtime.setup.register_graph(graph_id, sorted(frame.ids), stage=self.stage, reduce="every")
            if kind == "backward":
                self.runtime.setup.register_graph(
                    base.boundary_id, sorted(frame.ids), stage=self.stage, reduce="boundary"
                )
            before = _nothing
            if kind == "backward":
                before = compat.held_weakly(self.gradients.begin)
            elif kind == "forward":
                before = functools.partial(compat.held_weakly(self.entry.note_first), frame)
            program = self.scheduling.scheduled(frame, base)
            enter = compat.held_weakly(self.entry.enter)
            graphs = None
            if self.replays is not None and examined is not None and kind != "inference":
                graphs = ProgramGraphs(self.replays, frame.replayed, base, frame.outputs, examined)
            executable = Executable(base, program, before, enter, self.guard, graphs, inputs)
        self.frames.add_program(frame, executable)
        if self.measures is not None and kind != "inference":
            self.measures(executable)
        return executable

    def _derive(self, gm: fx.GraphModule) -> tuple[tuple[DerivedBlock, ...], list[Tensor]]:
        """Lets `gm` gather what is narrower than parameters, if anything travels; see `derive`.

        Returns:
            What derives it, and the inputs that `gm` has now in addition.
        """
        shards = self.model.ranks.shards
        if shards == 1:
            return (), []
        own = {ds_id: self.params[ds_id] for ds_id in self.model.by_id}
        blocks = derive(gm, own, shards, functools.partial(self.regions, kind="inference", rounds=True))
        inputs = self.model.derived.add(blocks)
        for value in (value for block in blocks for value in block.values if value.is_gathered):
            source = own[value.source]
            numel = math.prod(value.shape[1:]) * self.model.by_id[value.source].layout.rows_padded * shards
            name = f"{source.name} as {str(value.dtype).removeprefix('torch.')} {value.number}"
            self.params[value.id] = ParamInfo(value.id, name, source.block, numel * value.dtype.itemsize, value.dtype)
        return blocks, inputs

    def _cuts(self, frame: Frame) -> bool:
        """Returns whether the graphs of `frame` are cut, either for communication or to compile equal blocks once."""
        whole = self.model.derived.source_of
        return not self.nothing_moves or bool(frame.blocks) or not all(whole(i).is_whole for i in frame.ids)


def _partition(
    frame: Frame, sparing: bool, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    forward, backward = partition(gm, joint_inputs, sparing=sparing, **kwargs)
    frame.outputs = kwargs["num_fwd_outputs"]
    frame.computed = computed_with(backward, frame.blocks)
    return forward, backward


def _unless_elsewhere(capture: Capture, compiled: Callable[..., Any], graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a graph without parameters, which Dynamo may also run in steps of another module.

    If a function was compiled too often, Dynamo uses any fitting compiled code of the functions that it calls, whoever
    compiled it. A graph with parameters never fits another module's.
    """
    held_weakly = weakref.ref(capture)

    def run(*args: Any) -> Any:
        alive = held_weakly()
        return (graph if alive is None or not alive.entry.in_step else compiled)(*args)

    return run


def _nothing() -> None:
    """Does nothing: inference needs no preparation."""
