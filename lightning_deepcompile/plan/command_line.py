"""Shared parts of the subcommands of ``python -m lightning_deepcompile``: reading files, and failing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from lightning_deepcompile.plan.costs import Profile, ProfileError


def read_profile(path: Path) -> Profile:
    """Reads the JSON that ``strategy.profile().to_json()`` returned.

    Raises:
        ProfileError: If it cannot be read; names the file, and what to do.
    """
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ProfileError(f"{path}: {error}") from error


def fail(command: str, error: object) -> NoReturn:
    """Ends the process with status 2, as for wrong arguments, and one line that says why.

    Args:
        command: The subcommand.
        error: What is wrong, and what to do.
    """
    print(f"python -m lightning_deepcompile {command}: error: {error}", file=sys.stderr)
    raise SystemExit(2)
