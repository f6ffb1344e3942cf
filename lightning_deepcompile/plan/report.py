"""The report of a round of planning, as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_deepcompile.plan.difference import NO_CHANGE
from lightning_deepcompile.plan.optimize import PassEffect
from lightning_deepcompile.program.printer import align, format_bytes


@dataclass(frozen=True)
class PassReport:
    """The changes of one pass, and the step as predicted after it.

    Args:
        name: The pass; the program passes are one entry.
        changed: The changes, in words.
        step_seconds: Predicted duration of the step.
        exposed_seconds: Predicted time in which compute waits for communication.
        peak_bytes: Predicted peak memory.
    """

    name: str
    changed: str
    step_seconds: float
    exposed_seconds: float
    peak_bytes: int

    @classmethod
    def of(cls, effect: PassEffect) -> PassReport:
        """The report of `effect`."""
        prediction = effect.prediction
        return cls(effect.name, effect.changed, prediction.seconds, prediction.exposed_seconds, prediction.peak_bytes)


@dataclass(frozen=True)
class Round:
    """One round of profiling and planning.

    Args:
        step: Optimizer steps done, since the start or the resuming, when the new programs took over.
        passes: The effect of each pass.
        budget: Bytes that the plan could use; None without a limit.
        before_seconds: Measured duration of steps before.
        before_exposed_seconds: Measured time that compute waited for communication before.
        after_seconds: Measured duration of steps with the new programs; None before it is known.
        after_peak_bytes: Measured peak memory with the new programs; None where the allocator does not count.
        outcome: ``"measuring"``, ``"kept"``, ``"reverted"`` or ``"unchanged"``; ``"out of memory"`` where a rank ran
            out of it before that was known, ``"leaner"`` for what follows a shortage, and ``"retraced"`` where
            another part of the activations is computed again, or losses are computed in pieces: the next round plans
            for that. ``"measured"`` where there is nothing to plan.
        reason: Why a plan was dropped and what follows it, or why nothing was planned; else empty.
        before_peak_bytes: Measured peak memory of this rank before; None where the allocator does not count.
        compared: Whether steps before and after had batches of sizes with which their durations compare.
        skew_seconds: Mean time for which the rank with the least work waits in a step for the one with the most.
    """

    step: int
    passes: tuple[PassReport, ...]
    budget: int | None
    before_seconds: float
    before_exposed_seconds: float
    after_seconds: float | None = None
    after_peak_bytes: int | None = None
    outcome: str = "measuring"
    reason: str = ""
    before_peak_bytes: int | None = None
    compared: bool = True
    skew_seconds: float = 0.0

    def __str__(self) -> str:
        """The round as a table."""
        rows = _predicted(self.passes)
        rows.append(_row("measured before", self.before_seconds, self.before_exposed_seconds, None, ""))
        if self.after_seconds is not None:
            rows.append(_row("measured after", self.after_seconds, None, self.after_peak_bytes, self.outcome))
        if self.skew_seconds > 0:
            note = "for which the rank with the least work waits for the one with the most"
            rows.append(_row("rank skew", self.skew_seconds, None, None, note))
        state = "" if self.after_seconds is not None else f" ({self.outcome})"
        reason = f"\n  {self.reason}" if self.reason else ""
        return f"plan at step {self.step}{state}{reason}\n{_table(rows)}{_idle_note(self.passes)}"

    def headline(self) -> str:
        """The round in one sentence: the outcome, with ms and bytes before and after."""
        before, after = self.before_seconds * 1e3, (self.after_seconds or 0.0) * 1e3
        peaks = ""
        if self.after_peak_bytes and self.before_peak_bytes:
            peaks = f", and {format_bytes(self.after_peak_bytes)} ({format_bytes(self.before_peak_bytes)} before)"
        if self.outcome == "kept" and not self.compared:
            return (
                f"The plan of step {self.step} is kept, by its prediction: no steps before and after it had "
                f"batches of comparable sizes{peaks}."
            )
        if self.outcome == "kept":
            return f"The plan of step {self.step} is kept: {after:.1f} ms a step ({before:.1f} ms before){peaks}."
        if self.outcome == "reverted":
            slower = f"{after:.1f} ms a step were measured, {before:.1f} ms before"
            return f"The plan of step {self.step} is reverted, as it is slower: {slower}."
        if self.outcome == "unchanged":
            return f"Planning at step {self.step} found nothing to change: {before:.1f} ms a step."
        if self.outcome == "retraced" and not self.reason:
            return f"The step is retraced at step {self.step}, to recompute another part of its activations."
        return self.reason or f"The plan of step {self.step}: {self.outcome}."

    def shortfall(self) -> str:
        """Explains that steps take more memory than was predicted; "" if they take at most 5 % more."""
        if self.outcome != "kept" or not self.passes or not self.after_peak_bytes:
            return ""
        predicted, measured = self.passes[-1].peak_bytes, self.after_peak_bytes
        if measured <= 1.05 * predicted:
            return ""
        more = format_bytes(measured - predicted)
        return (
            f"With the plan of step {self.step} steps take {format_bytes(measured)}, {more} more than predicted: that "
            "much less is left for larger batches. If a rank runs out of memory, the plan is dropped; "
            "CompileConfig(memory_budget=...) limits what plans use."
        )


def shortage_note(rounds: Sequence[Round]) -> str:
    """Describes the plan in use to a user who is short of memory; "" if there is none."""
    kept = [one for one in rounds if one.outcome in ("kept", "leaner")]
    if not kept or not kept[-1].passes:
        return ""
    peak, budget = kept[-1].passes[-1].peak_bytes, kept[-1].budget
    return (
        f"Since step {kept[-1].step} a plan uses memory that was free until then, for a peak of {format_bytes(peak)} "
        f"with the batches seen before it{'' if budget is None else f', of {format_bytes(budget)}'}. Limit it with "
        "CompileConfig(memory_budget=...), or plan nothing with CompileConfig(schedule=None)."
    )


def format_passes(passes: Sequence[PassReport]) -> str:
    """Lays out what passes did as a table."""
    return _table(_predicted(passes)) + _idle_note(passes)


def split_idle(passes: Sequence[PassReport]) -> tuple[list[PassReport], str]:
    """The passes that a table shows, and the names of the others, which changed nothing.

    Args:
        passes: What each pass did, in order; the first entry is the step that planning starts from.
    """
    idle = [entry for entry in passes[1:] if entry.changed == NO_CHANGE]
    return [entry for entry in passes if not any(entry is one for one in idle)], ", ".join(one.name for one in idle)


def _predicted(passes: Sequence[PassReport]) -> list[Sequence[str]]:
    return [
        _row(entry.name, entry.step_seconds, entry.exposed_seconds, entry.peak_bytes, entry.changed)
        for entry in split_idle(passes)[0]
    ]


def _idle_note(passes: Sequence[PassReport]) -> str:
    _, idle = split_idle(passes)
    return f"\n  changed nothing: {idle}" if idle else ""


def _row(name: str, step: float, exposed: float | None, peak: int | None, remark: str) -> Sequence[str]:
    times = ["-" if seconds is None else f"{seconds * 1e3:.1f} ms" for seconds in (step, exposed)]
    return name, *times, "-" if peak is None else format_bytes(peak), remark


def _table(rows: Sequence[Sequence[str]]) -> str:
    rows = [("pass", "step", "exposed", "peak", "changed"), *rows]
    return "\n".join(f"  {line}" for line in align(rows, left=(0, 4)))
