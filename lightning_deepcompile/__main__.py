"""``python -m lightning_deepcompile``: its subcommands, and the first of them, ``info``.

``info`` prints what a bug report needs, and what is missing for training. It must work on a broken installation, too,
since that is where it is needed: each section stands on its own, and a failure becomes an entry of the report.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_deepcompile import __version__
from lightning_deepcompile.installation import rebuild_command

Report = dict[str, Any]

_COMMANDS: dict[str, tuple[str | None, str]] = {
    "info": (None, "versions, devices, communicators, what is missing, and what may go wrong: for bug reports"),
    "simulate": (
        "lightning_deepcompile.plan.offline",
        "predict a measured step on other ranks, links and memory budgets",
    ),
    "report": ("lightning_deepcompile.report.command", "write a measured step as a page for a browser, and a trace"),
    "estimate": (
        "lightning_deepcompile.trainer.estimate_command",
        "predict memory and time of a step before it runs: no GPU, no memory for the model",
    ),
    "plan": ("lightning_deepcompile.plan.show", "check a plan file, and print what it holds"),
}
"""The module of each, with a function `main` of the arguments, and what the command is for."""
_PACKAGES = ("lightning-deepcompile", "torch", "lightning", "transformers", "jsonargparse", "numpy", "setuptools")
_LEAST_THREADS, _LEAST_SHARED, _PINNED = 4096, 2**30, 256 * 2**20
_GPUS = Path("/proc/driver/nvidia/gpus")
"""Has an entry for each GPU that NVIDIA's driver knows."""
_COPY_ENGINES = [2, 28]
"""The version of NCCL from which on copy engines gather."""
_VARIABLES = ("NCCL_", "TORCH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LDC_", "PYTORCH_", "GLOO_")


def collect() -> Report:
    """Collects the report.

    Returns:
        Sections by name, each a dict of plain values; ``may go wrong`` and ``missing`` are lists of sentences, empty if
        all is well.
    """
    torch, torch_error = _import("torch")
    extension, extension_error = _import("lightning_deepcompile._C") if torch else (None, "PyTorch is needed first")
    build = _build(extension, extension_error)
    devices = _devices(torch)
    backends = _backends(torch)
    communicators = _communicators(build, devices, backends)
    return {
        "versions": _versions(),
        "extension": build,
        "devices": devices,
        "host memory": _host_memory(),
        "c10d backends": backends,
        "communicators": communicators,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
        "may go wrong": _risks(torch, devices, backends),
        "missing": _missing(torch_error, build, devices, communicators),
    }


def render(report: Report) -> str:
    """Formats the report as a table.

    Args:
        report: What :func:`collect` returned.

    Returns:
        Lines of text; the last sections say in words what may go wrong, and what is missing.
    """
    width = max(len(key) for section in report.values() if isinstance(section, dict) for key in section) + 2
    lines = []
    for title, section in report.items():
        lines.append(title)
        if isinstance(section, dict):
            lines += [f"  {key:<{width}}{value}" for key, value in section.items()] or ["  none"]
        else:
            lines += [f"  - {sentence}" for sentence in section] or ["  nothing"]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Runs a subcommand; ``info`` if none is named."""
    arguments = sys.argv[1:]
    if arguments[:1] in ([], ["--json"]):
        arguments = ["info", *arguments]
    if arguments[0] in _COMMANDS:
        module, _ = _COMMANDS[arguments[0]]
        # Imported now: all but `info` need torch, which may be broken.
        run = _info if module is None else importlib.import_module(module).main
        run(arguments[1:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m lightning_deepcompile",
        description="Without a command: info. Each command has a --help of its own.",
    )
    parser.add_argument("--version", action="version", version=f"lightning-deepcompile {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (_, text) in _COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    parser.parse_args(arguments)


def _info(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_deepcompile info",
        description="Prints versions, devices, what may go wrong, and what is missing.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    report = collect()
    print(json.dumps(report, indent=2) if options.json else render(report))


def _import(name: str) -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # a library built for another torch raises more than ImportError
        return None, f"{type(error).__name__}: {error}"


def _versions() -> Report:
    versions: Report = {"python": f"{platform.python_version()} ({sys.executable})", "os": platform.platform()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _build(extension: ModuleType | None, error: str) -> Report:
    if extension is None:
        return {"state": "not usable", "error": error, "rebuild": rebuild_command()}
    facts = {**extension.build_info(), "nccl found": extension.found_nccl() or "none"}
    return {"state": "loaded", "file": extension.__file__, **facts, "rebuild": rebuild_command()}


def _devices(torch: ModuleType | None) -> Report:
    devices: Report = {"cpu": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"}
    if torch is None:
        return devices
    devices["torch's CUDA"] = torch.version.cuda or "no"
    try:
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            memory = f"{p.total_memory / 2**30:.0f} GiB"
            devices[f"cuda:{index}"] = f"{p.name}, {memory}, capability {p.major}.{p.minor}"
    except Exception as error:  # a driver that does not match the build
        devices["cuda"] = f"{type(error).__name__}: {error}"
    return devices


def _host_memory() -> Report:
    """Memory available for offloaded tensors."""
    memory: Report = {}
    try:
        from lightning_deepcompile.offload.host_memory import available_host_memory

        memory["available"] = f"{available_host_memory() / 2**30:.1f} GiB, within the limits of control groups"
    except Exception as error:  # the package or torch does not load
        memory["available"] = f"{type(error).__name__}: {error}"
    try:
        shared = os.statvfs("/dev/shm")
        memory["/dev/shm"] = f"{shared.f_bavail * shared.f_frsize / 2**20:.0f} MiB free"
    except OSError as error:
        memory["/dev/shm"] = str(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**10:.0f} KiB"
    memory["ulimit -l"] = f"{locked} (not counted by CUDA's driver; InfiniBand's counts what NCCL registers)"
    return memory


def _backends(torch: ModuleType | None) -> Report:
    if torch is None or not torch.distributed.is_available():
        return {"torch.distributed": "not available"}
    names = ("gloo", "nccl", "mpi")
    backends = {name: "yes" if getattr(torch.distributed, f"is_{name}_available")() else "no" for name in names}
    if backends["nccl"] == "yes":
        try:
            backends["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        except Exception as error:  # the library is there but does not load
            backends["nccl"] = f"{type(error).__name__}: {error}"
    return backends


def _communicators(build: Report, devices: Report, backends: Report) -> Report:
    """Says for each of the runtime's two communicators "yes", or the obstacle."""
    no_runtime = None if build["state"] == "loaded" else "no: the extension is not usable"
    reason = build.get("reason")
    built_without = f"no: the extension was built without NCCL{f' ({reason})' if reason else ''}"
    return {
        "process_group": no_runtime or ("yes" if "torch.distributed" not in backends else "no: no torch.distributed"),
        "nccl": no_runtime
        or (built_without if build.get("mode") != "cuda" else None)
        or ("no: libnccl.so.2 is not found" if build["nccl found"] == "none" else None)
        or ("yes" if "cuda:0" in devices else "no: no CUDA device"),
    }


def _risks(torch: ModuleType | None, devices: Report, backends: Report) -> list[str]:
    """Says what trains all the same, but slowly, or ends later with an error that is hard to read."""
    found = [_thread_risks(devices), _host_memory_risks(), _hidden_gpus(devices)]
    if torch is not None and "cuda:0" in devices:
        found += [_peer_risks(torch), _nccl_risks(backends), _pinned_risks(torch)]
    return [sentence for sentences in found for sentence in sentences]


def _hidden_gpus(devices: Report) -> list[str]:
    if devices.get("torch's CUDA") != "no" or not any(_GPUS.glob("*")):
        return []
    return [
        "This machine has NVIDIA GPUs, and PyTorch is a CPU build, which does not see them: install a CUDA build of "
        "PyTorch."
    ]


def _thread_risks(devices: Report) -> list[str]:
    risks = []
    cores, gpus = len(os.sched_getaffinity(0)), sum(name.startswith("cuda:") for name in devices)
    if gpus and cores < 2 * gpus:
        risks.append(
            f"This process may use {cores} cores, for {gpus} GPUs: each rank needs one for training, and others for "
            "its loader and the compiler. Ask the job's scheduler for more."
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_THREADS:
        risks.append(
            f"`ulimit -u` is {limit}: NCCL, loaders and the compiler start hundreds of threads on each rank, which "
            f"then fail with 'Resource temporarily unavailable'. Raise it to {_LEAST_THREADS} or more."
        )
    return risks


def _host_memory_risks() -> list[str]:
    risks = []
    try:
        shared = os.statvfs("/dev/shm")
        if shared.f_bavail * shared.f_frsize < _LEAST_SHARED:
            risks.append(
                f"/dev/shm has {shared.f_bavail * shared.f_frsize / 2**20:.0f} MiB free: loaders with workers and NCCL "
                "put their buffers there, and end with a bus error. Start containers with `--shm-size=8g`."
            )
    except OSError:
        risks.append("There is no /dev/shm: loaders with workers and NCCL put their buffers there.")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and any(Path("/sys/class/infiniband").glob("*")):
        risks.append(
            f"`ulimit -l` is {limit // 2**10} KiB, and this machine has InfiniBand: NCCL cannot register its buffers. "
            "Set it to unlimited, for Docker with `--ulimit memlock=-1`."
        )
    return risks


def _peer_risks(torch: ModuleType) -> list[str]:
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    apart = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if not apart:
        return []
    first = "cuda:{} and cuda:{}".format(*apart[0])
    return [
        f"{len(apart)} of {len(pairs)} pairs of GPUs have no peer access ({first} first): NCCL copies through host "
        "memory between them. `nvidia-smi topo -m` shows how they are connected."
    ]


def _nccl_risks(backends: Report) -> list[str]:
    risks = []
    version = backends.get("nccl", "").split(".")
    if len(version) > 1 and version[0].isdigit() and [int(part) for part in version[:2]] < _COPY_ENGINES:
        risks.append(
            f"NCCL is {backends['nccl']}: gathers by copy engines (`symmetric_memory`) need "
            f"{'.'.join(map(str, _COPY_ENGINES))} or newer, and are not used."
        )
    switched_off = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE") if name in os.environ]
    if slow := [name for name in switched_off if os.environ[name] not in ("", "0")]:
        risks.append(f"{' and '.join(slow)} {'is' if len(slow) == 1 else 'are'} set: NCCL leaves fast links unused.")
    return risks


def _pinned_risks(torch: ModuleType) -> list[str]:
    try:
        torch.empty(_PINNED, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return [
            f"{_PINNED / 2**20:.0f} MiB of host memory cannot be pinned ({reason}): offloading needs pinned memory."
        ]
    return []


def _missing(torch_error: str, build: Report, devices: Report, communicators: Report) -> list[str]:
    missing = []
    if torch_error:
        missing.append(f'PyTorch does not load ({torch_error}): pip install "torch>=2.11,<2.16".')
    lightning, lightning_error = _import("lightning.pytorch.strategies") if not torch_error else (None, "")
    if lightning_error:
        missing.append(f'Lightning does not load ({lightning_error}): pip install "lightning>=2.6,<2.7".')
    if build["state"] != "loaded" and (installed := _hidden_installation()):
        missing.append(
            f"The package of this checkout has no C++ runtime, and hides the installed one ({installed}): start "
            "Python in another folder."
        )
    elif build["state"] != "loaded" and not torch_error:
        missing.append(
            f"The C++ runtime does not load ({build['error']}). It needs g++ with C++20 and has to be built for the "
            f"PyTorch that is installed: {build['rebuild']}"
        )
    elif "cuda:0" in devices and communicators["nccl"] != "yes":
        missing.append(
            f"GPUs cannot be used: {communicators['nccl'].removeprefix('no: ')}. NCCL and CUDA's headers come "
            "from pip packages or a CUDA toolkit. With LDC_BUILD=cuda the build stops at what it misses: "
            f"{build['rebuild']}"
        )
    if lightning is not None and (problem := _autoload_problem()):
        missing.append(f"{problem} Until then, `import lightning_deepcompile` before making the Trainer.")
    return missing


def _hidden_installation() -> Path | None:
    """The folder of an installed package with a runtime, which this one shadows."""
    folders = [Path(entry, "lightning_deepcompile").resolve() for entry in sys.path]
    own = Path(__file__).resolve().parent
    return next((folder for folder in folders if folder != own and any(folder.glob("_C*.so"))), None)


def _autoload_problem() -> str:
    """The reason why ``Trainer(strategy="deepcompile")`` needs an import of this package; empty if it does not."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return 'TORCH_DEVICE_BACKEND_AUTOLOAD=0 hides strategy="deepcompile" from the Trainer: unset it.'
    if importlib.metadata.entry_points(group="torch.backends", name="lightning_deepcompile"):
        return ""
    return 'The package is not installed, so the Trainer does not know strategy="deepcompile": pip install it.'


if __name__ == "__main__":
    main()
