"""Builds of the C++ runtime: the choice between CPU and CUDA, error messages, and the build's information."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
import torch

ROOT = Path(__file__).resolve().parents[2]
PIECES = (
    "include/cuda_runtime.h",
    "include/crt/host_defines.h",
    "include/nv/target",
    "include/nccl.h",
    "lib/libnccl.so.2",
)


@pytest.fixture
def build(monkeypatch):
    """`setup.py` as a module, without running the setup; toolkits of this machine are out of sight."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("LDC_BUILD", "cpu")
    spec = importlib.util.spec_from_file_location("ldc_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ldc_setup", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "pip_nvidia_dirs", list)
    monkeypatch.setattr(module, "toolkit_dirs", list)
    return module


@pytest.fixture
def toolkit(build, monkeypatch, tmp_path):
    """A folder with every piece of a CUDA build, and a torch that has CUDA."""
    for piece in PIECES:
        (tmp_path / piece).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / piece).write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n")
    monkeypatch.setattr(build, "toolkit_dirs", lambda: [tmp_path])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return tmp_path


def test_build_info_describes_this_build():
    from lightning_deepcompile import _C

    info = _C.build_info()
    assert set(info) == {"mode", "reason", "nccl", "compiler", "torch"}
    assert info["mode"] in ("cpu", "cuda") and all(info.values())
    assert torch.__version__.split("+")[0] == info["torch"]
    assert (info["nccl"] == "none") == (info["mode"] == "cpu")


def test_cpu_on_request(build, toolkit):
    plan = build.make_plan()
    assert not plan.cuda and plan.reason == "LDC_BUILD=cpu"
    assert not {*build.CUDA_SOURCES} & {*build.make_extension(plan).sources}


@pytest.mark.parametrize("mode", ["auto", "cuda"])
def test_cuda_when_every_piece_is_there(build, toolkit, monkeypatch, mode):
    monkeypatch.setenv("LDC_BUILD", mode)
    plan = build.make_plan()
    assert plan.cuda and plan.nccl_version == "2.28.9"
    assert plan.include_dirs == [str(toolkit / "include")] and plan.library_dirs == [str(toolkit / "lib")]
    extension = build.make_extension(plan)
    assert {*build.CUDA_SOURCES} <= {*extension.sources} and ("LDC_WITH_NCCL", "1") in extension.define_macros


@pytest.mark.parametrize("piece", PIECES)
def test_a_missing_piece_is_named_with_its_remedy(build, toolkit, monkeypatch, piece):
    (toolkit / piece).unlink()
    name = piece.split("/", 1)[1]
    monkeypatch.setenv("LDC_BUILD", "auto")
    plan = build.make_plan()
    assert not plan.cuda and name in plan.reason and "pip install" in plan.reason
    monkeypatch.setenv("LDC_BUILD", "cuda")
    with pytest.raises(SystemExit, match=f"{name}.*pip install"):
        build.make_plan()


def test_cuda_on_request_needs_a_torch_with_cuda(build, monkeypatch):
    monkeypatch.setenv("LDC_BUILD", "cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit, match="install a CUDA build of torch"):
        build.make_plan()


def test_unknown_mode_is_refused(build, monkeypatch):
    monkeypatch.setenv("LDC_BUILD", "gpu")
    with pytest.raises(SystemExit, match="'auto', 'cpu' or 'cuda', got 'gpu'"):
        build.make_plan()


def test_a_compile_error_fails_the_build(tmp_path, monkeypatch):
    (tmp_path / "setup.py").write_text((ROOT / "setup.py").read_text())
    (tmp_path / "csrc" / "folder").mkdir(parents=True)
    (tmp_path / "csrc" / "folder" / "broken.cpp").write_text("#error this file does not compile\n")
    (tmp_path / "lightning_deepcompile").mkdir()
    monkeypatch.setenv("LDC_BUILD", "cpu")
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "this file does not compile" in done.stdout + done.stderr
    assert not list((tmp_path / "lightning_deepcompile").iterdir())


def test_folders_of_cpp_files_include_what_comes_before_them():
    source = ROOT / "csrc"
    order = re.findall(r"^- `(\w+)/`", (source / "README.md").read_text(), re.MULTILINE)
    assert set(order) == {path.name for path in source.iterdir() if path.is_dir()}
    for file in [*source.rglob("*.h"), *source.rglob("*.cpp")]:
        for folder in re.findall(r'^#include "(\w+)/', file.read_text(), re.MULTILINE):
            assert order.index(folder) <= order.index(file.parent.name), f"{file} includes a header of {folder}/"
