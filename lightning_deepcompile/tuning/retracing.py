"""Retraces the step to change its memory use, as `plan.fit` decides: recomputes more or less, or chunks more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.fit import Kind, MemoryPlan, Move
from lightning_deepcompile.plan.fit_measured import Checkpoint, MeasuredPlan
from lightning_deepcompile.plan.report import PassReport, Round
from lightning_deepcompile.plan.tracing import Chunkable, Tracing
from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.ranks.exchange import on_any

_NAMES: dict[Chunkable, str] = {"losses": "losses", "mlps": "MLPs"}
_CHUNKS = 8
"""An eighth of logits is little, and of a feed-forward layer as much as its narrow side; weights' gradients are added
up as often."""


class Retracing:
    """Traces the step as decisions say. Call every method on all ranks alike: their inputs are the same.

    What is computed again is decided once, in the first round of planning. Losses and feed-forward layers (MLPs) are
    whole until they cannot be.

    Args:
        capture: Traces the step.
        group: The ranks.
    """

    def __init__(self, capture: Capture, group: dist.ProcessGroup) -> None:
        self._capture, self._group = capture, group
        self._frames = capture.frames
        self._decided = capture.config.rounding != "any"
        self._useless: set[Kind] = set()

    @property
    def pending(self) -> bool:
        """True if the next round of planning decides what is recomputed in backward."""
        return not self._decided

    def _may_chunk(self, what: Chunkable) -> bool:
        useless = what in self._useless
        return self._capture.config.rounding != "same" and not self._capture.tracing.chunks(what) and not useless

    def moves(self) -> tuple[Move, ...]:
        """Returns the ways in which another trace of the step may need less memory; a collective while there are some.

        What they free is known when the step is traced so.
        """
        tracing = self._capture.tracing
        kinds: list[Kind] = []
        for what in _NAMES:
            if self._may_chunk(what) and on_any(self._frames.whole(what) > 0, self._group):
                kinds.append(what)
        if tracing.uncheckpointed:
            kinds.append("checkpoints")
        elif self._capture.config.rounding != "same" and not tracing.sparing:
            kinds.append("operators")
        return tuple(Move(kind, rounds=True) for kind in kinds if kind not in self._useless)

    def take_back(self, step: int, kind: Kind, tracing: Tracing, plan: MemoryPlan, profile: Profile) -> Round:
        """Has the step traced as before one of the `moves`, which needs no less memory and is not made again.

        Args:
            step: Optimizer steps done.
            kind: The move.
            tracing: How the step was traced before it.
            plan: The decision about the step as it is traced now.
            profile: What it fell by.

        Returns:
            What the report says of it.
        """
        self._useless.add(kind)
        self._capture.retrace(tracing)
        text = f"The step needs no less memory so, and is traced as before: {plan.numbers}."
        times = profile.step_seconds, profile.exposed_seconds
        return Round(step, (), plan.room, *times, outcome="retraced", reason=text)

    def trace(self, kind: Kind) -> str:
        """Has the step traced once more with one of the `moves`; returns a clause that says so."""
        tracing = self._capture.tracing
        if kind == "losses" or kind == "mlps":
            self._capture.retrace(tracing.chunking(kind, _CHUNKS))
            return f"{_NAMES[kind]} are computed in {_CHUNKS} chunks"
        if kind == "checkpoints":
            self._capture.retrace(replace(tracing, uncheckpointed=0))
            return "all checkpointed blocks are recomputed"
        self._decided = True
        self._capture.retrace(replace(tracing, sparing=True))
        return "cheap operators are recomputed"

    def note(self) -> str:
        """Returns advice for a step that does not fit into memory; "" if there is none."""
        unchunked = [name for what, name in _NAMES.items() if self._may_chunk(what) and self._frames.whole(what)]
        if not unchunked:
            return ""
        return (
            f"The sizes of a step say that it fits with {' and '.join(unchunked)} unchunked. With a smaller "
            "CompileConfig(memory_budget=...) they are computed in chunks of tokens."
        )

    def adopt(self, tracing: Tracing) -> None:
        """Adopts the tracing of the loaded plan, made with the same settings; call before the step is traced."""
        self._capture.tracing, self._decided = tracing, True

    def seen(self, schedules: Sequence[Schedule]) -> list[list[Checkpoint]]:
        """Returns what this rank's programs recompute and could keep, one list for each forward program.

        Args:
            schedules: Those of a micro-batch.
        """
        return [self._frames.checkpoints(schedule.frame) for schedule in schedules if schedule.kind == "forward"]

    def make(self, step: int, plan: MemoryPlan, profile: Profile) -> Round:
        """Has the step traced once more as a decision says; returns what the report says of it.

        Args:
            step: Optimizer steps done.
            plan: The decision.
            profile: What it fell by.
        """
        assert plan.retrace is not None
        who, over = ("leanest plan", plan.least) if plan.least > plan.room else ("step", plan.needed)
        times = profile.step_seconds, profile.exposed_seconds
        missing, done = format_bytes(over - plan.room), self.trace(plan.retrace)
        text = f"The {who} needs {missing} too much memory, so {done} from step {step} on."
        return Round(step, (), plan.room, *times, outcome="retraced", reason=text)

    def blocks(
        self, profile: Profile, seen: Sequence[list[list[Checkpoint]]]
    ) -> Mapping[int, Sequence[Checkpoint]] | None:
        """Returns the blocks that may keep their activations, by graph; None where that is not to be decided now.

        Args:
            profile: As measured.
            seen: What every rank has `seen`.
        """
        if self._decided or any([*map(len, one)] != [*map(len, seen[0])] for one in seen):
            return None
        frames = [schedule.frame for schedule in profile.schedules if schedule.kind == "forward"]
        # Ranks may meet batches of different lengths.
        largest = [
            [max(same, key=lambda one: one.bytes) for same in zip(*blocks, strict=True)]
            for blocks in zip(*seen, strict=True)
        ]
        return dict(zip(frames, largest, strict=True))

    def follow(self, step: int, plan: MeasuredPlan, profile: Profile) -> Round | None:
        """Has the step traced once more where a decision with a measured step says so.

        Args:
            step: Optimizer steps done.
            plan: The decision.
            profile: What it fell by.

        Returns:
            What the report says of it; None if the step stays as it is.
        """
        if plan.retrace is not None:
            return self.make(step, plan, profile)
        self._decided = True
        if not plan.best.kept:
            return None
        self._capture.retrace(replace(self._capture.tracing, uncheckpointed=plan.best.kept))
        reports = tuple(PassReport.of(effect) for effect in plan.best.effects)
        times = profile.step_seconds, profile.exposed_seconds
        return Round(step, reports, profile.budget, *times, outcome="retraced")
