"""Folders of safetensors files, as ``from_pretrained`` reads them: one file, or several and an index."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_deepcompile.checkpoint.staging import sync

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OF_A_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX))


class SafetensorsFolder:
    """Reads tensors, or some of their rows, from a folder.

    Files are mapped into memory, not read: unused tensors stay on the disk.

    Args:
        directory: With ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it names.

    Attributes:
        shapes: Of all tensors, by name.

    Raises:
        FileNotFoundError: If the folder, or a file of it, is missing; says which.
        ValueError: If a file is damaged, or lacks tensors that the index promises; names them.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        if not self._directory.is_dir():
            raise FileNotFoundError(
                f"{os.fspath(directory)!r} is not a directory. Give one with a pretrained model; from a hub it is what "
                "`huggingface_hub.snapshot_download(...)` returns."
            )
        self._files: dict[str, Any] = {}
        self._home: dict[str, str] = {}
        promised = self._promised()
        for file in sorted({*promised.values()} or {WEIGHTS}):
            self._files[file] = opened = self._open(file)
            self._home |= dict.fromkeys(opened.keys(), file)
        absent = [name for name, file in promised.items() if self._home.get(name) != file]
        if absent:
            raise ValueError(
                f"{os.fspath(self._directory / INDEX)!r} promises tensors that its files lack: {listed(absent)}. "
                "Download or save the model again."
            )
        self.shapes = {name: tuple(self._slice(name).get_shape()) for name in self._home}

    def _promised(self) -> dict[str, str]:
        """The index: the file of each tensor; empty if there is only one file."""
        path = self._directory / INDEX
        if not path.is_file():
            if (self._directory / WEIGHTS).is_file():
                return {}
            here = listed(sorted(entry.name for entry in self._directory.iterdir())) or "no file"
            raise FileNotFoundError(
                f"{os.fspath(self._directory)!r} has neither {WEIGHTS!r} nor {INDEX!r}. It has {here}. "
                "Weights of other formats: load them with `from_pretrained` and save them with `save_pretrained`."
            )
        try:
            promised = dict(json.loads(path.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)!r} is not an index of safetensors files: {error}") from error
        missing = sorted({f for f in promised.values() if os.path.basename(f) != f or not (path.parent / f).is_file()})
        if missing:
            raise FileNotFoundError(f"{os.fspath(path)!r} names files that are not beside it: {listed(missing)}.")
        return promised

    def _open(self, file: str) -> Any:
        path = self._directory / file
        try:
            return safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{os.fspath(path)!r} cannot be read (truncated?): {error}") from error

    def _slice(self, name: str) -> Any:
        return self._files[self._home[name]].get_slice(name)

    def read(self, name: str, low: int = 0, high: int | None = None) -> Tensor:
        """Returns rows `low` to `high` of a tensor, or all of it, on the CPU; they may be in the mapped file.

        Args:
            name: One of `shapes`.
            low: First row.
            high: The row after the last one; None: to the end.
        """
        shape = self.shapes[name]
        if high is None or not shape:
            return self._files[self._home[name]].get_tensor(name)
        if low >= high:
            return torch.empty(0, *shape[1:])
        return self._slice(name)[low:high]


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file; when this returns it is on the disk.

    Args:
        path: The file.
        tensors: On the CPU, contiguous, each in memory of its own.
    """
    save_file(tensors, path, metadata={"format": "pt"})
    sync(path)


def write_index(path: Path, files: dict[str, str], metadata: dict[str, Any]) -> None:
    """Writes the index of several files.

    Args:
        path: The file.
        files: The file of each tensor.
        metadata: Kept beside it.
    """
    path.write_text(json.dumps({"metadata": metadata, "weight_map": files}, indent=2, sort_keys=True) + "\n")
    sync(path)


def publish(staged: Path, target: Path, *, replaces: bool = True) -> None:
    """Moves a folder's files into another folder, which may contain an older model, and files of the user.

    The older model's weights are removed first, and the file without which nothing is loaded comes last: a process that
    is killed in between does not leave a mixture of two models.

    Args:
        staged: Exists; is gone afterwards. On the same file system.
        target: May exist.
        replaces: Whether `staged` is a whole model; otherwise files of an older one stay.
    """
    target.mkdir(parents=True, exist_ok=True)
    new = sorted(path.relative_to(staged) for path in staged.rglob("*") if path.is_file())
    if replaces:
        for name in (INDEX, WEIGHTS):
            (target / name).unlink(missing_ok=True)
        for entry in target.iterdir():
            if entry.is_file() and _OF_A_MODEL.fullmatch(entry.name):
                entry.unlink()
    for path in sorted(new, key=lambda path: path.name in (INDEX, WEIGHTS)):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged / path, target / path)
    shutil.rmtree(staged)
    sync(target)


def listed(names: Iterable[str], most: int = 8) -> str:
    """Lists the first of `names`, and the number of the others."""
    every = list(names)
    rest = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(repr(name) for name in every[:most]) + rest
