"""Chooses the C++ runtime that fits PyTorch in a wheel of several; says how to build it again.

Needs the standard library alone, and PyTorch's version.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import sys
import sysconfig
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FLAGS = "--no-build-isolation --no-deps --no-cache-dir --force-reinstall"
"""Without the cache, which may hold a wheel that was built for another PyTorch."""


def variants(torch_version: str) -> list[str]:
    """Returns the names of the builds that fit a PyTorch, the best one first.

    Args:
        torch_version: Its version; builds fit all patch releases of a minor version. Both kinds of build load with and
            without CUDA, and a CPU build trains on CPUs alone.
    """
    release = f"torch{'.'.join(torch_version.split('.')[:2])}"
    return [f"{release}-cuda", f"{release}-cpu"]


def load_prebuilt(name: str, folder: str) -> None:
    """Replaces the module `name`, a folder of builds, by the build that fits the PyTorch that is installed.

    Args:
        name: The module's name.
        folder: Has a folder for each build.

    Raises:
        ImportError: If none fits.
    """
    import torch

    files = sorted(Path(folder).glob("*/_C.*.so"))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    fitting = {file.parent.name: file for file in files if file.name == f"_C{suffix}"}
    if files and not fitting:  # another processor, Python, or C library: musl and not glibc
        built = files[0].name.removeprefix("_C.").removesuffix(".so")
        raise ImportError(
            f"this wheel was built for {built}, and this Python is {suffix.strip('.').removesuffix('.so')}"
        )
    name_of_build = next((one for one in variants(torch.__version__) if one in fitting), None)
    if name_of_build is None:
        raise ImportError(f"this wheel was built for {', '.join(fitting)}, and PyTorch is {torch.__version__}")
    file = fitting[name_of_build]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


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
