"""What a checkpoint's path holds, and how a new checkpoint takes its place so that a crash leaves the old or the new.

A checkpoint is written beside its place, under a hidden name, and renamed when it is whole. A file replaces a file in
one step. A directory cannot be replaced in one step: the old one is renamed aside first, and in the moment between the
two renames `resolve` finds it there. What carries no ``meta.pt`` is no checkpoint: it is written last, removed first.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
from pathlib import Path
from typing import Literal

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

__all__ = ["META", "commit", "discard", "find_kind", "local_path", "remove", "resolve", "staging_path"]

META = "meta.pt"
"""In a sharded checkpoint: everything that is neither the model nor an optimizer."""


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """The path on this machine's file system, or None for a remote URL."""
    fs, stripped = url_to_fs(os.fspath(path))
    return Path(stripped) if isinstance(fs, LocalFileSystem) else None


def find_kind(path: str | os.PathLike[str]) -> Literal["file", "sharded", "directory"] | None:
    """What `path` holds: a file, a sharded checkpoint, another directory, or nothing (None)."""
    fs, stripped = url_to_fs(os.fspath(path))
    if fs.isfile(stripped):
        return "file"
    if not fs.isdir(stripped):
        return None
    return "sharded" if fs.isfile(posixpath.join(stripped, META)) else "directory"


def resolve(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """`path`, or the checkpoint that stood there when a save was interrupted between its two renames."""
    local = local_path(path)
    if local is not None and not os.path.lexists(local) and _aside(local).exists():
        return _aside(local)
    return path


def staging_path(target: Path) -> Path:
    """Where a checkpoint for `target` is written before it is whole; on the same file system."""
    return target.with_name(_hidden_name(target, "saving"))


def _aside(target: Path) -> Path:
    return target.with_name(_hidden_name(target, "replaced"))


def _hidden_name(target: Path, suffix: str) -> str:
    # A digest, because Lightning looks for its checkpoints by parts of their names: a remnant of an interrupted save
    # must not look like one.
    return f".{hashlib.sha256(target.name.encode()).hexdigest()[:16]}.{suffix}"


def commit(staged: Path, target: Path) -> None:
    """Moves a whole checkpoint to its place.

    Args:
        staged: The file or directory to move, `staging_path` of `target`.
        target: A file, a directory, a link (which is replaced, not followed) or nothing. Files in a directory that do
            not belong to a checkpoint are kept if the new one is a directory too.
    """
    _settle(target)
    if staged.is_file() and (target.is_symlink() or not target.is_dir()):
        os.replace(staged, target)
    else:
        if os.path.lexists(target):
            os.rename(target, _aside(target))
        os.rename(staged, target)
        _settle(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # else a power cut may undo the renames
    finally:
        os.close(folder)


def _settle(target: Path) -> None:
    """Puts what was renamed aside back if nothing has taken its place, and else away, but for files of the user."""
    aside = _aside(target)
    if not os.path.lexists(aside):
        return
    if not os.path.lexists(target):
        os.rename(aside, target)
        return
    if target.is_dir() and aside.is_dir() and not aside.is_symlink():
        for entry in aside.iterdir():
            if not _is_part_of_checkpoint(entry.name):
                os.rename(entry, target / entry.name)
    discard(aside)


def _is_part_of_checkpoint(name: str) -> bool:
    return name in (META, ".metadata") or name.endswith(".distcp")


def discard(path: Path) -> None:
    """Removes a file, link or directory if it exists; a checkpoint stops being one first."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        (path / META).unlink(missing_ok=True)
        shutil.rmtree(path)


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a checkpoint of either kind, local or remote, with what interrupted saves left beside it."""
    local = local_path(path)
    if local is not None:
        for remnant in (staging_path(local), _aside(local), local):
            discard(remnant)
        return
    fs, stripped = url_to_fs(os.fspath(path))
    if fs.exists(stripped):
        meta = posixpath.join(stripped, META)
        if fs.isfile(meta):
            fs.rm(meta)
        fs.rm(stripped, recursive=True)
