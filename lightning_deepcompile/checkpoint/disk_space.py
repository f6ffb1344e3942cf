"""Says in one line that a save failed for want of room: how much it needs, and how much there is."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_deepcompile.program.printer import format_bytes
from lightning_deepcompile.sharding.composite import parts_of

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def bytes_of(state: Any) -> int:
    """Bytes of a nested state's tensors; of a DTensor, on all ranks together."""
    total = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal total
        whole = isinstance(tensor, DTensor)
        total += sum(part.numel() * part.element_size() for part in ([tensor] if whole else parts_of(tensor)))
        return tensor

    apply_to_collection(state, Tensor, add)
    return total


def no_space_in(error: BaseException | None) -> OSError | None:
    """Returns what the system said if `error` comes of a full disk, an exhausted quota or a limit of files' sizes.

    Args:
        error: As it was raised here: pickling loses the errors that led to it, and ``torch.save`` raises another one.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return error
        error = error.__cause__ or error.__context__
    return None


def no_space(error: OSError, action: str, needed: int, folder: Path) -> OSError:
    """The error for the user; call it when what was written is removed again.

    Args:
        error: What the system said.
        action: What failed: "Saving ...".
        needed: Bytes that are written.
        folder: Where.
    """
    free = shutil.disk_usage(folder).free
    return OSError(
        error.errno,
        f"{action} failed ({os.strerror(error.errno or 0)}): it needs {format_bytes(needed)}, and "
        f"{format_bytes(free)} are free in {os.fspath(folder)!r} now that its incomplete files are removed. Older "
        "checkpoints are untouched.",
    )
