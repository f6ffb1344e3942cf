"""Runs the C++ tests, and the fuzz of the operators, under AddressSanitizer and UndefinedBehaviorSanitizer.

``make sanitize``. The C++ tests run under ThreadSanitizer, too, for the watchdog and what aborts. Everything is built
for the CPU, in ``build/sanitize``. Arguments go to pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "sanitize"
# vptr checks need the type information of torch's own classes.
FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"]
COMMON = ["-fno-omit-frame-pointer", "-g", "-O1"]
FLAGS += COMMON
# torch itself is not instrumented: containers that cross the border are marked on one side only.
ASAN_OPTIONS = "detect_leaks=0:detect_container_overflow=0:alloc_dealloc_mismatch=0"
# Tests take locks in two orders, on purpose.
TSAN_OPTIONS = "halt_on_error=1:detect_deadlocks=0"
# What the parts need; the rest of the runtime talks to CUDA, to process groups and to Python.
FOLDERS = ("memory", "communicators", "executors")
LEFT_OUT = re.compile(r"cuda_|nccl_|process_group_|make_communicators")


def run_parts(name: str, sanitizers: list[str], before: list[str]) -> None:
    """Compiles and runs the C++ tests.

    Args:
        name: Of the folder for what is built.
        sanitizers: Flags of the compiler.
        before: What the command that runs them begins with.
    """
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    parts = [path for room in FOLDERS for path in sorted((ROOT / "csrc" / room).glob("*.cpp"))]
    sources = [path for path in parts if not LEFT_OUT.match(path.name)]
    sources += [ROOT / "csrc" / "bindings" / "runtime_table.cpp", *sorted((ROOT / "tests" / "cpp").glob("*.cpp"))]
    headers = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "tests" / "cpp").glob("*.h")]
    newest_header = max(path.stat().st_mtime for path in headers)
    includes = [f"-I{path}" for path in (ROOT / "csrc", *include_paths())]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < max(newest_header, source.stat().st_mtime):
            subprocess.run(
                ["g++", "-std=c++20", "-Wall", *sanitizers, *includes, "-c", str(source), "-o", str(target)], check=True
            )
        return target

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        objects = list(pool.map(compile_one, sources))
    libraries = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    program = folder / "test_parts"
    link = ["-ltorch_cpu", "-lc10", "-lpthread", "-lrt"]
    subprocess.run(["g++", *sanitizers, *map(str, objects), *libraries, *link, "-o", str(program)], check=True)
    options = {"ASAN_OPTIONS": ASAN_OPTIONS, "TSAN_OPTIONS": TSAN_OPTIONS}
    subprocess.run([*before, str(program)], check=True, env={**os.environ, **options})


def run_fuzz(arguments: list[str]) -> None:
    """Builds the whole extension with the sanitizers and runs the tests of the operators on one rank with it."""
    flags = " ".join(FLAGS)
    build = {**os.environ, "LDC_BUILD": "cpu", "LDC_CXXFLAGS": flags, "LDFLAGS": flags}
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(FOLDER / "package")]
    subprocess.run(command, check=True, cwd=ROOT, env=build)
    package = next((FOLDER / "package").glob("lib.*"))
    libraries = [
        subprocess.run(["g++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True).stdout
        for name in ("asan", "ubsan")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(path.strip() for path in libraries),
        "ASAN_OPTIONS": ASAN_OPTIONS,
        "PYTHONPATH": str(package),
        "LDC_FUZZ_EXAMPLES": os.environ.get("LDC_FUZZ_EXAMPLES", "1500"),
    }
    # -P and the option keep this checkout's package, with its own extension, out of sight.
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "pythonpath=examples"]
    tests = [f"tests/runtime/test_dc_{name}.py" for name in ("fuzz", "offload", "misuse")]
    tests += ["-k", "sequence or come or misuse"]
    subprocess.run([*pytest, *tests, "--timeout=1800", *arguments], check=True, cwd=ROOT, env=environment)


if __name__ == "__main__":
    print(f"torch {torch.__version__}", flush=True)
    run_parts("memory", FLAGS, [])
    # ThreadSanitizer wants its shadow where newer kernels may put a library: addresses are not to be random.
    run_parts("threads", ["-fsanitize=thread", *COMMON], ["setarch", "-R"])
    run_fuzz(sys.argv[1:])
