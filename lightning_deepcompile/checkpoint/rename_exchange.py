"""Exchanges two paths atomically, which Linux can do and the standard library cannot."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# The system, the C library, or the file system (NFS, for one) does not support the operation.
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def exchange_paths(one: Path, other: Path) -> bool:
    """Exchanges the contents of two paths of one file system: each path has one or the other at every moment.

    Args:
        one: A file, a directory or a link.
        other: The same; its kind may be another.

    Returns:
        Whether it was done: False where only plain renames are supported.

    Raises:
        OSError: If one of the paths does not exist, or may not be renamed.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), os.fspath(one), None, os.fspath(other))
