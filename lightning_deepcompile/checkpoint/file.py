"""Checkpoints that are one file."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_deepcompile.checkpoint.disk_space import bytes_of, no_space, no_space_in
from lightning_deepcompile.checkpoint.location import local_path
from lightning_deepcompile.checkpoint.staging import clear_leftovers, commit, discard, remove, staging_path

_log = logging.getLogger(__name__)

KEPT = "%s is kept: the save failed after which it was to be removed."

_LAZY_KEYS = ("state_dict", "optimizer_states")


class FileCheckpointIO(TorchCheckpointIO):
    """Lightning's plain checkpoint files, written and read without a second copy in memory.

    A local file is streamed to a place beside its own and renamed, so that a crash leaves the old file or the new one.
    It is read through a memory map: ranks on one machine share its pages, and each touches only the rows that it
    needs. Remote URLs are Lightning's business.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last_whole: str | os.PathLike[str] | None = None
        """The last checkpoint to resume from that was saved or loaded."""
        self._finished = 0
        self._failed: set[int] = set()  # saves, counted from 1
        self._removals: list[tuple[int, str | os.PathLike[str]]] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Writes `checkpoint` to `path`, which may hold an older checkpoint of any kind.

        Raises:
            OSError: If there is no room, or nothing may be written there; what was there stays.
        """
        try:
            self._save(checkpoint, path, storage_options)
            if can_resume(checkpoint):
                self.last_whole = path
        except BaseException:
            self._failed.add(self._finished + 1)
            raise
        finally:
            self._finished += 1
            self._remove_due()

    def remove_after(self, saves: int, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint once that many saves have ended, in whatever thread; not if the last of them failed.

        That one was to take its place, whatever became of saves before it.
        """
        self._removals.append((saves, path))
        self._remove_due()

    def _remove_due(self) -> None:
        for removal in [removal for removal in self._removals if removal[0] <= self._finished]:
            with contextlib.suppress(ValueError):  # the other thread has it
                self._removals.remove(removal)
                if removal[0] in self._failed:
                    _log.warning(KEPT, os.fspath(removal[1]))
                else:
                    remove(removal[1])

    def _save(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None) -> None:
        target = local_path(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)  # type: ignore[arg-type] # any path
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(target.parent)
        staged = staging_path(target)
        try:
            with open_synced(staged) as file:
                torch.save(checkpoint, file)
            commit(staged, target)
        except BaseException as error:
            discard(staged)
            if (full := no_space_in(error)) is not None:
                action = f"Saving the checkpoint {os.fspath(path)!r}"
                raise no_space(full, action, bytes_of(checkpoint), target.parent) from None
            raise

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",  # PyTorch takes no function where a tensor consists of others
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads `path`; the tensors of the model and of the optimizers stay in the file until they are used.

        Raises:
            EOFError: If a local file is truncated.
        """
        local = local_path(path)
        if local is None and weights_only is None and os.fspath(path).startswith("http"):
            weights_only = True  # Lightning would unpickle anything
        if local is None or not _is_zip(local):
            return super().load_checkpoint(path, map_location, weights_only)  # type: ignore[arg-type] # any path
        if not zipfile.is_zipfile(local):
            raise EOFError("the file's end, where its contents are listed, is missing")
        checkpoint = torch.load(local, map_location=map_location, mmap=True, weights_only=weights_only)
        if isinstance(checkpoint, dict):
            # The rest may outlive the file, and must not depend on it.
            for key in checkpoint.keys() - set(_LAZY_KEYS):
                checkpoint[key] = apply_to_collection(checkpoint[key], Tensor, Tensor.clone)
        if can_resume(checkpoint):
            self.last_whole = path
        return checkpoint


def can_resume(checkpoint: Any) -> bool:
    """Returns whether training can resume from a checkpoint, which may contain only weights."""
    return isinstance(checkpoint, dict) and "optimizer_states" in checkpoint


@contextmanager
def open_synced(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for writing; at the end its contents are on the disk."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def explain_weights_only(error: pickle.UnpicklingError, path: Any) -> pickle.UnpicklingError:
    """Returns the error with advice for a user of the Trainer."""
    if "Weights only load failed" not in str(error):
        return error
    return pickle.UnpicklingError(
        f"The checkpoint {os.fspath(path)!r} holds objects that are neither tensors nor plain data. If you trust it, "
        "allow their classes with `torch.serialization.add_safe_globals([...])`, or all with the environment variable "
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1. (`trainer.fit(weights_only=False)` does not reach strategies that restore "
        f"checkpoints after setup.)\n{error}"
    )


def _is_zip(path: Path) -> bool:
    """Returns whether the file begins like those of ``torch.save``; files of its legacy format cannot be mapped."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
