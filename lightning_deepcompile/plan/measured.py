"""A measured step of several ranks: when each rank's device passed each instruction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_deepcompile.program.schedule import Instruction, Schedule

Kind = Literal["compute", "waits for gathers", "waits for reductions", "waits for copies", "optimizer", "between"]

KINDS: tuple[Kind, ...] = (
    "compute",
    "waits for gathers",
    "waits for reductions",
    "waits for copies",
    "optimizer",
    "between",
)
"""``between``: the device waits for the host, or runs what belongs to no program, such as hooks and clipping."""

_WAITS: dict[str, Kind] = {"parameters": "waits for gathers", "saved tensors": "waits for copies"}
_LEAST = 1e-7  # seconds of a piece that is worth a bar


class Piece(NamedTuple):
    """A part of one rank's step on its compute stream.

    Args:
        kind: One of `KINDS`.
        start: In seconds from the begin of rank 0's step.
        end: Likewise.
        schedule: Of the program that it belongs to; None for the optimizer, and between programs.
        instruction: None as for `schedule`.
    """

    kind: Kind
    start: float
    end: float
    schedule: Schedule | None = None
    instruction: Instruction | None = None


class StepTime(NamedTuple):
    """The duration of an optimizer step.

    Args:
        step: Its number, from 1 on, since the start or the resuming.
        seconds: Until the next step began, by the host's clock.
        compiled: Whether a graph was captured in it.
    """

    step: int
    seconds: float
    compiled: bool


@dataclass(frozen=True)
class RankStep:
    """The step of one rank. All times are in seconds from the begin of rank 0's step.

    Args:
        rank: Its number.
        begin: Before the first forward pass.
        marks: For each run of a program: its begin, and the end of each instruction, on the compute stream.
        reduced: When the last gradients were reduced.
        end: When the optimizer had stepped.
    """

    rank: int
    begin: float
    marks: tuple[tuple[float, ...], ...]
    reduced: float
    end: float


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step.

    Args:
        runs: The schedules that ran, in order, once for each micro-batch.
        ranks: Some ranks of the training, the slowest one included, in order.
        world_size: Number of all ranks.
        planned: Whether the step ran under a plan; else it is one before planning.
    """

    runs: tuple[Schedule, ...]
    ranks: tuple[RankStep, ...]
    world_size: int
    planned: bool

    def pieces(self, rank: RankStep) -> Iterator[Piece]:
        """Yields the parts of a rank's step, in order; together they are the whole step."""
        last = rank.begin
        for schedule, marks in zip(self.runs, rank.marks, strict=True):
            for position, instruction in enumerate(schedule.instructions):
                kind = _kind(instruction)
                start, end = marks[position], marks[position + 1]
                if kind != "between" and end - start > _LEAST:
                    if start - last > _LEAST:
                        yield Piece("between", last, start)
                    yield Piece(kind, start, end, schedule, instruction)
                    last = end
        behind = rank.marks[-1][-1] if rank.marks else last
        for kind, start, end in (("waits for reductions", behind, rank.reduced), ("optimizer", rank.reduced, rank.end)):
            if start - last > _LEAST:
                yield Piece("between", last, start)
            yield Piece(kind, start, end)  # type: ignore[arg-type] # literals in a tuple are texts to mypy
            last = end

    def parts(self, rank: RankStep) -> dict[Kind, float]:
        """Seconds of each kind."""
        found = dict.fromkeys(KINDS, 0.0)
        for piece in self.pieces(rank):
            found[piece.kind] += piece.end - piece.start
        return found

    def skew(self) -> float:
        """Seconds for which the rank that computes least waits in the step for the one that computes most."""
        busy = [self.parts(rank)["compute"] for rank in self.ranks]
        return max(busy, default=0.0) - min(busy, default=0.0)


def _kind(instruction: Instruction) -> Kind:
    verb, subject = instruction.traits.effect
    if verb == "compute":
        return "compute"
    if verb == "wait":
        return _WAITS.get(subject, "waits for copies")
    if verb in ("launch", "launch and wait") and subject in ("parameters", "gradients"):  # it may wait for memory
        return "waits for gathers" if subject == "parameters" else "waits for reductions"
    return "between"


def aligned(runs: Sequence[Schedule], numbers: Mapping[int, Sequence[float]]) -> tuple[RankStep, ...]:
    """Makes the steps of ranks, whose clocks differ, of one clock: that of the first of them.

    The last reduction ends at the same moment on all ranks.

    Args:
        runs: The schedules that ran.
        numbers: By rank, the seconds since its own begin: the marks of all runs, `reduced` and `end`.
    """
    steps = []
    common = next(iter(numbers.values()))[-2] if numbers else 0.0
    for rank, row in numbers.items():
        late = common - row[-2]
        left = iter(row)
        marks = tuple(tuple(next(left) + late for _ in range(len(run.instructions) + 1)) for run in runs)
        steps.append(RankStep(rank, late, marks, next(left) + late, next(left) + late))
    return tuple(steps)
