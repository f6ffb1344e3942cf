"""The plan file of a run: rank 0 reads and writes it, for all ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from lightning_deepcompile.plan.offload import StatePlaces
from lightning_deepcompile.plan.plan_file import Plan, PlanFileError, Setting, read_plan, write_plan
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.ranks.exchange import attempt, exchange

__all__ = ["PlanStore"]

_log = logging.getLogger(__name__)


class PlanStore:
    """Reads and writes the file.

    Args:
        path: The file; None if plans are neither read nor kept.
        setting: What plans are for.
        group: The ranks.
    """

    def __init__(self, path: str | Path | None, setting: Setting, group: dist.ProcessGroup) -> None:
        self._path = None if path is None else Path(path)
        self._setting, self._group = setting, group

    def load(self) -> Plan | None:
        """The plan as rank 0 sees the file; None without a usable one. A collective."""
        path = self._path
        if path is None:
            return None
        text, reason = attempt(lambda: path.read_text() if path.is_file() else None)
        text, reason = exchange((text, reason), self._group)[0]
        if text is None and not reason:
            return None  # to be written by this run
        try:
            if text is None:
                raise PlanFileError(reason)
            return read_plan(text, self._setting)
        except PlanFileError as error:
            self._warn(f"The plan {str(path)!r} is not used, as {error}. Training plans anew.")
            return None

    def save(self, schedules: Sequence[Schedule], states: StatePlaces | None, uncheckpointed: int) -> None:
        """Writes a plan, on rank 0; a failure is a warning.

        Args:
            schedules: Of all programs.
            states: Where optimizer states are; None if nothing of them may leave.
            uncheckpointed: How many blocks that the model checkpoints keep their activations.
        """
        path = self._path
        if path is None or self._group.rank() != 0:
            return
        data = write_plan(schedules, self._setting, states, uncheckpointed).encode()
        _, error = attempt(lambda: _write_whole(path, data))
        if error:
            self._warn(f"The plan could not be written to {str(path)!r}: {error}")

    def _warn(self, text: str) -> None:
        if self._group.rank() == 0:
            _log.warning("%s", text)


def _write_whole(path: Path, data: bytes) -> None:
    """Puts a file in place in one step, and makes its folder.

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
