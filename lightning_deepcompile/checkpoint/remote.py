"""Sharded checkpoints in remote stores, where no directory is renamed at once: ``meta.pt`` names the current one.

A save writes a complete checkpoint to a folder of its own inside of the checkpoint's path. Then it writes ``meta.pt``
of the path, one small object that names this folder, and removes what the object named before. So there is a complete
checkpoint at every moment, and two jobs that save to one path do not mix their files.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import time
from typing import Any

from fsspec.core import url_to_fs

from lightning_deepcompile.checkpoint.location import META, SAVE_FOLDER, is_part_of_checkpoint
from lightning_deepcompile.checkpoint.writer import SILENCE, has_ended, new_writer

_log = logging.getLogger(__name__)

_KEY = "folder"


def new_folder(path: str | os.PathLike[str]) -> str:
    """Returns the URL of a folder in `path` for one save; nothing is there yet."""
    return f"{os.fspath(path).rstrip('/')}/save-{new_writer()}"


def current_folder(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Returns the folder of the checkpoint's files: `path`, or the one in it that ``meta.pt`` names.

    Raises:
        ValueError: If ``meta.pt`` names anything else.
    """
    fs, folder = url_to_fs(os.fspath(path))
    name = _named(fs, folder)
    return path if name is None else f"{os.fspath(path).rstrip('/')}/{name}"


def point_to(path: str | os.PathLike[str], staged: str) -> None:
    """Makes `path` the checkpoint that is complete in `staged`, and removes the one before.

    Args:
        path: The checkpoint's URL. Other files there stay.
        staged: A `new_folder` of it.
    """
    fs, folder = url_to_fs(os.fspath(path))
    before, new = _named(fs, folder), posixpath.basename(staged)
    fs.pipe_file(posixpath.join(folder, META), json.dumps({_KEY: new}).encode())
    for name in _names_in(fs, folder):
        # Without a folder, as in one that was copied there.
        if name == before or (is_part_of_checkpoint(name) and name != META and not SAVE_FOLDER.fullmatch(name)):
            _remove(fs, posixpath.join(folder, name))


def clear_abandoned(path: str | os.PathLike[str]) -> None:
    """Removes the folders of saves whose processes have ended before they were complete."""
    fs, folder = url_to_fs(os.fspath(path))
    current = _named(fs, folder)
    for name in _names_in(fs, folder):
        match = SAVE_FOLDER.fullmatch(name)
        if match is not None and name != current and _is_abandoned(fs, posixpath.join(folder, name), match):
            _remove(fs, posixpath.join(folder, name))


def _named(fs: Any, folder: str) -> str | None:
    """The folder that ``meta.pt`` names; None if there is none, or if it is part of the checkpoint itself."""
    try:
        contents = fs.cat_file(posixpath.join(folder, META))
    except FileNotFoundError:
        return None
    if not contents.startswith(b"{"):  # it is torch.save's
        return None
    name = json.loads(contents).get(_KEY)
    if not isinstance(name, str) or not SAVE_FOLDER.fullmatch(name):
        raise ValueError(
            f"{META!r} in {folder!r} should name a folder of one save, such as 'save-…', but names {name!r}. Was it "
            "written by another program?"
        )
    return name


def _names_in(fs: Any, folder: str) -> list[str]:
    fs.invalidate_cache()  # other processes write there
    return [posixpath.basename(entry.rstrip("/")) for entry in fs.ls(folder, detail=False)] if fs.isdir(folder) else []


def _is_abandoned(fs: Any, folder: str, name: re.Match[str]) -> bool:
    if (ended := has_ended(name)) is not None:
        return ended
    try:
        newest = max((fs.modified(file).timestamp() for file in fs.find(folder)), default=None)
    except (FileNotFoundError, NotImplementedError):  # it is being removed, or the store does not tell
        return False
    return newest is not None and time.time() - newest > SILENCE


def _remove(fs: Any, place: str) -> None:
    try:
        fs.rm(place, recursive=True)
    except FileNotFoundError:
        pass  # another process removes the same
    except Exception as error:  # whatever a store raises: the checkpoint is complete all the same
        _log.warning("What an earlier save left at %s stays there: %s", place, error)
