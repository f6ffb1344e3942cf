"""Reads and writes the plan file of a run, on rank 0 for all ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from lightning_deepcompile.plan.offload import StatePlaces
from lightning_deepcompile.plan.plan_file import Batches, Plan, PlanFileError, Setting, read_plan, write_plan
from lightning_deepcompile.plan.tracing import Tracing
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.ranks.exchange import attempt, from_first

_log = logging.getLogger(__name__)


class PlanStore:
    """Reads and writes the plan file.

    Args:
        path: The file; None if plans are neither read nor kept.
        setting: What plans are for.
        group: The ranks.
    """

    def __init__(self, path: str | Path | None, setting: Setting, group: dist.ProcessGroup) -> None:
        self._path = None if path is None else Path(path)
        self._setting, self._group = setting, group
        self._text: str | None = None  # of the file, as this run has read or written it last
        self._programs: frozenset[str] = frozenset()  # contents of the programs that the plan in it is for
        self._refused = False  # whether it is said already that the file will be replaced

    def load(self) -> Plan | None:
        """Returns the plan that rank 0 reads from the file; None without a usable one. A collective."""
        path = self._path
        if path is None:
            return None
        text, reason = attempt(lambda: path.read_text() if path.is_file() else None)
        text, reason = from_first((text, reason), self._group)
        if text is None and not reason:
            return None  # to be written by this run
        try:
            if text is None:
                raise PlanFileError(reason)
            self._text = text
            plan = read_plan(text, self._setting)
        except PlanFileError as error:
            self._refused = True
            self._say(
                f"The plan {str(path)!r} is not used, as {error}. Training measures and plans again, and replaces "
                "the file.",
                logging.WARNING,
            )
            return None
        self._programs = frozenset(plan.schedules)
        count = len(self._programs)
        self._say(f"Training starts with the plan {str(path)!r}, which is for {count} programs.", logging.INFO)
        return plan

    @property
    def keeps(self) -> bool:
        """True if plans are written; the same on all ranks."""
        return self._path is not None

    def save(
        self, schedules: Sequence[Schedule], states: StatePlaces | None, tracing: Tracing, batches: Batches
    ) -> None:
        """Writes a plan, on rank 0; a failure is a warning.

        Args:
            schedules: Of all programs.
            states: Where optimizer states are; None if nothing of them may leave.
            tracing: How the step is traced.
            batches: Those of all ranks that the plan was made for.
        """
        path = self._path
        if path is None or self._group.rank() != 0:
            return
        text = write_plan(schedules, self._setting, states, tracing, batches)
        if text == self._text:
            return
        there, _ = attempt(lambda: path.read_text() if path.is_file() else None)
        _, error = attempt(lambda: _write_whole(path, text.encode()))
        if error:
            self._say(f"The plan could not be written to {str(path)!r}: {error}", logging.WARNING)
            return
        programs = frozenset(schedule.content for schedule in schedules)
        if there is not None and there != self._text:
            self._say(
                f"Another run has written the plan {str(path)!r} since this one began: replaced by this run's. Give "
                "each its own file with CompileConfig(plan=...).",
                logging.WARNING,
            )
        elif there is not None and not self._refused and not programs & self._programs:
            self._say(
                f"The plan {str(path)!r} was for another model, or for other shapes: replaced by this run's. "
                "Give each its own file with CompileConfig(plan=...) to keep both.",
                logging.WARNING,
            )
        else:
            done = "written to" if there is None else "replaced in"
            self._say(f"The plan is {done} {str(path)!r}: runs that find it start with it.", logging.INFO)
        self._text, self._programs, self._refused = text, programs, False

    def _say(self, text: str, level: int) -> None:
        if self._group.rank() == 0:
            _log.log(level, "%s", text)


def _write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically, and creates its folder.

    Args:
        path: The file; an older one is replaced.
        data: What it is to hold.

    Raises:
        OSError: If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    partial.replace(path)
