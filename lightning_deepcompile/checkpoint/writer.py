"""Names of files that one save writes: they tell which process wrote them, and whether it has ended."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import uuid
from pathlib import Path

SILENCE = 3600.0
"""Seconds without a change after which a save of another host is taken for dead."""

# Letters, as Lightning reads digits in names of checkpoints as numbers of steps and versions.
_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_DIGITS = str.maketrans("abcdefghijklmnop", "0123456789abcdef")
WRITER = r"(?P<host>[a-p]{8})-(?P<process>[a-p]+)-[a-p]{8}"
"""Matches what `new_writer` returns."""


def new_writer() -> str:
    """Returns a name for this process, and nothing else that it writes."""
    return f"{_host()}-{os.getpid():x}-{uuid.uuid4().hex[:8]}".translate(_LETTERS)


def is_own(name: re.Match[str]) -> bool:
    """Returns whether this process wrote what has that name."""
    return name["host"].translate(_DIGITS) == _host() and int(name["process"].translate(_DIGITS), 16) == os.getpid()


def has_ended(name: re.Match[str]) -> bool | None:
    """Returns whether the process that wrote what has that name has ended; None if it is another host's."""
    if name["host"].translate(_DIGITS) != _host():
        return None
    try:
        os.kill(int(name["process"].translate(_DIGITS), 16), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it is another user's, and alive
    return False


def _host() -> str:
    """Names the processes among which this one's number is unique: this host's, or container's, since it began."""
    facts = [platform.node()]
    with contextlib.suppress(OSError):  # not Linux
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
