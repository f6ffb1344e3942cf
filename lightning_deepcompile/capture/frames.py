"""The graphs that Dynamo captured for one module, and their programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_deepcompile import compat
from lightning_deepcompile.capture.templates import Instance
from lightning_deepcompile.plan.fit_measured import Checkpoint
from lightning_deepcompile.plan.tracing import Chunkable
from lightning_deepcompile.program.executable import Executable
from lightning_deepcompile.program.program import ParamInfo, Program
from lightning_deepcompile.program.program_graphs import LastReplay


@dataclass(eq=False)
class Frame:
    """One graph that Dynamo captured: its parameters and its programs.

    Args:
        index: Its number.
        reasons: Dynamo's reasons for it.
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
    reasons: compat.GraphReasons
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

    @property
    def trains(self) -> bool:
        """True if it has a program of a training step."""
        return any(one.program.kind != "inference" for one in self.executables)


@dataclass(eq=False, repr=False)
class Frames:
    """The captured graphs.

    Args:
        params: Parameters by id.

    Attributes:
        all: The graphs, in the order in which they were captured.
        executables: Their programs, in order of compilation.
        captured: Number of graphs so far, including dropped ones: numbers are not reused.
        compiled: Number of programs so far, likewise.
    """

    params: Mapping[int, ParamInfo]
    all: list[Frame] = field(default_factory=list)
    executables: list[Executable] = field(default_factory=list)
    captured: int = 0
    compiled: int = 0

    def add(self, reasons: compat.GraphReasons) -> Frame:
        """Returns a new frame."""
        self.all.append(Frame(self.captured, reasons))
        self.captured += 1
        return self.all[-1]

    def add_program(self, frame: Frame, executable: Executable) -> None:
        """Adds a program of `frame`."""
        frame.executables.append(executable)
        self.executables.append(executable)
        self.compiled += 1

    def drop_training(self) -> None:
        """Drops the graphs of training steps."""
        self.all = [frame for frame in self.all if not frame.trains]
        self.executables = [executable for frame in self.all for executable in frame.executables]

    @property
    def training(self) -> list[Executable]:
        """The programs of training steps."""
        return [one for one in self.executables if one.program.kind != "inference"]

    def program(self, name: str) -> Program | None:
        """Returns the program of that name; None if it was dropped."""
        return next((one.program for one in self.executables if one.program.name == name), None)

    def reasons(self) -> list[tuple[str, str, str, str]]:
        """Returns of each captured graph its programs, the line where it ends, and why; then why it was made anew."""
        return [
            (", ".join(e.program.name for e in frame.executables) or f"frame{frame.index}", *frame.reasons)
            for frame in self.all
        ]

    def chunked(self, what: Chunkable) -> int:
        """The number of losses, or feed-forward layers, that are computed in pieces."""
        return sum(frame.chunked[what] for frame in self.all)

    def whole(self, what: Chunkable) -> int:
        """The number of those that training steps compute whole and could compute in pieces."""
        return sum(frame.whole[what] for frame in self.all if frame.trains)

    @property
    def flops_done(self) -> int:
        """Floating-point operations that training steps' programs have done on this rank; see `count_flops`."""
        return sum(one.calls * one.base.operations for one in self.training)

    @property
    def seconds(self) -> float:
        """Time that the host spent in programs."""
        return sum(executable.seconds for executable in self.executables)

    def checkpoints(self, frame: int) -> list[Checkpoint]:
        """The blocks of a graph that are recomputed in backward and need not be, in order.

        Args:
            frame: The graph's number.
        """
        (found,) = (one for one in self.all if one.index == frame)
        return [
            Checkpoint(one.checkpointed_bytes, sum(self.params[id_].gathered_bytes for id_ in one.ids.values()))
            for one in found.blocks
            if one.checkpointed_bytes
        ]
