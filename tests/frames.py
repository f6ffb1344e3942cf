"""The functions that Dynamo has compiled by themselves, since it was reset."""

from __future__ import annotations

from pathlib import Path

from torch._dynamo.convert_frame import input_codes

import lightning_deepcompile

__all__ = ["compiled_frames", "package_frames"]


def compiled_frames() -> list[tuple[Path, str]]:
    """Returns the file and the name of each."""
    codes = (reference() for reference in input_codes.seen)
    return [(Path(code.co_filename), code.co_name) for code in codes if code is not None]


def package_frames() -> list[str]:
    """Names of functions of lightning_deepcompile, behind their files."""
    folder = Path(lightning_deepcompile.__file__).parent
    return [f"{file.relative_to(folder)}:{name}" for file, name in compiled_frames() if file.is_relative_to(folder)]
