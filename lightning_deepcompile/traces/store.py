"""Files of traces: one for every step, kind of run and rank."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import platform
import re
import sys
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lightning_deepcompile import compat_frames
from lightning_deepcompile.compat_frames import UntraceableError
from lightning_deepcompile.files import write_whole

__all__ = ["TraceFile", "environment"]

_log = logging.getLogger(__name__)
_FORMAT = b"lightning_deepcompile trace 1\n"
_PACKAGE = Path(__file__).resolve().parents[1]

# What shells, schedulers and launchers set anew for every run, and what PyTorch, Triton and Lightning set themselves,
# such as the address of a function once a program has been compiled.
_EVERY_RUN = re.compile(
    "(SLURM|PMI|PMIX|OMPI|PBS|LSB|KUBERNETES|TORCHELASTIC|MASTER|SSH|XDG|TERM|LC|PYTEST|PIP|GITHUB|WANDB)_.*|"
    "(_?TORCHINDUCTOR|TRITON|NCCL|TORCH_NCCL|PL)_.*|CUDA_MODULE_LOADING|"
    "((LOCAL|GROUP|ROLE|NODE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|"
    "HOSTNAME|OLDPWD|PWD|SHLVL|TERM|TMPDIR|COLUMNS|LINES|LANG|LS_COLORS|MAIL|_"
)


def environment(device: torch.device, rank: int, world_size: int) -> dict[str, str]:
    """What a trace depends on besides code and objects, by names; values of variables may be secret, and are hashed.

    Args:
        device: Where the step runs.
        rank: This rank, which graphs do not depend on, but what users do may.
        world_size: Number of ranks.
    """
    # What setuptools brings along is found once something has been compiled.
    found = [each for each in metadata.distributions() if "_vendor" not in Path(str(each.locate_file(""))).parts]
    words = {f"package {each.metadata['Name']}": each.version for each in found}
    for name, value in os.environ.items():
        if not _EVERY_RUN.fullmatch(name):  # Dynamo takes variables that a step reads as constants, without guards
            words[f"environment variable {name}"] = hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()
    sources = b"".join(path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py")))
    return words | {
        "Python": sys.version,
        "platform": platform.platform(),
        "PyTorch": f"{torch.__version__} {torch.version.git_version}",
        "setting of Dynamo": compat_frames.dynamo_settings(),
        "device": _kind_of(device),
        "rank": f"{rank} of {world_size}",
        "version of this package": hashlib.sha256(sources).hexdigest(),
    }


def _kind_of(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    one = torch.cuda.get_device_properties(device)  # printed whole, it names the one at hand
    return f"{one.name}, {one.major}.{one.minor}, {one.multi_processor_count} multiprocessors"


class TraceFile:
    """The file of one step.

    Args:
        folder: Where files of traces are.
        name: The step's name.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, folder: str, name: str, rank: int, world_size: int) -> None:
        self.path = Path(folder) / f"{name}-{rank}-of-{world_size}.trace"

    def read(self) -> Any:
        """What was written last; None without a file.

        Raises:
            UntraceableError: If the file is not a whole one of this version.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UntraceableError(f"it cannot be read ({error})") from error
        head = len(_FORMAT)
        if not data.startswith(_FORMAT) or hashlib.sha256(data[head + 32 :]).digest() != data[head : head + 32]:
            raise UntraceableError("it is damaged, or of another version")
        try:
            return pickle.loads(zlib.decompress(data[head + 32 :]))
        except Exception as error:  # whatever classes that are no more do when they are looked up
            raise UntraceableError(f"it cannot be understood ({type(error).__name__}: {error})") from error

    def write(self, content: Any) -> None:
        """Replaces the file in one step; a failure is one line of log.

        Args:
            content: Anything that can be pickled.

        Raises:
            UntraceableError: If it cannot be pickled.
        """
        try:
            data = zlib.compress(pickle.dumps(content), 1)
        except Exception as error:  # whatever objects do that were not made for it
            raise UntraceableError(f"it cannot be written down ({type(error).__name__}: {error})") from error
        try:
            write_whole(self.path, _FORMAT + hashlib.sha256(data).digest() + data)
        except OSError as error:
            _log.info("The trace could not be written to %r: %s", str(self.path), error)
