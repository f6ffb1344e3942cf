"""Moves a new checkpoint into place so that a reader, or a run after a crash, finds either the old or the new one.

Every save writes to a hidden name of its own beside its target, and moves the complete checkpoint there. If the file
system can exchange two paths, the target exists at every moment. Elsewhere (NFS) a directory cannot be replaced
atomically: the old and the new one have visible names, such as ``last.replaced-….ckpt``, between two renames.
Lightning's search for the last checkpoint finds them, and so does `resolve`.

The names of files that a save may leave behind tell which process wrote them. The next save into the same folder
removes those of processes that have ended, and, as other hosts' processes cannot be seen, those that were not written
to for an hour: ranks that save wait for each other for half an hour at most. If such a save was alive after all, it
fails, and its target does not change.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import posixpath
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from lightning_deepcompile.checkpoint.location import META, find_kind, is_part_of_checkpoint, local_path
from lightning_deepcompile.checkpoint.rename_exchange import exchange_paths
from lightning_deepcompile.checkpoint.writer import SILENCE, WRITER, has_ended, is_own, new_writer

_log = logging.getLogger(__name__)

_ATTEMPTS = 100
_RACES = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR)

_HIDDEN = re.compile(rf"\.[0-9a-f]{{16}}\.{WRITER}\.(?P<suffix>saving|removing)")
_ASIDE = re.compile(rf"(?P<stem>.*)\.replaced-{WRITER}(?P<suffix>\.[^.]*)?")


def staging_path(target: Path) -> Path:
    """Returns a new name beside `target`, for one save to write to; nothing is there yet."""
    return _hidden_path(target, "saving")


def _hidden_path(target: Path, suffix: str) -> Path:
    # A digest, because Lightning looks for its checkpoints by parts of their names, and this one is incomplete.
    digest = hashlib.sha256(target.name.encode()).hexdigest()[:16]
    return target.with_name(f".{digest}.{new_writer()}.{suffix}")


def _aside_path(target: Path) -> Path:
    return target.with_name(f"{target.stem}.replaced-{new_writer()}{target.suffix}")


def _is_abandoned(path: Path, name: re.Match[str]) -> bool:
    """Returns whether the process that wrote to `path` has ended, as far as this process can tell."""
    if (ended := has_ended(name)) is not None:
        return ended
    try:
        entries = [path, *path.iterdir()] if path.is_dir() and not path.is_symlink() else [path]
        return time.time() - max(entry.lstat().st_ctime for entry in entries) > SILENCE
    except FileNotFoundError:
        return False  # it is being written to


def _asides(target: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """Yields the files that were put aside for `target`, with the parts of their names."""
    if target.parent.is_dir():
        for path in target.parent.iterdir():
            name = _ASIDE.fullmatch(path.name)
            if name is not None and _target(path, name) == target:
                yield path, name


def _target(aside: Path, name: re.Match[str]) -> Path:
    return aside.with_name(f"{name['stem']}{name['suffix'] or ''}")


def _newest(paths: list[Path]) -> Path | None:
    """The complete checkpoint among `paths` that was saved last."""
    times = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if (kind := find_kind(path)) in ("file", "sharded"):
                times[path] = (path / META if kind == "sharded" else path).stat().st_mtime_ns
    return max(times, key=times.__getitem__, default=None)


def resolve(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Returns the place of the checkpoint of `path`: aside if a save was interrupted, or `path` after its end."""
    local = local_path(path)
    if local is None:
        asides = [] if find_kind(path) in ("file", "sharded") else _remote_asides(path)
        return next((aside for aside in reversed(asides) if find_kind(aside) in ("file", "sharded")), path)
    if os.path.lexists(local):
        return path
    if (name := _ASIDE.fullmatch(local.name)) is not None:
        return _target(local, name)
    return _newest([aside for aside, _ in _asides(local)]) or path


def clear_leftovers(folder: Path) -> None:
    """Removes leftovers of interrupted saves and removals from a folder, and restores displaced checkpoints.

    Args:
        folder: Need not exist.
    """
    if not folder.is_dir():
        return
    asides: dict[Path, list[Path]] = {}
    for path in folder.iterdir():
        if (name := _HIDDEN.fullmatch(path.name)) is not None:
            if name["suffix"] == "removing":
                _delete(path)
            elif _is_abandoned(path, name):
                with _saying(path):
                    discard(path)
        elif (name := _ASIDE.fullmatch(path.name)) is not None and _is_abandoned(path, name):
            asides.setdefault(_target(path, name), []).append(path)
    for target, paths in asides.items():
        if not os.path.lexists(target):
            put_back = _newest(paths) or paths[0]
            paths.remove(put_back)
            with _saying(put_back):
                os.rename(put_back, target)
        for path in paths:
            with _saying(path):
                _settle(path, target)


@contextlib.contextmanager
def _saying(path: Path | str) -> Iterator[None]:
    """Turns errors into warnings where failing is not worth it: leftovers of another user, or of a live save."""
    try:
        yield
    except OSError as error:
        _log.warning("What an interrupted save left at %s stays there: %s", path, error)


def commit(staged: Path, target: Path) -> None:
    """Moves a complete checkpoint into place; the old one is removed once that is on the disk.

    Args:
        staged: The file or directory to move; a `staging_path` of `target`.
        target: A file, a directory, a link (which is replaced, not followed) or nothing. Files in a directory that do
            not belong to a checkpoint are kept if the new one is a directory too.
    """
    if staged.is_dir():
        sync(staged)
    replaced = _put(staged, target)
    sync(target.parent)  # otherwise a power cut may undo the renames
    for old in replaced:
        _settle(old, target)


def _put(staged: Path, target: Path) -> list[Path]:
    """Moves `staged` to `target`; returns the new places of what was there."""
    replaced: list[Path] = []
    new = staged
    for attempt in range(_ATTEMPTS):
        try:
            if new.is_file() and (target.is_symlink() or not target.is_dir()):
                os.replace(new, target)
                return replaced
            if not os.path.lexists(target):
                os.rename(new, target)
                return replaced
            if new is staged:  # a name by which it is found if this process ends in between
                new = _aside_path(target)
                os.rename(staged, new)
            if exchange_paths(new, target):
                return [*replaced, new]
            aside = _aside_path(target)
            os.rename(target, aside)
            replaced.append(aside)
        except OSError as error:
            # Another process may have created or removed something there since this one looked.
            if error.errno in _RACES and os.path.lexists(new) and attempt + 1 < _ATTEMPTS:
                continue
            with contextlib.suppress(OSError):
                if replaced and not os.path.lexists(target):
                    os.rename(replaced.pop(), target)
                if new is not staged:
                    os.rename(new, staged)
            raise
    raise OSError(errno.EBUSY, f"other processes replaced it {_ATTEMPTS} times meanwhile", os.fspath(target))


def stand_in(path: str | os.PathLike[str], previous: str | os.PathLike[str] | None) -> None:
    """Links `path` to the previous checkpoint until a thread has written the new one.

    Lightning's ``save_last="link"`` links to a checkpoint at once. If the link's end were missing when a run is killed,
    Lightning would find no last checkpoint, and start from the beginning.

    Args:
        path: The path of the coming checkpoint.
        previous: A complete checkpoint, if there is one.
    """
    target, whole = local_path(path), None if previous is None else local_path(previous)
    if target is None or whole is None or target.exists() or not whole.exists():
        return
    if target.is_symlink():
        target.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(os.path.relpath(whole.resolve(), target.parent.resolve()))


@contextlib.contextmanager
def set_aside(path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes room for a save that cannot replace a directory; removes the old one on success, else restores it."""
    target = local_path(path)
    if target is None:
        with _set_aside_remotely(os.fspath(path)):
            yield
        return
    aside = _aside_path(target)
    os.rename(target, aside)
    try:
        yield
    except BaseException:
        discard(target)
        os.rename(aside, target)
        raise
    if os.path.lexists(target):  # otherwise it will be, and a later removal of `target` removes both
        discard(aside)


@contextlib.contextmanager
def _set_aside_remotely(path: str) -> Iterator[None]:
    fs, place = url_to_fs(path)
    parent, name = posixpath.split(place)
    aside = posixpath.join(parent, _aside_path(Path(name)).name)
    _move(fs, place, aside)
    try:
        yield
    except BaseException:
        if fs.exists(place):
            fs.rm(place, recursive=True)
        _move(fs, aside, place)
        raise
    if fs.exists(place):
        for old in _remote_asides(path):
            with _saying(old):
                fs.rm(url_to_fs(old)[1], recursive=True)


def _move(fs: Any, old: str, new: str) -> None:
    """Moves a checkpoint in a remote store; at each moment one of the two places has `META` and all that belongs to it.

    Most stores copy and remove objects one by one.
    """
    if fs.isfile(old):
        fs.mv(old, new)
        return
    meta = posixpath.join(old, META)
    try:
        for file in sorted(fs.find(old), key=lambda file: file == meta):
            copy = new + file[len(old) :]
            fs.makedirs(posixpath.dirname(copy), exist_ok=True)
            fs.cp_file(file, copy)
    except NotImplementedError:  # where files are not copied they are renamed, as by SFTP
        fs.mv(old, new, recursive=True)
        return
    fs.rm(meta)
    fs.rm(old, recursive=True)


def _remote_asides(path: str | os.PathLike[str]) -> list[str]:
    """Returns the URLs of what was put aside for a remote `path`."""
    fs, place = url_to_fs(os.fspath(path))
    parent, target = posixpath.split(place)
    found = []
    for entry in fs.ls(parent, detail=False) if fs.isdir(parent) else []:
        name = _ASIDE.fullmatch(posixpath.basename(entry.rstrip("/")))
        if name is not None and _target(Path(name[0]), name).name == target:
            found.append(f"{os.fspath(path).rstrip('/').rpartition('/')[0]}/{name[0]}")
    return found


def _settle(old: Path, target: Path) -> None:
    """Removes what `target` has replaced; files of the user in it move to the new directory."""
    if target.is_dir() and old.is_dir() and not old.is_symlink():
        for entry in old.iterdir():
            if not is_part_of_checkpoint(entry.name) and not os.path.lexists(target / entry.name):
                with contextlib.suppress(FileNotFoundError):  # another process settles the same
                    os.rename(entry, target / entry.name)
    discard(old)


def discard(path: Path) -> None:
    """Removes a file, link or directory if it exists: atomically for its readers and writers."""
    claimed = _hidden_path(path, "removing")
    try:
        os.rename(path, claimed)
    except FileNotFoundError:
        return
    _delete(claimed)


def _delete(path: Path) -> None:
    """Deletes unused files. If that fails (NFS keeps open files), the next save deletes the rest."""
    with _saying(path):
        while os.path.lexists(path):
            with contextlib.suppress(FileNotFoundError):  # another process deletes the same
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a checkpoint of either kind, local or remote, with leftovers of interrupted saves in its folder."""
    local = local_path(path)
    if local is not None:
        clear_leftovers(local.parent)
        for aside, name in _asides(local):
            if is_own(name):
                discard(aside)
        discard(local)
        return
    fs, stripped = url_to_fs(os.fspath(path))
    if fs.exists(stripped):
        if fs.isfile(meta := f"{stripped.rstrip('/')}/{META}"):
            fs.rm(meta)  # without it, the rest is no checkpoint
        fs.rm(stripped, recursive=True)
