"""Builds the C++ runtime, `lightning_deepcompile._C`. Everything else about the package is in pyproject.toml.

The CPU build needs g++ alone. The CUDA build also needs headers of CUDA and NCCL; no library, no nvcc, no .cu file. It
runs on CPUs, too: it finds CUDA and NCCL when it first uses them. Environment: `LDC_BUILD=auto|cpu|cuda` (`auto`: CUDA
if the headers are found, else CPU, and the build info says why; `cuda`: fail if one is missing), `MAX_JOBS`,
`LDC_CXXFLAGS` (more flags for the compiler).

`build_variant` builds for the PyTorch that is installed, into a folder of `build/prebuilt`. With
`LDC_PREBUILT=build/prebuilt` nothing is built: the wheel holds all that are there, and imports the one that fits.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import ZipFile

import torch
from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).resolve().parent
AUTOLOAD = "lightning_deepcompile_autoload.py"
PREBUILT = ROOT / "build/prebuilt"
CUDA_SOURCES = (
    "csrc/base/cuda_error.cpp",
    "csrc/communicators/nccl_communicator.cpp",
    "csrc/executors/cuda_gradient_merge.cpp",
)
# What to install for each piece that may be missing (CUDA 13 names; CUDA 12 packages end in -cu12).
REMEDIES = {
    "cuda_runtime.h": "pip install nvidia-cuda-runtime",
    "crt/host_defines.h": "pip install nvidia-cuda-crt, or set CUDA_HOME to a CUDA toolkit",
    "nv/target": "pip install nvidia-cuda-cccl, or set CUDA_HOME to a CUDA toolkit",
    "nccl.h": "pip install nvidia-nccl-cu13",
}


@dataclass
class BuildPlan:
    """What to build, and why."""

    cuda: bool
    reason: str
    include_dirs: list[str] = field(default_factory=list)
    nccl_version: str = "none"


def pip_nvidia_dirs() -> list[Path]:
    """Folders of NVIDIA's pip packages (`site-packages/nvidia/*`), those of this torch's CUDA version first."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in spec.submodule_search_locations] if spec and spec.submodule_search_locations else []
    own = f"cu{(torch.version.cuda or '').split('.')[0]}"
    names = [
        *dict.fromkeys((own, "cu13")),
        "cuda_runtime",
        "cuda_crt",
        "cuda_nvcc",
        "cuda_cccl",
        "nccl",
    ]
    return [root / name for root in roots for name in names if (root / name).is_dir()]


def toolkit_dirs() -> list[Path]:
    """Folders of a CUDA toolkit or of system packages."""
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return [Path(p) for p in (*named, "/usr/local/cuda", "/usr")]


def nccl_header_version(header: Path) -> str:
    """The version that `nccl.h` declares, such as "2.28.9"."""
    numbers = dict(re.findall(r"#define\s+NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text(errors="replace")))
    return ".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))


def make_plan() -> BuildPlan:
    """Decides between the CPU and the CUDA build from `LDC_BUILD`, torch, and what is installed.

    Raises:
        SystemExit: `LDC_BUILD` has an unknown value, or asks for CUDA and something is missing.
    """
    wanted = os.environ.get("LDC_BUILD", "auto")
    if wanted not in ("auto", "cpu", "cuda"):
        raise SystemExit(f"LDC_BUILD must be 'auto', 'cpu' or 'cuda', got {wanted!r}.")
    if wanted == "cpu":
        return BuildPlan(cuda=False, reason="LDC_BUILD=cpu")
    missing: list[str] = []
    plan = BuildPlan(cuda=True, reason="headers of CUDA and NCCL were found")
    find_headers(plan, missing)
    if not missing:
        return plan
    reason = "missing: " + "; ".join(missing)
    if wanted == "cuda":
        raise SystemExit(f"LDC_BUILD=cuda, but {reason}.")
    return BuildPlan(cuda=False, reason=reason)


def find_headers(plan: BuildPlan, missing: list[str]) -> None:
    """Fills in the include folders of a CUDA build; adds to `missing` what is not found."""
    homes = [*pip_nvidia_dirs(), *toolkit_dirs()]
    for header in ("cuda_runtime.h", "crt/host_defines.h", "nv/target", "nccl.h"):
        folder = next((home / "include" for home in homes if (home / "include" / header).is_file()), None)
        if folder is None:
            missing.append(f"{header} ({REMEDIES[header]})")
        elif str(folder) not in plan.include_dirs:
            plan.include_dirs.append(str(folder))
        if folder is not None and header == "nccl.h":
            plan.nccl_version = nccl_header_version(folder / header)


def make_extension(plan: BuildPlan) -> CppExtension:
    """The extension module for a plan."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
    return CppExtension(
        "lightning_deepcompile._C",
        sources=[source for source in sources if plan.cuda or source not in CUDA_SOURCES],
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.[ch]*")),
        include_dirs=[str(ROOT / "csrc"), *plan.include_dirs],
        define_macros=[("LDC_WITH_NCCL", "1")] if plan.cuda else [],
        extra_compile_args=[
            "-std=c++20",
            "-O2",
            "-g0",  # Python's own flags may ask for debug information, which would be nine tenths of a wheel
            "-fvisibility=hidden",
            "-Wall",
            *os.environ.get("LDC_CXXFLAGS", "").split(),
        ],
        extra_link_args=[
            # Some compilers link their own libstdc++ into the extension (toolsets beside a system's own). Its symbols
            # must stay inside: mixed with those of the libstdc++ that torch has loaded, the first number that is
            # written to a stream ends the process.
            "-Wl,--exclude-libs,ALL",
            "-lrt",  # shm_open, before glibc 2.34
        ],
    )


class Build(BuildExtension):
    """`build_ext` that writes the build info header and says what it builds."""

    def build_extensions(self) -> None:
        """Builds; a failure to compile fails the command."""
        folder = Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(
            f'#define {name} "{value}"\n'.replace("\\", "\\\\")
            for name, value in (
                ("LDC_BUILD_REASON", PLAN.reason.replace('"', "'")),
                ("LDC_NCCL_VERSION", PLAN.nccl_version),
            )
        )
        write_if_changed(folder / "ldc_build_config.h", text)
        self.extensions[0].include_dirs.append(str(folder))
        self.extensions[0].sources = write_units(self.extensions[0].sources, folder / "units")
        print(f"lightning_deepcompile: {'CUDA' if PLAN.cuda else 'CPU'} build ({PLAN.reason})")
        super().build_extensions()


def write_units(sources: list[str], folder: Path) -> list[str]:
    """Writes a file for each folder of `csrc` that includes all its sources; returns the files, the slowest first.

    Nearly all of a source's compile time goes to torch's headers, which are then read once for a folder.
    """
    rooms: dict[str, list[str]] = {}
    for source in sources:
        rooms.setdefault(Path(source).parent.name, []).append(source)
    folder.mkdir(exist_ok=True)
    units = []
    for room in sorted(rooms, key=lambda name: (name != "bindings", name)):
        units.append(folder / f"{room}.cpp")
        write_if_changed(units[-1], "".join(f'#include "{ROOT / source}"\n' for source in rooms[room]))
    return [str(unit) for unit in units]


def write_if_changed(file: Path, text: str) -> None:
    """Writes a file, and keeps the time stamp of one that has this text: no needless compiling."""
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


class BuildVariant(Build):
    """`build_variant`: builds into the folder of `build/prebuilt` that is named after the PyTorch and its devices."""

    def finalize_options(self) -> None:
        """Chooses the folders."""
        super().finalize_options()
        self.inplace, self.build_temp = False, str(ROOT / "build" / f"temp-{variant(PLAN)}")

    def get_ext_fullpath(self, name: str) -> str:
        """Returns the path of the extension."""
        return str(PREBUILT / variant(PLAN) / Path(self.get_ext_filename(name)).name)


def variant(plan: BuildPlan) -> str:
    """The name of a build, as `lightning_deepcompile.installation.variants` lists those that fit a PyTorch."""
    return f"torch{'.'.join(torch.__version__.split('.')[:2])}-{'cuda' if plan.cuda else 'cpu'}"


class PackPrebuilt(build_py):
    """`build_py` that adds a package `_C`: the builds in the folder `LDC_PREBUILT`, and a module that chooses."""

    def run(self) -> None:
        """Copies the package, then the extensions.

        Raises:
            SystemExit: If none was built.
        """
        super().run()
        folder = os.environ["LDC_PREBUILT"]
        extensions = sorted(Path(folder).glob("*/_C.*.so"))
        if not extensions:
            raise SystemExit(f"LDC_PREBUILT={folder}: no extension was built there. `make wheels` builds them.")
        package = Path(self.build_lib, "lightning_deepcompile", "_C")
        for extension in extensions:
            (package / extension.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copy2(extension, package / extension.parent.name)
        load = "from lightning_deepcompile.installation import load_prebuilt\n\nload_prebuilt(__name__, __path__[0])\n"
        (package / "__init__.py").write_text(load)


class WithExtensions(Distribution):
    """A distribution that is of one Python and platform, though it compiles nothing itself."""

    def has_ext_modules(self) -> bool:
        """Returns true."""
        return True


class EditableWheel(editable_wheel):
    """`pip install -e`: copies the module that torch imports at its start, which must outlive a checkout that moves."""

    def run(self) -> None:
        """Builds the wheel that points to the checkout, then adds the module to it."""
        super().run()
        for wheel in Path(self.dist_dir).glob("*editable*.whl"):
            add_to_wheel(wheel, ROOT / AUTOLOAD)


def add_to_wheel(wheel: Path, file: Path) -> None:
    """Writes a wheel again, with one more file at its top."""
    from wheel.wheelfile import WheelFile  # only here: a build in place does without the package `wheel`

    old = wheel.rename(wheel.with_suffix(".old"))
    with ZipFile(old) as source, WheelFile(wheel, "w") as target:
        for info in source.infolist():
            if not info.filename.endswith(".dist-info/RECORD"):  # which closing the new wheel writes
                target.writestr(info, source.read(info))
        target.write(file, file.name)
    old.unlink()


PLAN = make_plan()

if os.environ.get("LDC_PREBUILT"):
    setup(distclass=WithExtensions, cmdclass={"build_py": PackPrebuilt})
else:
    commands = {"build_ext": Build, "build_variant": BuildVariant, "editable_wheel": EditableWheel}
    setup(ext_modules=[make_extension(PLAN)], cmdclass=commands)
