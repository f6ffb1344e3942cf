"""The steps at which a training step is measured and planned, and the passes."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.plan.known_passes import DEFAULT_SCHEDULE, resolve_passes
from lightning_deepcompile.plan.step_pass import Pass

_ATTEMPTS = 3
"""Rounds at most, so that a model with ever new shapes does not plan for ever."""

_WATCHED = 10
"""Steps before a look whose batches count for it."""

PassEntry = tuple[int, tuple[Pass, ...]]
"""Optimizer steps since the start or the resuming, and the passes from then on; none where a step is measured then and
nothing is planned, but it may be decided how the step is traced."""


def pass_schedule(config: CompileConfig, stage: int, shards: int) -> list[PassEntry]:
    """Resolves `CompileConfig.schedule`.

    Args:
        config: The settings.
        stage: ZeRO stage.
        shards: Ranks that share the parameters.

    Returns:
        The entries; the first is of step 0.

    Raises:
        PassError: If the configured passes do not exist or do not fit together.
        ValueError: If the configured schedule plans for a stage at which nothing is gathered twice.
    """
    schedule = config.schedule
    measures = False
    if schedule is None or schedule == "auto":
        schedule = list(DEFAULT_SCHEDULE)
        # One rank has nothing to wait for, but a budget is held to.
        nothing_travels = shards == 1 and config.offloading.activations != "all" and config.memory_budget is None
        nothing_to_plan = nothing_travels or stage != 3  # there parameters stay whole anyway
        measures = nothing_to_plan and config.schedule == "auto"
        if nothing_to_plan or config.schedule is None:
            schedule = schedule[:1]
    if stage != 3 and len(schedule) > 1:
        raise ValueError(
            f"CompileConfig(schedule=...) plans at step {schedule[1]['step']}, but at stage {stage} "
            "parameters stay whole between uses: there is nothing to plan. Use stage 3, or step 0 alone."
        )
    entries = [(entry["step"], resolve_passes(entry["passes"], profiled=entry["step"] > 0)) for entry in schedule]
    return [*entries, (DEFAULT_SCHEDULE[-1]["step"], ())] if measures else entries


class Agenda:
    """Decides when rounds begin, and when programs are looked for that no plan covers.

    Args:
        entries: The rounds that were asked for; see `pass_schedule`.

    Attributes:
        passes: The passes of the round under way, or of the next one; none where nothing is planned.
        recheck: The optimizer step before which programs are looked for; None: they are not.
        attempts: The number of rounds: planned, failed, or with nothing that is not planned already.
    """

    def __init__(self, entries: Sequence[PassEntry]) -> None:
        self._entries = list(entries)
        self.passes: tuple[Pass, ...] = self._entries[-1][1] if self._entries else ()
        self.recheck: int | None = None
        self.attempts = 0

    @property
    def goes_on(self) -> bool:
        """True if there may be more rounds than were asked for."""
        return self.attempts < _ATTEMPTS

    def looks_soon(self, step: int) -> bool:
        """Returns whether a look follows the step that begins soon, and its batch counts for it.

        Args:
            step: Optimizer steps done.
        """
        return self.recheck is not None and step < self.recheck <= step + _WATCHED

    def next(self, step: int) -> int | None:
        """Returns the optimizer step at which the next round begins; None if there is none.

        Args:
            step: Optimizer steps done.
        """
        if not self._entries:
            return None
        first, self.passes = self._entries.pop(0)
        return max(first, step + 3 if step else first)

    def again(self, step: int) -> None:
        """Adds a round with the same passes, after optimizer step `step`."""
        self._entries.insert(0, (step + 3, self.passes))

    def ended(self, step: int, *, retry: bool) -> int | None:
        """Returns the optimizer step at which the next round begins, after one has ended at `step`; else None.

        Args:
            step: Optimizer steps done.
            retry: Whether the round failed, or its plan was dropped.
        """
        self.recheck = step + 10 if retry and self.goes_on else None
        first = None if self.recheck is not None else self.next(step)
        if first is None and self.recheck is None and self.goes_on:
            # New programs are looked for ever more rarely: the look is a collective, and late ones pay off less.
            self.recheck = max(2 * step, step + 10)
        return first

    def follow_file(self) -> None:
        """Call when a plan file was read: for programs that it does not have, a round follows a look at them."""
        self._entries.clear()
        self.recheck = 2
