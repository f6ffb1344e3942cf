"""Says how to build the C++ runtime again, from where the package was installed; needs the standard library alone."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["rebuild_command"]

_FLAGS = "--no-build-isolation --no-deps --no-cache-dir --force-reinstall"
"""Without the cache, which may hold a wheel that was built for another PyTorch."""


def rebuild_command() -> str:
    """The command that builds the runtime for this Python and the PyTorch that is installed.

    No index has the package: ``pip`` needs the folder or the address that it was installed from.
    """
    python, checkout = shlex.quote(sys.executable), Path(__file__).resolve().parent.parent
    if (checkout / "setup.py").is_file():
        return f"cd {shlex.quote(str(checkout))} && {python} setup.py build_ext --inplace --force"
    return f"{python} -m pip install {_FLAGS} {shlex.quote(_source())}"


def _source() -> str:
    """The folder, wheel or address that the package was installed from, or words for it where pip has not kept it."""
    try:
        text = importlib.metadata.distribution("lightning-deepcompile").read_text("direct_url.json")
        address = json.loads(text or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        address = {}
    url = address.get("url", "")
    if vcs := address.get("vcs_info"):
        return f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    place = unquote(urlsplit(url).path) if url.startswith("file:") else url
    # A wheel holds a runtime that is built already: what can be built is its source.
    return place if place and not place.endswith(".whl") else "/path/to/the/source/of/lightning_deepcompile"
