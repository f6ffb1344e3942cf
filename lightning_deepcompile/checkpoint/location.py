"""A checkpoint's path: whether it is local or remote, the kind of what is there, and which checkpoint that is."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from pathlib import Path
from typing import Literal

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_deepcompile.checkpoint.writer import WRITER

META = "meta.pt"
"""In a sharded checkpoint: everything that is neither the model nor an optimizer. It is written last."""

SAVE_FOLDER = re.compile(rf"save-{WRITER}")
"""Matches names of folders in remote checkpoints, each with the files of one save."""
_END = 2**16


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """The path on this machine's file system, or None for a remote URL."""
    fs, stripped = url_to_fs(os.fspath(path))
    return Path(stripped) if isinstance(fs, LocalFileSystem) else None


def find_kind(path: str | os.PathLike[str]) -> Literal["file", "sharded", "directory"] | None:
    """Returns the kind of `path`: a file, a sharded checkpoint, another directory, or nothing (None)."""
    fs, stripped = url_to_fs(os.fspath(path))
    if fs.isfile(stripped):
        return "file"
    if not fs.isdir(stripped):
        return None
    return "sharded" if fs.isfile(posixpath.join(stripped, META)) else "directory"


def is_part_of_checkpoint(name: str) -> bool:
    """Returns whether a file of this name in a directory belongs to a sharded checkpoint, and not to the user."""
    return (
        name in (META, ".metadata", ".metadata.tmp")
        or name.endswith(".distcp")
        or SAVE_FOLDER.fullmatch(name) is not None
    )


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Returns a digest that differs between two checkpoints, without reading their tensors; empty if there is none.

    For a directory it is the digest of ``.metadata``, which contains a number of its save; in a remote store that of
    ``meta.pt``, which names the folder of the save. For a file it is that of the end, where ``torch.save`` lists the
    contents with a checksum of each.
    """
    try:
        fs, stripped = url_to_fs(os.fspath(path))
        if fs.isdir(stripped):
            files = [posixpath.join(stripped, name) for name in (META, ".metadata")]
            return hashlib.sha256(b"".join(fs.cat_file(file) for file in files if fs.isfile(file))).hexdigest()
        size = fs.size(stripped)
        return hashlib.sha256(b"%d" % size + fs.cat_file(stripped, start=max(0, size - _END))).hexdigest()
    except Exception:  # whatever a remote place raises: loading from there says it better
        return ""
