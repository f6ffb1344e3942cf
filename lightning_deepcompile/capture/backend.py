"""The compiler backend of the strategy's steps: turns Dynamo's graphs into executables.

Nothing here communicates, and nothing here may: a compile hook runs when a rank happens to compile, and ranks need not
compile at the same moment (one finds a cached artefact, or meets a new shape first).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import sys
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from lightning_deepcompile import compat
from lightning_deepcompile.capture.causal_mask import recognize_causal_masks
from lightning_deepcompile.capture.chunked_loss import chunk_losses
from lightning_deepcompile.capture.chunked_mlp import chunk_mlps
from lightning_deepcompile.capture.graph_checks import check_graph, check_losses_are_apart
from lightning_deepcompile.capture.inlining import computed_with, inline_blocks
from lightning_deepcompile.capture.lookups import LookupExchange
from lightning_deepcompile.capture.partition import (
    count_saved_parameters,
    hide_from_passes,
    partition,
    show_to_compiler,
)
from lightning_deepcompile.capture.templates import Instance, call_repeats, tracing_blocks
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.plan.copy_placement import COPY_AHEAD, fit_copies, offload_saved
from lightning_deepcompile.plan.pass_manager import DEFAULT_PASSES, Pass, apply_passes
from lightning_deepcompile.plan.recompute import Checkpoint
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.plan.tracing import Chunkable, Tracing
from lightning_deepcompile.program.codegen import Guard
from lightning_deepcompile.program.derive import derive
from lightning_deepcompile.program.executable import UNCHECKPOINTED, Executable
from lightning_deepcompile.program.graph import is_gather, is_reduce
from lightning_deepcompile.program.lower import RegionCompiler, lower
from lightning_deepcompile.program.program import LOCAL_ID, DerivedBlock, Gathers, ParamInfo, Program
from lightning_deepcompile.program.program_graphs import LastReplay, ProgramGraphs, examine
from lightning_deepcompile.program.replay import Replays
from lightning_deepcompile.program.reschedule import reschedule
from lightning_deepcompile.program.saved import mark_saved, number_saved
from lightning_deepcompile.program.schedule import ProgramKind, Schedule
from lightning_deepcompile.ranks.order import Agreement
from lightning_deepcompile.runtime.ops import gathers_of
from lightning_deepcompile.sharding.gradients import GradientSession
from lightning_deepcompile.sharding.shards import ShardedModel

__all__ = ["Capture"]

_log = logging.getLogger(__name__)

_FRAMEWORK = frozenset(["torch", "lightning_deepcompile", "contextlib", "functools", ""])
"""Packages whose code lies between a step's and its programs; code that PyTorch generates is of none."""

_CHUNK: dict[Chunkable, Callable[..., int]] = {"losses": chunk_losses, "mlps": chunk_mlps}


@dataclass
class _Frame:
    """One graph that Dynamo captured: its parameters and its programs.

    Args:
        index: Its number.
        ids: Parameters that it gathers or reduces.
        kept: Those that forward leaves gathered for backward.
        offloaded: Saved tensors that forward offloads.
        chosen: Those that it offloads unless a plan says otherwise; None until its forward program is compiled.
        executables: Its programs.
        blocks: Traced blocks that its graphs call until they are compiled.
        chunked: Number of losses and MLPs computed in pieces, by kind.
        whole: Number of those that could be, and are not yet.
        outputs: Number of the forward graph's outputs that are not saved for backward.
        computed: Names of the saved tensors that backward only computes with.
        saved: Numbers of the saved tensors that may be offloaded, by name.
        replayed: The state that its programs share when they are replayed.
    """

    index: int
    ids: set[int] = field(default_factory=set)
    kept: tuple[int, ...] = ()
    offloaded: frozenset[int] = frozenset()
    chosen: frozenset[int] | None = None
    executables: list[Executable] = field(default_factory=list)
    blocks: list[Instance] = field(default_factory=list)
    chunked: Counter[Chunkable] = field(default_factory=Counter)
    whole: Counter[Chunkable] = field(default_factory=Counter)
    outputs: int = 0
    computed: set[str] = field(default_factory=set)
    saved: dict[str, int] = field(default_factory=dict)
    replayed: LastReplay = field(default_factory=LastReplay)


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
        executables: One per program, in order of compilation.
        programs_compiled: Number of programs compiled so far, including dropped ones.
        saved_parameters: Gathered parameters among saved activations; a full parameter there defeats sharding.
        exchanged: Look-ups of rows that were made exchanges.
        blocks: Blocks that were not traced by themselves but with their equals.
        tracing: How the step is traced, from its next trace on.
        ahead: Regions between a copy of a saved tensor and what needs it, where no plan says it.
        traces_once: Whether equal blocks share one trace.
        several_backward_passes: Whether a step has several, with optimizers' steps in between.
        step_code: Of the step under way.
        before_first_run: Called before a training step's program first runs: with None on all ranks at the same place,
            when the first step is compiled; for programs that are compiled later, with the number of their graph.
        larger: Returns whether the batch of a rank is larger than all before in the step under way; None: it was asked.
        before_larger: Called on all ranks at the same place, with the number of the graph that is about to run, when
            that is so.
        measures: Called with what is compiled while a step is measured, so that it runs as on other ranks; None: no
            step is.
        reasons: Dynamo's reasons for each captured graph, by its number.
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
    executables: list[Executable] = field(default_factory=list)
    programs_compiled: int = 0
    saved_parameters: int = 0
    causal_masks: int = 0
    exchanged: int = 0
    blocks: int = 0
    seconds: float = 0.0
    tracing: Tracing = field(default_factory=Tracing)
    ahead: int = COPY_AHEAD
    traces_once: bool = True
    several_backward_passes: bool = False
    before_first_run: Callable[[int | None], None] | None = None
    step_code: types.CodeType | None = None
    larger: Callable[[], bool] | None = None
    before_larger: Callable[[int], None] | None = None
    _looked: set[int] = field(default_factory=set)  # graphs whose memory was looked at before they ran
    measures: Callable[[Executable], None] | None = None
    _prepare: Callable[[], None] | None = None
    _frames: list[_Frame] = field(default_factory=list)
    reasons: dict[int, compat.GraphReasons] = field(default_factory=dict)
    _captured: int = 0  # numbers of graphs and of programs; those of dropped ones are not reused
    _lowered: int = 0
    _timing: bool = False
    _first_frame: _Frame | None = None
    _turns: int = 0  # the number that ranks had taken when the last training step began

    def __post_init__(self) -> None:
        self.regions = RegionCompiler(self.config.region_backend)
        activations = self.config.offloading.activations
        self.settings = PlanSettings(
            # By itself, nothing is offloaded before sizes say that it must.
            offload_activations="none" if self.config.memory_budget is None and activations == "auto" else activations,
            reduce=self.config.reduction(self.stage),
            rounding=self.config.rounding,
        )
        self.passes: tuple[Pass, ...] = DEFAULT_PASSES
        # By structure: whatever shapes each rank meets, all ranks must gather alike in programs of one structure.
        self.plan: dict[str, Schedule] = {}
        self.params = {p.ds_id: p.info for p in self.model.parameters}

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """The backend function that ``torch.compile`` calls."""
        frame = _Frame(self._captured)
        self.reasons[frame.index] = compat.reasons_of(gm)
        self._captured += 1
        self._frames.append(frame)
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

    @property
    def frames(self) -> int:
        """Graphs that Dynamo captured."""
        return len(self._frames)

    @property
    def captured(self) -> int:
        """Graphs that Dynamo captured so far, including dropped ones."""
        return self._captured

    def graph_reasons(self) -> list[tuple[str, str, str, str]]:
        """Returns of each captured graph its programs, the line where it ends, and why; then why it was made anew."""
        return [
            (", ".join(e.program.name for e in frame.executables) or f"frame{frame.index}", *self.reasons[frame.index])
            for frame in self._frames
        ]

    def program(self, name: str) -> Program | None:
        """Returns the program of that name; None if it was dropped."""
        return next((one.program for one in self.executables if one.program.name == name), None)

    def chunked(self, what: Chunkable) -> int:
        """The number of losses, or feed-forward layers, that are computed in pieces."""
        return sum(frame.chunked[what] for frame in self._frames)

    def whole(self, what: Chunkable) -> int:
        """The number of those that training steps compute whole and could compute in pieces if `tracing` said so."""
        return sum(f.whole[what] for f in self._frames if any(e.program.kind != "inference" for e in f.executables))

    @property
    def flops_done(self) -> int:
        """Floating-point operations that training steps' programs have done on this rank; see `count_flops`."""
        training = [one for one in self.executables if one.program.kind != "inference"]
        return sum(one.calls * one.base.operations for one in training)

    def checkpoints(self, frame: int) -> list[Checkpoint]:
        """The blocks of a graph that are recomputed in backward and need not be, in order.

        Args:
            frame: The graph's number.
        """
        (found,) = (one for one in self._frames if one.index == frame)
        return [
            Checkpoint(one.checkpointed_bytes, sum(self.params[id_].gathered_bytes for id_ in one.ids.values()))
            for one in found.blocks
            if one.checkpointed_bytes
        ]

    def retrace(self, tracing: Tracing) -> None:
        """Drops the captured graphs of training steps; call between optimizer steps, on all ranks alike.

        Args:
            tracing: The new value of the attribute.
        """
        self.tracing = tracing
        self._frames = [f for f in self._frames if all(e.program.kind == "inference" for e in f.executables)]
        self.reasons = {frame.index: self.reasons[frame.index] for frame in self._frames}
        self.executables = [executable for frame in self._frames for executable in frame.executables]
        self._first_frame, self.plan, self._looked = None, {}, set()
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

    @property
    def in_step(self) -> bool:
        """True if a step of this capture's module, or its backward pass, is under way."""
        return self._prepare is not None

    @contextlib.contextmanager
    def preparing(self, prepare: Callable[[], None]) -> Iterator[None]:
        """Returns a context in which programs call `prepare` before they run: their inputs may have changed.

        Args:
            prepare: The function to call.
        """
        before, self._prepare = self._prepare, prepare
        try:
            yield
        finally:
            self._prepare = before

    def runs_first(self) -> bool:
        """Returns whether the program that is about to run comes first in its step.

        Dynamo calls a graph from the code of the function that it captured: the step's own if nothing broke the graph
        before, otherwise that of a continuation, or of a function that the step calls.
        """
        frame = sys._getframe()
        while frame.f_back is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in _FRAMEWORK:
            frame = frame.f_back
        code, own = frame.f_code, self.step_code
        names = code.co_name, code.co_filename, code.co_firstlineno
        return own is not None and names == (own.co_name, own.co_filename, own.co_firstlineno)

    def _enter(self, program: Program) -> Callable[[], None] | None:
        if self._prepare is not None:
            self._prepare()
        if program.kind == "backward" and self.replays is not None:
            self.replays.begin_backward()
        behind = self.agreement.check(program.signature)
        self.model.derived.refresh(program.derived)
        if (
            program.kind == "forward"
            and self.before_first_run is not None
            and program.schedule.frame not in self._looked
        ):
            if self._looked:  # other ranks may have no new program
                self._looked.add(program.schedule.frame)
                self.before_first_run(program.schedule.frame)
            elif self.agreement.together:
                self._looked = {frame.index for frame in self._frames}
                self.before_first_run(None)
        if program.kind == "forward" and self.larger is not None and self.agreement.together:
            larger, self.larger = self.larger, None
            if larger() and self.before_larger is not None:
                self.before_larger(program.schedule.frame)
        return behind

    @property
    def program_seconds(self) -> float:
        """Time that the host spent in programs."""
        return sum(executable.seconds for executable in self.executables)

    def replan(
        self,
        settings: PlanSettings | None = None,
        passes: Sequence[Pass] | None = None,
        plan: Iterable[Schedule] = (),
    ) -> None:
        """Swaps every program for a newly planned one; nothing is retraced or recompiled.

        Call between optimizer steps, on all ranks alike.

        Args:
            settings: New choices; None keeps those in use. The time of reductions stays as configured, unless `plan`
                says otherwise.
            passes: The passes for programs from now on; those that need a profile are skipped here.
            plan: Schedules for programs, now and later, of the same structure, whatever their shapes: for other shapes
                it is the nearest plan that exists. All other programs get the result of the passes.
        """
        self.settings = replace(settings or self.settings, reduce=self.settings.reduce)
        self.passes = self.passes if passes is None else tuple(passes)
        self.plan = {schedule.structure: schedule for schedule in plan}
        self.agreement.forget()  # a program that matched the others' old ones may not match their new ones
        self.runtime.parameters.invalidate()
        for frame in self._frames:
            for executable in frame.executables:
                executable.swap(self._plan(frame, executable.base))

    def offload(self, chosen: Mapping[int, frozenset[int]], *, alone: bool = False) -> None:
        """Schedules programs again, with other saved tensors offloaded; call before these run.

        Args:
            chosen: Numbers of the tensors, by the number of their graph.
            alone: Whether the programs of other graphs stay as they are.
        """
        for frame in self._frames:
            if alone and frame.index not in chosen:
                continue
            frame.chosen = chosen.get(frame.index, frame.chosen)
            for executable in frame.executables:
                executable.swap(self._plan(frame, executable.base))

    def new_graph_id(self) -> int:
        """Returns a new runtime id for a graph."""
        self._lowered += 1
        return self.runtime.serial << 32 | self._lowered - 1

    def _inline(self, frame: _Frame, kind: ProgramKind, gm: fx.GraphModule) -> None:
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
        self, frame: _Frame, kind: ProgramKind, gm: fx.GraphModule, inputs: Sequence[Any]
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
                before = functools.partial(compat.held_weakly(self._note_first), frame)
            plan = self._plan(frame, base)
            enter = compat.held_weakly(self._enter)
            graphs = None
            if self.replays is not None and examined is not None and kind != "inference":
                graphs = ProgramGraphs(self.replays, frame.replayed, base, frame.outputs, examined)
            executable = Executable(base, plan, before, enter, self.guard, graphs, inputs)
        self.executables.append(executable)
        self.programs_compiled += 1
        frame.executables.append(executable)
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

    def _cuts(self, frame: _Frame) -> bool:
        """Returns whether the graphs of `frame` are cut, either for communication or to compile equal blocks once."""
        whole = self.model.derived.source_of
        return not self.nothing_moves or bool(frame.blocks) or not all(whole(i).is_whole for i in frame.ids)

    def _note_first(self, frame: _Frame) -> None:
        self._first_frame = self._first_frame or frame

    def begin_step(self) -> None:
        """Call before every training step."""
        self._first_frame, self._turns = None, self.agreement.turns

    def first_gathers(self) -> list[Gathers]:
        """The gathers that the last training step's first program begins with; none if ranks ran different programs.

        Ranks whose programs communicate alike get the same gathers, whatever their shapes.
        """
        if self._first_frame is None or self._turns != self.agreement.turns:
            return []
        (forward,) = (e for e in self._first_frame.executables if e.program.kind == "forward")
        return forward.first_gathers

    @property
    def waits_for_states(self) -> bool:
        """True if the last training step's first program waits for optimizer states that leave the device."""
        return self._first_frame is not None and any(e.waits_for_states for e in self._first_frame.executables)

    def schedules(self, names: Iterable[str], passes: Sequence[Pass]) -> dict[str, Schedule]:
        """Returns the schedules that planning with `passes` starts from; nothing is swapped.

        Args:
            names: Names of programs.
            passes: The passes.
        """
        wanted, found = set(names), {}
        passes = [one for one in passes if one.initial]
        for frame in self._frames:
            kept: tuple[int, ...] = ()
            for executable in frame.executables:
                program = self._offload(frame, self._apply(executable.base.with_kept(kept), passes))
                kept = program.kept if program.kind == "forward" else kept
                if program.name in wanted:
                    found[program.name] = program.schedule
        return found

    def _apply(self, base: Program, passes: Sequence[Pass]) -> Program:
        return apply_passes(base, self.settings, [one for one in passes if "profile" not in one.needs])

    def _plan(self, frame: _Frame, base: Program) -> Program:
        # Forward comes first, also when all are planned again: a backward program must know what forward leaves.
        program = self._apply(base.with_kept(frame.kept), self.passes)
        schedule = program.schedule
        wanted = self.plan.get(schedule.structure)
        if program.kind == "forward" and frame.chosen is None:
            frame.chosen = frozenset()
            if self.choose_activations is not None:
                frame.chosen = self.choose_activations(schedule)
        if wanted is None:
            program = self._offload(frame, program)
        else:
            leaving = frame.chosen if program.kind == "forward" else frame.offloaded
            program = reschedule(program, fit_copies(wanted, schedule, leaving or ()), "plan")
        if program.kind == "forward":
            frame.kept = program.kept
            frame.offloaded = frozenset(program.schedule.offloaded)
        return program

    def _offload(self, frame: _Frame, program: Program) -> Program:
        """Lets saved tensors leave where no plan says which."""
        if not frame.chosen or program.kind == "inference":
            return program
        (schedule,) = offload_saved([program.schedule], {frame.index: frame.chosen}, self.ahead)
        return reschedule(program, schedule, "offload")


def _partition(
    frame: _Frame, sparing: bool, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
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
        return (graph if alive is None or not alive.in_step else compiled)(*args)

    return run


def _nothing() -> None:
    """Does nothing: inference needs no preparation."""
