"""The functions that Dynamo has compiled by themselves, since it was reset."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._dynamo.convert_frame import input_codes

import lightning_deepcompile

__all__ = ["compiled_frames", "host_frames"]


def compiled_frames() -> list[tuple[Path, str]]:
    """Returns the file and the name of each."""
    codes = (reference() for reference in input_codes.seen)
    return [(Path(code.co_filename), code.co_name) for code in codes if code is not None]


def host_frames() -> list[str]:
    """Names of functions of lightning_deepcompile and of PyTorch's optimizers, behind their files."""
    folders = [Path(package.__file__).parent for package in (lightning_deepcompile, torch.optim)]
    return [
        f"{file.relative_to(folder.parent)}:{name}"
        for file, name in compiled_frames()
        for folder in folders
        if file.is_relative_to(folder)
    ]
